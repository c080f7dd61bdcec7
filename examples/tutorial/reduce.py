"""The sum over all ranks, at one of them.

The tensors of the other ranks keep what they held: torch.distributed may leave partial sums
there.
"""

from __future__ import annotations

import torch

import aiodist
from aiodist import ReduceOp


async def reduce(group: aiodist.Group) -> None:
    tensor = torch.ones(1)
    await group.reduce(tensor, dst=0, op=ReduceOp.SUM)
    print(f"[{group.rank}] data = {tensor[0]}")

    numbers = torch.arange(2, dtype=torch.int64) + 1 + 2 * group.rank
    await group.reduce(numbers, dst=3, op=ReduceOp.SUM)
    print(f"[{group.rank}] numbers = {numbers}")


def main() -> None:
    aiodist.run(reduce, nprocs=4)


if __name__ == "__main__":
    main()
