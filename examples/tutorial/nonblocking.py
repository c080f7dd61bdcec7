"""Communication that overlaps with computation.

Every operation starts when it is called and returns a future: what is done between the call and
the ``await`` overlaps with the transfer. Long computation belongs in a thread, so that the event
loop can move bytes meanwhile. The tensor is safe to read after the ``await``, not before.
"""

from __future__ import annotations

import asyncio

import torch

import aiodist


def compute(n: int) -> int:
    return sum(i * i for i in range(n))


async def overlap(group: aiodist.Group) -> None:
    tensor = torch.zeros(1)
    if group.rank == 0:
        tensor += 1
        work = group.isend(tensor, dst=1)
        print("Rank 0 started sending")
    else:
        work = group.irecv(src=0, out=tensor)
        print("Rank 1 started receiving")
    result = await asyncio.to_thread(compute, 100_000)
    print(f"Rank {group.rank} computed {result} meanwhile")
    await work
    print(f"Rank {group.rank} has data {tensor[0]}")


def main() -> None:
    aiodist.run(overlap, nprocs=2)


if __name__ == "__main__":
    main()
