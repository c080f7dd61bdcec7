"""A group of some ranks.

Only its members call `subgroup`; the others need not know. It numbers its ranks anew and is
independent of the group that it came from.
"""

from __future__ import annotations

import torch

import aiodist
from aiodist import ReduceOp


async def in_a_pair(group: aiodist.Group) -> None:
    members = [0, 1]
    if group.rank not in members:
        print(f"Rank: {group.rank}, is not in the pair")
        return
    pair = await group.subgroup(members)
    tensor = torch.tensor([1.0, 2.0, 3.0] if pair.rank == 0 else [4.0, 5.0, 6.0])
    print(f"Rank: {group.rank}, own tensor: {tensor}")
    await pair.all_reduce(tensor, op=ReduceOp.SUM)
    print(f"Rank: {group.rank}, has data: {tensor}")
    await pair.close()


def main() -> None:
    aiodist.run(in_a_pair, nprocs=3)


if __name__ == "__main__":
    main()
