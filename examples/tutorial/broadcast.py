"""The tensor of one rank goes to all.

The other ranks may give memory that is filled in place, or nothing: then they need not know
what comes, and get it as the result.
"""

from __future__ import annotations

import torch

import aiodist


async def broadcast(group: aiodist.Group) -> None:
    tensor = torch.tensor([group.rank], dtype=torch.float32)
    await group.broadcast(tensor, src=0)
    print(f"[{group.rank}] data = {tensor}")

    numbers = torch.arange(2, dtype=torch.int64) + 1 + 2 * group.rank
    await group.broadcast(numbers, src=0)
    print(f"[{group.rank}] numbers = {numbers}")

    settings = {"rate": 0.1, "layers": [64, 10]} if group.rank == 0 else None
    settings = await group.broadcast(settings, src=0)
    print(f"[{group.rank}] settings = {settings}")


def main() -> None:
    aiodist.run(broadcast, nprocs=4)


if __name__ == "__main__":
    main()
