"""The oldest tutorial: a blocking send, then an all-reduce with `reduce_op`, in forked processes.

A program of PyTorch's tutorials, with ``backend="aiodist"``::

    python examples/torch/blocking.py

The tutorial says ``backend="tcp"``, a backend that torch has no more. A program that still says so
runs as it stands with ``AIODIST_TORCH_REPLACES=tcp`` in its environment.
"""

import os

import torch
import torch.distributed as dist
from torch.multiprocessing import Process


def blocking(rank, size):
    """Blocking point-to-point communication."""
    tensor = torch.zeros(1)
    if rank == 0:
        tensor += 1
        # Send the tensor to process 1
        dist.send(tensor=tensor, dst=1)
    else:
        # Receive tensor from process 0
        dist.recv(tensor=tensor, src=0)
    print("Rank ", rank, " has data ", tensor[0])


def all_reduce(rank, size):
    """All-Reduce example."""
    group = dist.new_group([0, 1])
    tensor = torch.ones(1)
    dist.all_reduce(tensor, op=dist.reduce_op.SUM, group=group)
    print("Rank ", rank, " has data ", tensor[0])


def run(rank, size):
    blocking(rank, size)
    all_reduce(rank, size)


def init_processes(rank, size, fn, backend="aiodist"):
    """Initialize the distributed environment."""
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = "29500"
    dist.init_process_group(backend, rank=rank, world_size=size)
    fn(rank, size)


if __name__ == "__main__":
    size = 2
    processes = []
    for rank in range(size):
        p = Process(target=init_processes, args=(rank, size, run))
        p.start()
        processes.append(p)

    for p in processes:
        p.join()
