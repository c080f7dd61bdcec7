"""``make kill-times``: how long survivors take to notice a killed rank, and to go on without it.

In each round ranks run one all_reduce after the other, until one of them gets SIGKILL. Each
survivor takes the time at which its error is raised, and that at which the first all_reduce after
`shrink` is done. Times are of the monotonic clock, which the processes of a host share; from right
before the kill. In a round the slowest survivor counts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

import aiodist

ASKED_MS = {"error": 20.0, "gone on": 250.0}


class Round(NamedTuple):
    """Milliseconds from the kill, of the slowest survivor."""

    error: float
    gone_on: float


async def rank(address: str, number: int, size: int, transport: str) -> None:
    """One process: works until a rank is lost, goes on, and says when."""
    connecting = aiodist.connect(address, rank=number, size=size, transports=transport)
    async with connecting as group:
        x = np.ones(1000)
        for _ in range(200):
            await group.all_reduce(x)
        print("ready", flush=True)
        try:
            while True:
                await group.all_reduce(x)
        except aiodist.GroupBrokenError:
            error = time.monotonic()
        group = await group.shrink()
        assert await group.all_reduce(1) == size - 1
        print(json.dumps([error, time.monotonic()]), flush=True)


async def play(size: int, transport: str, chooser: random.Random) -> Round:
    """One round."""
    async with aiodist.Coordinator() as coordinator:
        processes = [
            await asyncio.create_subprocess_exec(
                sys.executable, "-m", "benchmarks.kill_times", "--rank", str(number),
                "--address", coordinator.address, "--size", str(size),
                "--transports", transport, stdout=asyncio.subprocess.PIPE,
            )
            for number in range(size)
        ]  # fmt: skip
        try:
            outputs = [process.stdout for process in processes if process.stdout is not None]
            for output in outputs:
                if await output.readline() != b"ready\n":
                    raise RuntimeError("a rank did not start")
            await asyncio.sleep(chooser.uniform(0.05, 0.15))  # at any point of an operation
            victim = chooser.randrange(size)
            killed = time.monotonic()
            processes[victim].send_signal(signal.SIGKILL)
            times = [
                json.loads(await output.readline())
                for number, output in enumerate(outputs)
                if number != victim
            ]
            for process in processes:
                await process.communicate()
        finally:
            for process in processes:
                if process.returncode is None:
                    process.kill()
                    await process.wait()
    error, gone_on = zip(*times, strict=True)
    return Round((max(error) - killed) * 1e3, (max(gone_on) - killed) * 1e3)


async def measure(options: argparse.Namespace) -> int:
    chooser = random.Random(options.seed)
    failed = 0
    for transport in options.transports.split(","):
        rounds = [await play(options.size, transport, chooser) for _ in range(options.rounds)]
        for what, asked in ASKED_MS.items():
            values = [getattr(one, what.replace(" ", "_")) for one in rounds]
            median = statistics.median(values)
            print(
                f"{transport:5} {what:8} median {median:7.1f} ms   max {max(values):7.1f} ms   "
                f"asked < {asked:g} ms",
                flush=True,
            )
            failed += median >= asked
    return 1 if failed else 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--size", type=int, default=4)
    parser.add_argument("--transports", default="shm,tcp")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.rank is not None:
        asyncio.run(rank(options.address, options.rank, options.size, options.transports))
        return 0
    return asyncio.run(measure(options))


if __name__ == "__main__":
    sys.exit(main())
