"""What a channel of weights costs, and how fast it is: ``python -m benchmarks.weights``.

All processes run on this host, on the same cores. Those of one host map the publisher's memory.
Hosts are network namespaces (which needs root), and beside them, in the same run, Gloo broadcasts
as much to as many. A process that is killed shows what is sent again. Each row is printed when it
is there.

Figures are medians of versions after the first two of each turn, because memory that was idle is
slower on many virtual machines. Gloo, which has one array, warms up by one broadcast.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import math
import os
import signal
import statistics
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import aiodist
from aiodist_cli.bench_peers import PeerMissing, Site, find_peers
from aiodist_cli.bench_team import OrderError, TeamError, teams
from aiodist_cli.bench_worker import Library
from benchmarks.namespaces import namespaces

CHANNEL = "benchmark"
TIMES = 6
ROUNDS = 3
"""Of these versions, and of Gloo's broadcasts, in turns."""

COLD = 2
"""The first versions of a turn, whose memory is new or was idle: the publisher keeps one version,
and memory for the next."""

LAYERS = 32
"""Arrays of a version."""

KILLED_AT = 0.9
"""How much of a version somebody has when he is killed."""

ASKS = -2
"""Said instead of a version: from now on it takes what there is."""

PATIENCE = 30.0
"""Seconds: where all share the cores of a busy host, a chunk may be long in coming."""

Process = asyncio.subprocess.Process

say = partial(print, flush=True)


async def subscribe(address: str, transports: str, killed: bool, waits: bool) -> None:
    """One subscriber: says, as lines of JSON, when it has which version, and what it maps. One that
    is `killed` says when it has begun, and does so itself; one that `waits` takes nothing before it
    is told to."""
    only = transports.split(",") if transports else None
    weights = aiodist.subscriber(CHANNEL, address=address, transports=only, patience=PATIENCE)
    async with weights:
        print(json.dumps({"version": -1}), flush=True)
        if waits:
            await asyncio.to_thread(sys.stdin.readline)
            print(json.dumps({"version": ASKS}), flush=True)
        while killed:
            if weights.newest is None:
                await asyncio.sleep(0.01)
                continue
            have = 0
            async for _ in weights.stream(weights.newest):
                have += 1
                if have == 1:
                    print(json.dumps({"version": 0}), flush=True)
                elif have >= KILLED_AT * LAYERS:
                    os.kill(os.getpid(), signal.SIGKILL)
        async for version, _ in weights:
            at = time.monotonic()
            has = {"version": version, "at": at, "cpu": time.process_time(), "maps": mapped()}
            print(json.dumps(has), flush=True)


def mapped() -> list[str]:
    """The memory of versions that this process maps: its inodes."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sorted({line.split()[4] for line in lines if "memfd:aiodist-weights" in line})


@asynccontextmanager
async def subscribers(
    address: str,
    count: int,
    transports: str,
    prefixes: Sequence[Sequence[str]] = (),
    *more: str,
) -> AsyncIterator[list[Process]]:
    """`prefixes`: what brings each to its host; none: this one."""
    started = [
        await asyncio.create_subprocess_exec(
            *(prefixes[number] if prefixes else ()),
            *(sys.executable, "-m", "benchmarks.weights", "--subscribe", address),
            *("--transports", transports, *more),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        for number in range(count)
    ]
    try:
        for process in started:
            await said(process, -1)
        yield started
    finally:
        for process in started:
            if process.returncode is None:
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
        self._late: list[float] = []
        self._task = asyncio.ensure_future(self._tick())

    async def _tick(self) -> None:
        while True:
            due = time.perf_counter() + 0.001
            await asyncio.sleep(0.001)
            self._late.append(time.perf_counter() - due)

    def end(self) -> list[float]:
        self._task.cancel()
        return self._late


def p99(late: Sequence[float]) -> float:
    return float(np.quantile(late, 0.99))


def params_of(mib: int) -> dict[str, np.ndarray[Any, Any]]:
    return {f"layer {at}": np.ones((mib << 20) // (4 * LAYERS), np.float32) for at in range(LAYERS)}


class Spread(NamedTuple):
    """What became of one version. Seconds from when `publish` was called until it returned, and
    until all had the version; how late the loop was until it returned; the bytes that the publisher
    sent, in sizes of a version; the processor time of all, in seconds; copies in shared memory."""

    publish: float
    had: float
    late: list[float]
    sent: float
    cpu: float
    copies: int


class Publishing:
    """A publisher here, and subscribers that are processes."""

    def __init__(self, out: aiodist.Publisher, processes: list[Process], mib: int) -> None:
        self._out = out
        self._processes = processes
        self._params = params_of(mib)
        self._nbytes = mib << 20
        self._version = 0
        self._cpu = 0.0

    async def rest(self) -> float:
        """How late the loop is where nothing is to be done (p99)."""
        ticker = Ticker()
        await asyncio.sleep(0.5)
        return p99(ticker.end())

    async def spread(self, *, watched: bool = False) -> Spread:
        """Publish a version, and wait until all have it. `watched`: look how late the loop is
        meanwhile, which takes processor time."""
        before = self._out.bytes_sent
        ticker = Ticker() if watched else None
        begin = time.monotonic()
        await self._out.publish(self._params, version=self._version)
        published = time.monotonic()
        late = ticker.end() if ticker is not None else []
        answers = await asyncio.gather(*(said(one, self._version) for one in self._processes))
        await asyncio.sleep(0.2)  # transfers are counted when they have ended
        self._version += 1
        cpu = time.process_time() + sum(answer["cpu"] for answer in answers)
        spent, self._cpu = cpu - self._cpu, cpu
        return Spread(
            published - begin,
            max((answer["at"] for answer in answers), default=published) - begin,
            late,
            (self._out.bytes_sent - before) / self._nbytes,
            spent,
            len({inode for answer in answers for inode in answer["maps"]}),
        )


@asynccontextmanager
async def publishing(
    count: int,
    mib: int,
    transports: str,
    host: str = "127.0.0.1",
    prefixes: Sequence[Sequence[str]] = (),
) -> AsyncIterator[Publishing]:
    """To so many; the versions whose memory is new have been published."""
    only = transports.split(",") if transports else None
    async with (
        aiodist.Coordinator(f"tcp://{host}:0") as coordinator,
        aiodist.publisher(
            CHANNEL,
            address=coordinator.address,
            keep=1,
            transports=only,
            patience=PATIENCE,
            deltas=False,
        ) as out,
        subscribers(coordinator.address, count, transports, prefixes) as started,
    ):
        made = Publishing(out, started, mib)
        for _ in range(COLD):
            await made.spread()
        yield made


async def to_one_host(mib: int, counts: Sequence[int], times: int) -> None:
    """Subscribers of the publisher's host."""
    say(f"{mib} MiB on one host; medians of {times} versions")
    row = "{:<12}{:>10}{:>10}{:>16}{:>10}{:>17}{:>13}{:>8}"
    heads = ("publish", "of first", "until all have", "of one's", "loop later, p99", "sent, sizes")
    say(row.format("subscribers", *heads, "copies"))
    first = ones = math.nan
    for count in counts:
        async with publishing(count, mib, "") as made:
            rest = await made.rest()
            found = [await made.spread(watched=True) for _ in range(times)]
        publish = statistics.median(one.publish for one in found)
        had = statistics.median(one.had for one in found)
        first = publish if math.isnan(first) else first
        ones = had if count == 1 else ones
        later = p99([late for one in found for late in one.late]) - rest
        cells = (f"{publish * 1e3:.0f} ms", f"{publish / first:.2f}")
        cells += (f"{had * 1e3:.0f} ms", f"{had / ones:.2f}") if count else ("", "")
        cells += (f"{later * 1e3:.1f} ms", f"{max(one.sent for one in found):.2f}")
        say(row.format(count, *cells, found[-1].copies))


async def resent(mib: int, transports: str) -> float:
    """Somebody takes a version, and another one takes it from him, or maps what he has of it. He is
    killed when he has most of it: the bytes that the publisher sent, in sizes of a version."""
    address = "tcp://127.0.0.1:0"
    async with (
        aiodist.Coordinator(address) as coordinator,
        aiodist.publisher(
            CHANNEL, address=coordinator.address, transports=("tcp",), patience=PATIENCE
        ) as out,
        subscribers(coordinator.address, 1, transports, (), "--killed") as (killed,),
        subscribers(coordinator.address, 1, transports, (), "--waits") as (other,),
    ):
        await out.publish(params_of(mib), version=0)
        await said(killed, 0)
        # It has begun, and stops where it is until the other one has asked.
        killed.send_signal(signal.SIGSTOP)
        assert other.stdin is not None
        other.stdin.write(b"\n")
        await said(other, ASKS)
        await asyncio.sleep(2)
        killed.send_signal(signal.SIGCONT)
        await said(other, 0)
        await asyncio.sleep(0.5)  # transfers are counted when they have ended
        return out.bytes_sent / (mib << 20)


async def to_hosts(mib: int, counts: Sequence[int], times: int) -> None:
    """So many hosts, and one of the publisher, beside Gloo's broadcast."""
    each = -(-times // ROUNDS)
    say(f"{mib} MiB to hosts, on {os.cpu_count()} cores; medians of {ROUNDS * each} versions")
    row = "{:<7}{:>16}{:>10}{:>12}{:>13}{:>11}{:>8}{:>20}{:>12}"
    heads = ("until all have", "of one's", "cores allow", "sent, sizes", "Gloo", "ratio")
    say(row.format("hosts", *heads, "cpu, ms of a copy", "Gloo's"))
    (gloo,), _ = find_peers(["gloo"], [])
    ones = math.nan
    for count in counts:
        own: list[dict[str, float]] = []
        theirs: list[tuple[float, float]] = []
        with namespaces(count + 1) as sites:
            async with teams([gloo], sites) as (team,), inside(sites, mib) as versions:
                for _ in range(ROUNDS):
                    own += await versions(each)
                    with suppress(TeamError, OrderError):  # it shows below as none
                        runs = await team.order("benchmarks.weights:broadcast", mib=mib, times=each)
                        theirs += [
                            (max(one["seconds"] for one in ranks), sum(one["cpu"] for one in ranks))
                            for ranks in zip(*(answer["runs"] for answer in runs), strict=True)
                        ]
        # What `publish` takes is part of it: Gloo sends from where the arrays are.
        had, cpu = (statistics.median(one[what] for one in own) for what in ("had", "cpu"))
        theirs = theirs or [(math.nan, math.nan)]
        other, spent = (statistics.median(one) for one in zip(*theirs, strict=True))
        ones = had if count == 1 else ones
        cells = (f"{had * 1e3:.0f} ms", f"{had / ones:.2f}", f"{allowed(count):.1f}")
        cells += (f"{max(one['sent'] for one in own):.2f}", f"{other * 1e3:.0f} ms")
        cells += (f"{other / had:.2f}", f"{cpu / count * 1e3:.0f}", f"{spent / count * 1e3:.0f}")
        say(row.format(count, *cells))


def allowed(count: int) -> float:
    """How many times as long as to one host it takes to so many, if the cores are always busy: for
    each copy one process sends and another one receives."""
    cores = os.cpu_count() or 1
    return max(1.0, 2 * count / cores) / max(1.0, 2 / cores)


@asynccontextmanager
async def inside(
    sites: Sequence[Site], mib: int
) -> AsyncIterator[Callable[[int], Awaitable[list[dict[str, float]]]]]:
    """What `publish_to_order` finds at the first site, for as many versions as asked for."""
    prefixes = [site.prefix for site in sites[1:]]
    words = json.dumps([len(prefixes), mib, "tcp", sites[0].host, prefixes])
    process = await asyncio.create_subprocess_exec(
        *(*sites[0].prefix, sys.executable, "-m", "benchmarks.weights", "--inside", words),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )

    async def versions(times: int) -> list[dict[str, float]]:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"%d\n" % times)
        line = await process.stdout.readline()
        if not line:
            raise RuntimeError("the publisher failed")
        found: list[dict[str, float]] = json.loads(line)
        return found

    try:
        yield versions
    finally:
        assert process.stdin is not None
        process.stdin.close()  # it ends with its orders
        await process.communicate()


async def publish_to_order(count: int, mib: int, transports: str, *where: Any) -> None:
    """Publish as many versions as each line of stdin says, and print what came of them."""
    async with publishing(count, mib, transports, *where) as made:
        while line := await asyncio.to_thread(sys.stdin.readline):
            found = [await made.spread() for _ in range(COLD + int(line))][COLD:]
            say(json.dumps([{"had": one.had, "cpu": one.cpu, "sent": one.sent} for one in found]))


def broadcast(library: Library, mib: int, times: int) -> dict[str, Any]:
    """One rank of torch.distributed."""
    import torch
    import torch.distributed as dist

    x, runs = torch.ones(mib << 18), []
    for _ in range(1 + times):
        dist.barrier()
        begin, cpu = time.perf_counter(), time.process_time()
        dist.broadcast(x, 0)
        seconds = time.perf_counter() - begin
        runs.append({"seconds": seconds, "cpu": time.process_time() - cpu})
    return {"runs": runs[1:]}


async def after_kills(mib: int) -> None:
    for name, transports in (("his host", ""), ("another host", "tcp")):
        sizes = await resent(mib, transports)
        say(f"killed at {KILLED_AT:.0%}, another one on {name} goes on: {sizes:.3f} sizes sent")


async def main(options: argparse.Namespace) -> None:
    asked = options.local is not None or options.hosts is not None or options.kills
    local, hosts = (None, None) if asked else ([0, 1, 4, 16], [1, 2, 4, 8])
    if counts := options.local or local:
        await to_one_host(options.mib or 1024, counts, options.times)
    if counts := options.hosts or hosts:
        try:
            await to_hosts(options.mib or 256, counts, options.times)
        except PeerMissing as error:
            say(f"no hosts: {error}")
    if options.kills or not asked:
        await after_kills(options.mib or 256)


def run() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.weights", description=__doc__)
    parser.add_argument("--mib", type=int, help="size of a version: 256, and 1024 on one host")
    parser.add_argument("--local", type=int, nargs="+", help="these numbers of subscribers, alone")
    parser.add_argument("--hosts", type=int, nargs="+", help="these numbers of hosts, alone")
    parser.add_argument("--kills", action="store_true", help="what is sent again, alone")
    parser.add_argument("--times", type=int, default=TIMES, help="versions of each kind")
    parser.add_argument("--subscribe", help=argparse.SUPPRESS)
    parser.add_argument("--transports", default="", help=argparse.SUPPRESS)
    parser.add_argument("--killed", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--waits", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--inside", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    logging.getLogger("aiodist").setLevel(logging.ERROR)  # those who are killed are lost
    if options.subscribe:
        asyncio.run(subscribe(options.subscribe, options.transports, options.killed, options.waits))
    elif options.inside:
        asyncio.run(publish_to_order(*options.inside))
    else:
        asyncio.run(main(options))


if __name__ == "__main__":
    run()
