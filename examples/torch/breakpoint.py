"""Debugging one rank: `torch.distributed.breakpoint` stops rank 0, the other ranks wait.

A program of PyTorch's tutorials, with ``backend="aiodist"``::

    torchrun --standalone --nnodes=1 --nproc-per-node=2 examples/torch/breakpoint.py
"""

import torch
import torch.distributed as dist


def run():
    rank = dist.get_rank()
    tensor = torch.zeros(1)
    torch.distributed.breakpoint(0)
    if rank == 0:
        tensor += 1
        # Send the tensor to process 1
        dist.send(tensor=tensor, dst=1)
        print("My rank: ", dist.get_rank())
    else:
        # Receive tensor from process 0
        dist.recv(tensor=tensor, src=0)
    print("Rank ", rank, " has data ", tensor[0])


if __name__ == "__main__":
    dist.init_process_group("aiodist")
    run()
    dist.destroy_process_group()
