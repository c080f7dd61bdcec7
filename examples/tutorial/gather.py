"""One rank collects a tensor of each rank. No list to prepare, and shapes may differ."""

from __future__ import annotations

import torch

import aiodist


async def gather(group: aiodist.Group) -> None:
    tensor = torch.tensor([group.rank], dtype=torch.float32)
    tensors = await group.gather(tensor, dst=0)
    if group.rank == 0:
        print(f"[{group.rank}] data = {tensors}")

    numbers = await group.gather(torch.arange(2) + 1 + 2 * group.rank, dst=0)
    if group.rank == 0:
        print(f"[{group.rank}] numbers = {numbers}")

    ragged = await group.gather(torch.arange(group.rank), dst=0)
    if ragged is not None:
        print(f"[{group.rank}] lengths = {[len(part) for part in ragged]}")


def main() -> None:
    aiodist.run(gather, nprocs=4)


if __name__ == "__main__":
    main()
