"""Rank and address from environment variables: set by hand, by Slurm, or by torchrun.

A program of PyTorch's tutorials, with ``backend="aiodist"``::

    WORLD_SIZE=2 RANK=0 python examples/torch/by_environment.py &
    WORLD_SIZE=2 RANK=1 python examples/torch/by_environment.py

    torchrun --standalone --nnodes=1 --nproc-per-node=2 examples/torch/by_environment.py
"""

import os

import torch
import torch.distributed as dist


def run(rank, size):
    tensor = torch.zeros(1)
    if rank == 0:
        tensor += 1
        # Send the tensor to process 1
        dist.send(tensor=tensor, dst=1)
    else:
        # Receive tensor from process 0
        dist.recv(tensor=tensor, src=0)
    print("Rank ", rank, " has data ", tensor[0])

    # Simple collective communication.
    group = dist.new_group([0, 1])
    tensor = torch.ones(1)
    dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=group)
    print("Rank ", rank, " has data ", tensor[0])


def init_process(rank, size, fn, backend="aiodist"):
    """Initialize the distributed environment."""
    if "MASTER_ADDR" not in os.environ:
        os.environ["MASTER_ADDR"] = "127.0.0.1"
    if "MASTER_PORT" not in os.environ:
        os.environ["MASTER_PORT"] = "29500"
    print("Starting init process group. Current rank: ", rank)
    dist.init_process_group(backend, rank=rank, world_size=size)
    print("Finished init process group. Current rank: ", rank)
    fn(rank, size)


if __name__ == "__main__":
    world_size = int(os.environ["WORLD_SIZE"])
    current_rank = int(os.environ["RANK"])
    init_process(current_rank, world_size, run)
