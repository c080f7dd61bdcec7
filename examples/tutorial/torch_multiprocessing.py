"""Started by torch.multiprocessing, for programs that start their processes like that already.

As in the tutorials, the environment says where to meet: rank 0 serves that address, the others
come to it.
"""

from __future__ import annotations

import asyncio
import os

import torch
import torch.multiprocessing as mp

import aiodist


async def work() -> None:
    async with aiodist.connect() as group:
        tensor = torch.ones(1)
        await group.all_reduce(tensor)
        print("Rank ", group.rank, " has data ", tensor[0])


def init_process(rank: int, size: int) -> None:
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29500")
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size))
    asyncio.run(work())


def main() -> None:
    size = 2
    mp.spawn(init_process, args=(size,), nprocs=size)
    print("finished")


if __name__ == "__main__":
    main()
