"""``python -m benchmarks.tracing``: what a trace costs the operations that are in it.

Two groups of the same ranks, one of them traced, take turns in one run, in blocks of some
milliseconds and in changing order. So whatever else this machine does happens to both. Compared are
the lower deciles of the blocks, as a block can be slower for many reasons, but not faster.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import tempfile
import time

import numpy as np
from rich.console import Console
from rich.table import Table

import aiodist
from aiodist.rank.tracing import VARIABLE
from aiodist.transports.surroundings import tell_time_exactly


async def rank(
    own: aiodist.Group, sizes: list[int], transports: str, blocks: int, seconds: float, where: str
) -> list[tuple[int, float, float]]:
    """One rank of both groups: bytes, and seconds of an all_reduce without a trace and with it."""
    address, loop = own._actor.address, asyncio.get_running_loop()
    token = os.environ.get("AIODIST_TOKEN")
    groups = []
    for is_traced in (False, True):
        if is_traced:
            os.environ[VARIABLE] = where
        groups.append(
            await aiodist.connect(
                address,
                group=f"traced {is_traced}",
                rank=own.rank,
                size=own.size,
                transports=transports,
                token=token,
            )
        )
    found: list[tuple[int, float, float]] = []
    order = random.Random(1)  # the same at all ranks
    for nbytes in sizes:
        x = np.zeros(nbytes // 4, np.float32)
        count = await calibrated(groups, x, seconds)
        times: tuple[list[float], list[float]] = ([], [])
        for _ in range(blocks):
            turns = [0, 1]
            order.shuffle(turns)
            for turn in turns:
                # A traced rank has its loop tell the time exactly, which is not to help the other.
                if turn == 0 and "time" in vars(loop):
                    del loop.time
                elif turn == 1:
                    tell_time_exactly(loop)
                times[turn].append(await block(groups[turn], x, count))
        found.append((nbytes, *(statistics.quantiles(one, n=10)[0] for one in times)))
    for group in groups:
        await group.close()
    return found


async def calibrated(groups: list[aiodist.Group], x: np.ndarray, seconds: float) -> int:
    """How many of them take about so many seconds; the same at all ranks."""
    for group in groups:
        await block(group, x, 100)
    took = await block(groups[0], x, 100)
    return int(await groups[0].all_reduce(max(10, int(seconds / took)), aiodist.ReduceOp.MAX))


async def block(group: aiodist.Group, x: np.ndarray, count: int) -> float:
    """Seconds of one of `count` in a row."""
    await group.barrier()
    began = time.perf_counter()
    for _ in range(count):
        await group.all_reduce(x)
    return (time.perf_counter() - began) / count


def main() -> None:
    """Measure, and print a table."""
    asked = argparse.ArgumentParser(prog="python -m benchmarks.tracing", description=__doc__)
    asked.add_argument("--ranks", type=int, default=2)
    asked.add_argument("--sizes", type=int, nargs="+", default=[8, 1024, 65536, 1048576])
    asked.add_argument("--transports", nargs="+", default=["shm", "tcp"])
    asked.add_argument("--blocks", type=int, default=100)
    asked.add_argument("--seconds", type=float, default=0.01, help="of a block, about")
    given = asked.parse_args()
    table = Table("transport", "bytes", "without (us)", "traced (us)", "ratio")
    for transport in given.transports:
        with tempfile.TemporaryDirectory() as where:
            arguments = (given.sizes, transport, given.blocks, given.seconds, where)
            found = aiodist.run(rank, given.ranks, arguments)[0]
        for nbytes, off, on in found:
            cells = f"{off * 1e6:.2f}", f"{on * 1e6:.2f}", f"{on / off:.3f}"
            table.add_row(transport, str(nbytes), *cells)
    Console().print(table)


if __name__ == "__main__":
    main()
