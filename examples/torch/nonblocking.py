"""Immediate send and receive, in processes that are forked.

A program of PyTorch's tutorials, with ``backend="aiodist"``::

    python examples/torch/nonblocking.py
"""

import os

import torch
import torch.distributed as dist
from torch.multiprocessing import Process


def run(rank, size):
    """Non-blocking point-to-point communication."""
    tensor = torch.zeros(1)
    req = None
    if rank == 0:
        tensor += 1
        # Send the tensor to process 1
        req = dist.isend(tensor=tensor, dst=1)
        print("Rank 0 started sending")
    else:
        # Receive tensor from process 0
        req = dist.irecv(tensor=tensor, src=0)
        print("Rank 1 started receiving")
        # The tutorial prints tensor[0] here. It may be 0.0 or 1.0 before req.wait() has returned.
    req.wait()
    print("Rank ", rank, " has data ", tensor[0])


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
