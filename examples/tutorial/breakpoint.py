"""A debugger on one rank, while the others wait. That rank needs a terminal to type at::

aiodist run -n 2 --stdin 0 breakpoint.py
"""

from __future__ import annotations

import asyncio

import torch

import aiodist


async def run(group: aiodist.Group) -> None:
    tensor = torch.zeros(1)
    await aiodist.breakpoint(group, rank=0)
    if group.rank == 0:
        tensor += 1
        await group.send(tensor, dst=1)
        print("My rank: ", group.rank)
    else:
        await group.recv(src=0, out=tensor)
    print(f"Rank {group.rank} has data {tensor[0]}")


async def start() -> None:
    async with aiodist.connect() as group:
        await run(group)


def main() -> None:
    asyncio.run(start())


if __name__ == "__main__":
    main()
