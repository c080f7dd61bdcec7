"""Processor time of a rank, where many ranks share one process and nothing else is measured.

``python -m benchmarks.growth 128 all_reduce 65536 65544``: the ranks, the operation, and the bytes
of each rank's array; the sizes take turns, and the least of some rounds is printed.
"""

from __future__ import annotations

import asyncio
import sys
import time

import numpy as np

import aiodist

ROUNDS, TIMES = 5, 3


async def measure(ranks: int, op: str, sizes: list[int]) -> dict[int, float]:
    """Seconds of processor time that a rank takes, by size."""
    least = dict.fromkeys(sizes, float("inf"))
    async with aiodist.local(ranks) as groups:
        arrays = {n: [np.ones(n // 4, np.float32) for _ in groups] for n in sizes}

        async def once(nbytes: int) -> None:
            pairs = zip(groups, arrays[nbytes], strict=True)
            await asyncio.gather(*[getattr(group, op)(x) for group, x in pairs])

        for nbytes in sizes * ROUNDS:
            await once(nbytes)
            start = time.process_time()
            for _ in range(TIMES):
                await once(nbytes)
            spent = (time.process_time() - start) / TIMES / ranks
            least[nbytes] = min(least[nbytes], spent)
    return least


def main(ranks: str, op: str, *sizes: str) -> None:
    found = asyncio.run(measure(int(ranks), op, [int(size) for size in sizes]))
    first = next(iter(found.values()))
    for nbytes, seconds in found.items():
        print(f"{op} of {nbytes} bytes, n={ranks}: {seconds * 1e6:.0f} µs a rank, "
              f"{seconds / first:.2f} times the first")  # fmt: skip


if __name__ == "__main__":
    main(*sys.argv[1:])
