"""Channels of weights between hosts that are far from each other, beside `group.broadcast` of the
same bytes, in turns: ``python -m benchmarks.far_weights``.

The hosts are namespaces that `aiodist.testing.long_links` joins, which needs root. Rank 0 of a
group publishes, the others subscribe, and the coordinator is in rank 0's process. Seconds are from
the call on rank 0 until all have the bytes: medians, but for the first version, for which
participants have to find each other.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from functools import partial
from typing import NamedTuple

import numpy as np

import aiodist
from aiodist.testing.long_links import LongLine
from benchmarks.far_ranks import said_by_first

MIB = 1 << 20
TURNS = 5
PATIENCE = 30.0


class Case(NamedTuple):
    rate: float  # bytes per second
    delay: float  # seconds each way
    mib: int
    subscribers: int

    @property
    def asked(self) -> float:
        """Seconds that a version may take beside those of the broadcast times 1.2."""
        return 4 * self.delay


CASES = (
    Case(50e6, 0.05, 8, 1),
    Case(50e6, 0.05, 64, 3),
    Case(20e6, 0.01, 8, 3),
    Case(50e6, 0.05, 8, 8),
    Case(20e6, 0.01, 8, 8),
)


async def member(nbytes: int, turns: int) -> None:
    """One rank: broadcasts and versions in turns. Rank 0 prints the seconds of both."""
    async with aiodist.connect(timeout=60, op_timeout=120) as group:
        x = np.zeros(nbytes, np.uint8)
        options = {"address": group.address, "patience": PATIENCE, "timeout": 60.0}
        found: dict[str, list[float]] = {"broadcast": [], "channel": []}

        async def ended(start: float | None) -> float:
            """When the last one was done: seconds after `start` of rank 0."""
            ends = await group.all_gather(time.monotonic() if start is None else start)
            return max(ends[1:]) - ends[0]

        async def turn(version: int, out: object) -> None:
            await group.barrier()
            start = time.monotonic() if group.rank == 0 else None
            await group.broadcast(x)
            found["broadcast"].append(await ended(start))
            await group.barrier()
            start = time.monotonic() if group.rank == 0 else None
            if isinstance(out, aiodist.Publisher):
                await out.publish({"w": x}, version=version)
            elif isinstance(out, aiodist.Subscriber):
                await out.latest(newer_than=version - 1)
            found["channel"].append(await ended(start))
            await asyncio.sleep(1.2)  # signs of life are given, as between the steps of a training

        make = partial(aiodist.publisher, deltas=False) if group.rank == 0 else aiodist.subscriber
        async with make("benchmark", **options) as out:  # type: ignore[operator]
            for version in range(1 + turns):
                await turn(version, out)
            await group.barrier()
        if group.rank == 0:
            print(json.dumps(found), flush=True)


def measured(case: Case, turns: int) -> dict[str, list[float]]:
    count = 1 + case.subscribers
    arguments = ("--turns", str(turns), "--member", str(case.mib * MIB))
    line = LongLine(case.rate, case.delay)
    found: dict[str, list[float]] = said_by_first(
        "benchmarks.far_weights", *arguments, hosts=count, line=line, seconds=300
    )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--cases", default=",".join(map(str, range(len(CASES)))))
    parser.add_argument("--member", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.member is not None:
        asyncio.run(member(options.member, options.turns))
        return
    print("| MB/s, ms each way | MiB | hosts | broadcast | channel | asked | first version |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for number in options.cases.split(","):
        case = CASES[int(number)]
        found = measured(case, options.turns)
        broadcast = statistics.median(found["broadcast"][1:])
        channel = statistics.median(found["channel"][1:])
        asked = 1.2 * broadcast + case.asked
        print(
            f"| {case.rate / 1e6:.0f}, {case.delay * 1e3:.0f} | {case.mib} | {case.subscribers} |"
            f" {broadcast:.2f} s | {channel:.2f} s |"
            f" {asked:.2f} s{'' if channel <= asked else ' !'}"
            f" | {found['channel'][0]:.2f} s |",
            flush=True,
        )


if __name__ == "__main__":
    main()
