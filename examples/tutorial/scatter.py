"""One rank hands a tensor of its own to each rank: rank i gets the i-th of the list."""

from __future__ import annotations

import torch

import aiodist


async def scatter(group: aiodist.Group) -> None:
    tensor = torch.empty(1)
    parts = None
    if group.rank == 0:
        parts = [torch.tensor([i + 1], dtype=torch.float32) for i in range(group.size)]
    await group.scatter(parts, src=0, out=tensor)
    print(f"[{group.rank}] data = {tensor[0]}")

    pairs = [torch.tensor([i, i]) for i in range(group.size)] if group.rank == 0 else None
    pair = await group.scatter(pairs, src=0)
    print(f"[{group.rank}] pair = {pair}")


def main() -> None:
    aiodist.run(scatter, nprocs=4)


if __name__ == "__main__":
    main()
