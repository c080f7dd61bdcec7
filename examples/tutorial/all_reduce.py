"""The sum over all ranks, at all of them: the same bits everywhere, in every run."""

from __future__ import annotations

import torch

import aiodist
from aiodist import ReduceOp


async def all_reduce(group: aiodist.Group) -> None:
    tensor = torch.ones(1)
    await group.all_reduce(tensor, op=ReduceOp.SUM)
    print(f"[{group.rank}] data = {tensor[0]}")

    numbers = torch.arange(2, dtype=torch.int64) + 1 + 2 * group.rank
    await group.all_reduce(numbers)
    print(f"[{group.rank}] numbers = {numbers}")

    largest = await group.all_reduce(float(group.rank), op=ReduceOp.MAX)
    print(f"[{group.rank}] largest rank = {largest}")


def main() -> None:
    aiodist.run(all_reduce, nprocs=4)


if __name__ == "__main__":
    main()
