"""Every rank collects a tensor of each rank."""

from __future__ import annotations

import torch

import aiodist


async def all_gather(group: aiodist.Group) -> None:
    tensor = torch.tensor([group.rank], dtype=torch.float32)
    tensors = await group.all_gather(tensor)
    print(f"[{group.rank}] data = {tensors}")

    numbers = torch.arange(2, dtype=torch.int64) + 1 + 2 * group.rank
    table = torch.empty(group.size, 2, dtype=torch.int64)
    await group.all_gather(numbers, out=table)
    print(f"[{group.rank}] table = {table.tolist()}")


def main() -> None:
    aiodist.run(all_gather, nprocs=4)


if __name__ == "__main__":
    main()
