"""What a channel of weights costs, and how fast it is: ``python -m benchmarks.weights``.

All processes run on this host. Those of one host map the publisher's memory; for hosts, each
process is kept to TCP, so that what crosses is what would cross between hosts, with all of them on
the same cores.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np

import aiodist

CHANNEL = "benchmark"
TIMES = 5

Process = asyncio.subprocess.Process


async def subscribe(address: str, transports: str) -> None:
    """One subscriber: says, as lines of JSON, when it has which version, and what it maps."""
    only = transports.split(",") if transports else None
    async with aiodist.subscriber(CHANNEL, address=address, transports=only) as weights:
        print(json.dumps({"version": -1}), flush=True)
        async for version, _ in weights:
            at = time.monotonic()
            print(json.dumps({"version": version, "at": at, "maps": mapped()}), flush=True)


def mapped() -> list[str]:
    """The memory of versions that this process maps: its inodes."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sorted({line.split()[4] for line in lines if "memfd:aiodist-weights" in line})


@asynccontextmanager
async def subscribers(address: str, count: int, transports: str) -> AsyncIterator[list[Process]]:
    started = [
        await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "benchmarks.weights", "--subscribe", address),
            *("--transports", transports),
            stdout=asyncio.subprocess.PIPE,
        )
        for _ in range(count)
    ]
    try:
        for process in started:
            await said(process, -1)
        yield started
    finally:
        for process in started:
            process.kill()
        for process in started:
            await process.communicate()


async def said(process: Process, version: int) -> dict[str, Any]:
    assert process.stdout is not None
    while True:
        line = await process.stdout.readline()
        if not line:
            raise RuntimeError("a subscriber has ended")
        found: dict[str, Any] = json.loads(line)
        if found["version"] == version:
            return found


class Ticker:
    """How late the event loop is, meanwhile."""

    def __init__(self) -> None:
        self.late: list[float] = []
        self._task = asyncio.ensure_future(self._tick())

    async def _tick(self) -> None:
        while True:
            due = time.perf_counter() + 0.001
            await asyncio.sleep(0.001)
            self.late.append(time.perf_counter() - due)

    def p99(self) -> float:
        self._task.cancel()
        return float(np.quantile(self.late, 0.99))


async def measure(count: int, mib: int, transports: str) -> dict[str, float]:
    """Medians: seconds of `publish`, and from its end until all have it; by how much later the loop
    is meanwhile than at rest (p99); the bytes that the publisher sent, in sizes of a version;
    copies in shared memory."""
    params = {f"layer {at}": np.ones((mib << 20) // 16, np.float32) for at in range(4)}
    only = transports.split(",") if transports else None
    publishing, spreading, sent, copies = [], [], [], 0
    async with (
        aiodist.Coordinator() as coordinator,
        aiodist.publisher(CHANNEL, address=coordinator.address, keep=1, transports=only) as out,
        subscribers(coordinator.address, count, transports) as started,
    ):
        ticker = Ticker()
        await asyncio.sleep(0.5)
        rest, late = ticker.p99(), 0.0
        for version in range(1 + TIMES):
            before = out.bytes_sent
            ticker = Ticker()
            begin = time.monotonic()
            await out.publish(params, version=version)
            published = time.monotonic()
            late = max(late, ticker.p99() if version else 0.0)
            answers = await asyncio.gather(*(said(process, version) for process in started))
            await asyncio.sleep(0.2)  # transfers are counted when they have ended
            publishing.append(published - begin)
            spreading.append(
                max((answer["at"] for answer in answers), default=published) - published
            )
            sent.append((out.bytes_sent - before) / (mib << 20))
            copies = len({inode for answer in answers for inode in answer["maps"]})
    return {
        "publish": statistics.median(publishing[1:]),
        "spread": statistics.median(spreading[1:]),
        "late": late - rest,
        "sent": max(sent[1:]),
        "copies": copies,
    }


async def main(mib: int, local: Sequence[int], hosts: Sequence[int]) -> None:
    print(f"{mib} MiB; medians of {TIMES} versions")
    row = "{:<28}{:>12}{:>16}{:>18}{:>14}{:>10}"
    print(row.format("", "publish", "until all have", "loop later, p99", "sent, sizes", "copies"))
    for name, transports, counts in (("one host", "", local), ("hosts, by TCP", "tcp", hosts)):
        for count in counts:
            found = await measure(count, mib, transports)
            print(
                row.format(
                    f"{name}: {count}",
                    f"{found['publish'] * 1e3:.0f} ms",
                    f"{found['spread'] * 1e3:.0f} ms",
                    f"{found['late'] * 1e3:.1f} ms",
                    f"{found['sent']:.2f}",
                    f"{found['copies']}",
                ),
                flush=True,
            )


def run() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.weights", description=__doc__)
    parser.add_argument("--mib", type=int, default=256, help="size of a version")
    parser.add_argument("--local", type=int, nargs="*", default=[0, 1, 4, 16])
    parser.add_argument("--hosts", type=int, nargs="*", default=[1, 2, 4, 8])
    parser.add_argument("--subscribe", help=argparse.SUPPRESS)
    parser.add_argument("--transports", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.subscribe:
        asyncio.run(subscribe(options.subscribe, options.transports))
    else:
        asyncio.run(main(options.mib, options.local, options.hosts))


if __name__ == "__main__":
    run()
