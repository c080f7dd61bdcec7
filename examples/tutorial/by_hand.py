"""Started by hand, in as many terminals as there are ranks, on one host or on several.

In the first terminal::

    MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 WORLD_SIZE=2 RANK=0 python by_hand.py

and the same with ``RANK=1`` in the second one. Rank 0 waits for the others at that address. A
script of Slurm that sets these variables, or torchrun, starts it just as well.
"""

from __future__ import annotations

import asyncio
import os

import torch

import aiodist


async def start() -> None:
    print("MASTER_ADDR: ", os.environ.setdefault("MASTER_ADDR", "127.0.0.1"))
    print("MASTER_PORT: ", os.environ.setdefault("MASTER_PORT", "29500"))
    print("Starting to connect. Current rank: ", os.environ["RANK"])
    async with aiodist.connect() as group:
        print("Connected. Current rank: ", group.rank)
        tensor = torch.ones(1)
        await group.all_reduce(tensor)
        print("Rank ", group.rank, " has data ", tensor[0])


def main() -> None:
    asyncio.run(start())


if __name__ == "__main__":
    main()
