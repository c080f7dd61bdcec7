"""What a channel of weights costs, and how fast it is: ``python -m benchmarks.weights``.

All processes run on this host, on the same cores. Those of one host map the publisher's memory.
Hosts are network namespaces (which needs root), and beside them, in the same run, Gloo broadcasts
as much to as many. A process that is killed shows what is sent again.
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
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

import aiodist
from aiodist_cli.bench_peers import PeerMissing, Site, find_peers
from aiodist_cli.bench_team import OrderError, TeamError, teams
from aiodist_cli.bench_worker import Library
from benchmarks.namespaces import namespaces

CHANNEL = "benchmark"
TIMES = 5
LAYERS = 32
"""Arrays of a version."""

KILLED_AT = 0.9
"""How much of a version somebody has when he is killed."""

ASKS = -2
"""Said instead of a version: from now on it takes what there is."""

PATIENCE = 30.0
"""Seconds: where all share the cores of a busy host, a chunk may be long in coming."""

Process = asyncio.subprocess.Process


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
            print(json.dumps({"version": version, "at": at, "maps": mapped()}), flush=True)


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


def params_of(mib: int) -> dict[str, np.ndarray[Any, Any]]:
    return {f"layer {at}": np.ones((mib << 20) // (4 * LAYERS), np.float32) for at in range(LAYERS)}


async def measure(
    count: int,
    mib: int,
    transports: str,
    times: int,
    host: str = "127.0.0.1",
    prefixes: Sequence[Sequence[str]] = (),
) -> dict[str, float]:
    """Medians: seconds of `publish`, and from its end until all have it; by how much later the loop
    is meanwhile than at rest (p99); the bytes that the publisher sent, in sizes of a version;
    copies in shared memory."""
    params = params_of(mib)
    only = transports.split(",") if transports else None
    publishing, spreading, sent, copies = [], [], [], 0
    async with (
        aiodist.Coordinator(f"tcp://{host}:0") as coordinator,
        aiodist.publisher(
            CHANNEL, address=coordinator.address, keep=1, transports=only, patience=PATIENCE
        ) as out,
        subscribers(coordinator.address, count, transports, prefixes) as started,
    ):
        ticker = Ticker()
        await asyncio.sleep(0.5)
        rest, late = ticker.p99(), 0.0
        for version in range(1 + times):
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


async def hosts_beside_gloo(mib: int, counts: Sequence[int], times: int) -> None:
    """So many hosts, and one of the publisher."""
    print(f"{mib} MiB to hosts; medians of {times} versions")
    row = "{:<12}{:>16}{:>14}{:>12}{:>8}{:>14}"
    print(row.format("hosts", "until all have", "sent, sizes", "Gloo", "ratio", "of one host's"))
    (gloo,), _ = find_peers(["gloo"], [])
    first = 0.0
    for count in counts:
        own, theirs, sent = [], [], 0.0
        with namespaces(count + 1) as sites:
            async with teams([gloo], sites) as (team,):
                # In turns, half of the versions each.
                for _ in range(2):
                    answer = await _inside(sites, mib, -(-times // 2))
                    # What `publish` takes is part of it: Gloo sends from where the arrays are.
                    own.append(answer["publish"] + answer["spread"])
                    sent = max(sent, answer["sent"])
                    with suppress(TeamError, OrderError):  # it shows below as none
                        runs = await team.order(
                            "benchmarks.weights:broadcast", mib=mib, times=-(-times // 2)
                        )
                        each = (answer["seconds"] for answer in runs)
                        theirs += [max(one) for one in zip(*each, strict=True)]
        mine, other = statistics.median(own), statistics.median(theirs or [math.nan])
        first = first or mine
        cells = (f"{mine * 1e3:.0f} ms", f"{sent:.2f}", f"{other * 1e3:.0f} ms")
        print(row.format(count, *cells, f"{other / mine:.2f}", f"{mine / first:.2f}"), flush=True)


async def _inside(sites: Sequence[Site], mib: int, times: int) -> dict[str, float]:
    """What `measure` finds, with the publisher at the first site."""
    prefixes = [site.prefix for site in sites[1:]]
    words = json.dumps([len(prefixes), mib, "tcp", times, sites[0].host, prefixes])
    process = await asyncio.create_subprocess_exec(
        *(*sites[0].prefix, sys.executable, "-m", "benchmarks.weights", "--inside", words),
        stdout=asyncio.subprocess.PIPE,
    )
    out, _ = await process.communicate()
    if process.returncode:
        raise RuntimeError("the publisher failed")
    found: dict[str, float] = json.loads(out)
    return found


def broadcast(library: Library, mib: int, times: int) -> dict[str, Any]:
    """One rank of torch.distributed."""
    import torch
    import torch.distributed as dist

    x, seconds = torch.ones(mib << 18), []
    for _ in range(1 + times):
        dist.barrier()
        begin = time.perf_counter()
        dist.broadcast(x, 0)
        seconds.append(time.perf_counter() - begin)
    return {"seconds": seconds[1:]}


async def main(mib: int, local: Sequence[int], hosts: Sequence[int], times: int) -> None:
    print(f"{mib} MiB on one host; medians of {times} versions")
    row = "{:<12}{:>12}{:>16}{:>18}{:>14}{:>10}"
    print(row.format("", "publish", "until all have", "loop later, p99", "sent, sizes", "copies"))
    for count in local:
        found = await measure(count, mib, "", times)
        print(
            row.format(
                count,
                f"{found['publish'] * 1e3:.0f} ms",
                f"{found['spread'] * 1e3:.0f} ms",
                f"{found['late'] * 1e3:.1f} ms",
                f"{found['sent']:.2f}",
                f"{found['copies']}",
            ),
            flush=True,
        )
    for name, transports in (("his host", ""), ("another host", "tcp")):
        sizes = await resent(mib, transports)
        print(f"killed at {KILLED_AT:.0%}, another one on {name} goes on: {sizes:.3f} sizes sent")
    try:
        await hosts_beside_gloo(mib, hosts, times)
    except PeerMissing as error:
        print(f"no hosts: {error}")


def run() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.weights", description=__doc__)
    parser.add_argument("--mib", type=int, default=256, help="size of a version")
    parser.add_argument("--local", type=int, nargs="*", default=[0, 1, 4, 16])
    parser.add_argument("--hosts", type=int, nargs="*", default=[1, 2, 4, 8])
    parser.add_argument("--times", type=int, default=TIMES, help="versions of each kind")
    parser.add_argument("--subscribe", help=argparse.SUPPRESS)
    parser.add_argument("--transports", default="", help=argparse.SUPPRESS)
    parser.add_argument("--killed", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--waits", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--inside", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.subscribe:
        asyncio.run(subscribe(options.subscribe, options.transports, options.killed, options.waits))
    elif options.inside:
        logging.getLogger("aiodist").setLevel(logging.ERROR)
        print(json.dumps(asyncio.run(measure(*options.inside))))
    else:
        logging.getLogger("aiodist").setLevel(logging.ERROR)  # those who are killed are lost
        asyncio.run(main(options.mib, options.local, options.hosts, options.times))


if __name__ == "__main__":
    run()
