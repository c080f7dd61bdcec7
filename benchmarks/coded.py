"""all_reduce by codecs between hosts that are far from each other, beside float32, in turns:
``python -m benchmarks.coded``.

The hosts are namespaces that `aiodist.testing.long_links` joins, which needs root. Seconds are
medians over turns of the slowest rank. All hosts share the cores of this machine, so coding takes
longer here than on hosts of their own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Sequence

import numpy as np
from rich.console import Console
from rich.table import Table

import aiodist
from aiodist.codecs import Codec, bf16, int4, int8, topk
from aiodist.testing.long_links import LongLine
from benchmarks.far_ranks import said_by_first

RATE = 50e6
"""Bytes per second of each line, each way."""
DELAYS = (0.01, 0.05)
"""Seconds from host to host."""
CODECS: Sequence[Codec | None] = [None, bf16(), int8(), int4(), topk(0.01)]


async def member(mib: int, turns: int) -> None:
    """One rank. Rank 0 prints the seconds of each turn, by codec."""
    async with aiodist.connect(timeout=60, op_timeout=120) as group:
        x = np.random.default_rng(group.rank).standard_normal(mib << 18).astype(np.float32)
        found: list[list[float]] = [[] for _ in CODECS]
        for turn in range(1 + turns):
            for codec, times in zip(CODECS, found, strict=True):
                values = x.copy()
                await group.barrier()
                start = time.monotonic()
                await group.all_reduce(values, aiodist.ReduceOp.AVG, codec=codec)
                slowest = max(await group.all_gather(time.monotonic() - start))
                if turn:  # the first one makes connections and plans
                    times.append(slowest)
        if group.rank == 0:
            print(json.dumps(found), flush=True)


def measured(delay: float, hosts: int, mib: int, turns: int) -> list[list[float]]:
    """The seconds of each turn, by codec."""
    arguments = ("--member", "--mib", str(mib), "--turns", str(turns))
    line = LongLine(RATE, delay)
    found: list[list[float]] = said_by_first(
        "benchmarks.coded", *arguments, hosts=hosts, line=line, seconds=600
    )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.coded", description=__doc__)
    parser.add_argument("--mib", type=int, default=64, help="of float32 (default: 64)")
    parser.add_argument("--hosts", type=int, default=4, help="one rank on each (default: 4)")
    parser.add_argument("--turns", type=int, default=5, help="of each codec (default: 5)")
    parser.add_argument("--member", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.member:
        asyncio.run(member(given.mib, given.turns))
        return
    table = Table("each way", *[codec.name if codec else "float32" for codec in CODECS])
    for delay in DELAYS:
        medians = [
            statistics.median(times)
            for times in measured(delay, given.hosts, given.mib, given.turns)
        ]
        cells = [f"{each:.2f} s, {medians[0] / each:.2f} x" for each in medians]
        table.add_row(f"{delay * 1e3:.0f} ms", *cells)
    Console().print(table)


if __name__ == "__main__":
    main()
