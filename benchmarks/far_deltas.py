"""Versions that travel as differences between hosts that are far from each other:
``python -m benchmarks.far_deltas``.

Without options, seconds are virtual ones of a simulation, in which processors are infinitely fast:
what a version takes on the lines. With ``--real`` the hosts are namespaces that
`aiodist.testing.long_links` joins, which needs root, and all of them share this machine.

Elements are in bf16, and change by one unit in the last place. A trip is there and back. Bytes are
those that the publisher sent, or that the subscriber received which was behind.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Coroutine, Iterator
from typing import Any, NamedTuple

import numpy as np

import aiodist
from aiodist.testing import Conditions, Simulation
from aiodist.testing.long_links import LongLine
from benchmarks.far_ranks import said_by_first

MIB = 1 << 20
RATE, DELAY = 50e6, 0.05
"""Bytes per second, and seconds each way."""

HOSTS, SIZE = 8, 16
"""Subscribers, and MiB of a version, unless other ones are asked for."""

TURNS = 3
"""Versions that are measured, behind two that travel whole."""

PATIENCE = 30.0


class Found(NamedTuple):
    """Of the last version: seconds until all had it, and what was sent of it."""

    seconds: float
    sent: int
    received: int
    chain: int


def versions(nbytes: int, share: float, count: int) -> Iterator[Any]:
    """Elements of which this share changes from one version to the next; all of them at random if
    it is 1."""
    rng = np.random.default_rng(1)
    x = rng.integers(0x3C00, 0x3E00, nbytes // 2).astype(np.uint16)
    for _ in range(count):
        yield x
        if share == 1:
            x = rng.integers(0, 1 << 16, len(x)).astype(np.uint16)
        else:
            step = rng.choice(np.array([1, -1], np.int16), len(x))
            x = x + (step * (rng.random(len(x)) < share)).view(np.uint16)


def simulated(hosts: int, mib: int, share: float, behind: int = 0, *, new: bool = False) -> Found:
    """One more subscriber takes nothing of the last versions: so many are `behind` it. `new`: it
    has had none before."""
    room = round(DELAY * RATE) + 4 * MIB
    line = Conditions((DELAY, DELAY), 0.0, room=(room, room), largest=1 << 16, short=0.0, rate=RATE)
    late = bool(behind) or new
    sim = Simulation(1 + hosts + late, seed=1, conditions=line)
    options: Any = {"address": sim.address, "transports": ("tcp",), "patience": PATIENCE}
    count = 2 + TURNS + behind
    last = count - 1
    done, news = asyncio.Event(), asyncio.Condition()
    taken = [0] * count
    found: dict[str, Any] = {}

    async def publish() -> None:
        async with aiodist.publisher("policy", **options) as out:
            await asyncio.sleep(3)
            for version, x in enumerate(versions(mib * MIB, share, count)):
                before, begin = out.bytes_sent, sim.loop.time()
                await out.publish({"w": x}, version=version)
                async with news:
                    await news.wait_for(lambda version=version: taken[version] >= hosts)
                found["seconds"] = sim.loop.time() - begin
                await asyncio.sleep(1)
                found["sent"] = out.bytes_sent - before
            await done.wait()

    async def follow() -> None:
        async with aiodist.subscriber("policy", **options) as weights:
            for version in range(count):
                await weights.latest(newer_than=version - 1)
                taken[version] += 1
                async with news:
                    news.notify_all()
            if not late:
                done.set()
            await done.wait()

    async def lag() -> None:
        async with aiodist.subscriber("policy", **options) as weights:
            for version in () if new else range(count - behind):
                await weights.latest(newer_than=version - 1)
            async with news:
                await news.wait_for(lambda: taken[last] >= hosts)
            await asyncio.sleep(2)
            participant = weights._participant
            before = participant.meetings.bytes_moved[1]
            await weights.latest(newer_than=last - 1)
            found["received"] = participant.meetings.bytes_moved[1] - before
            found["chain"] = participant.stock.differences.chain
            done.set()

    mains: dict[int, Coroutine[Any, Any, None]] = {0: publish()}
    mains |= {rank: follow() for rank in range(1, 1 + hosts)}
    mains |= {1 + hosts: lag()} if late else {}
    for one in sim.play(mains):
        if isinstance(one, BaseException):
            raise one
    return Found(found["seconds"], found["sent"], found.get("received", 0), found.get("chain", 0))


def show_simulated(hosts: int, mib: int) -> None:
    trip = 2 * DELAY
    whole = mib * MIB
    print(f"{mib} MiB to {hosts} hosts, {RATE / 1e6:.0f} MB/s, {DELAY * 1e3:.0f} ms each way\n")
    print("| changed | until all have it | trips | bytes sent |\n| --- | ---: | ---: | ---: |")
    for share in (0.02, 0.0, 1.0):
        one = simulated(hosts, mib, share)
        seconds = f"{one.seconds:.2f} s | {one.seconds / trip:.1f}"
        print(f"| {share:.0%} | {seconds} | {one.sent / whole:.2%} |", flush=True)
    print("\n| one that is behind by | takes | bytes received |\n| --- | --- | ---: |")
    for behind, is_new in ((5, False), (50, False), (0, True)):
        one = simulated(2, min(mib, 4), 0.02, behind, new=is_new)
        name = "all: it is new" if is_new else f"{behind} versions"
        takes = f"a chain of {one.chain}" if one.chain else "the whole"
        print(f"| {name} | {takes} | {one.received / min(mib, 4) / MIB:.2%} |", flush=True)


async def lateness(until: asyncio.Event) -> list[float]:
    """How late the event loop was, in seconds, each time after a millisecond."""
    found = []
    while not until.is_set():
        begin = time.monotonic()
        await asyncio.sleep(0.001)
        found.append(time.monotonic() - begin - 0.001)
    return found


async def member(mib: int, share: float) -> None:
    """One rank of ``--real``. Rank 0 publishes, and prints what it found."""
    async with aiodist.connect(timeout=60, op_timeout=300) as group:
        options: Any = {"address": group.address, "patience": PATIENCE, "timeout": 60.0}
        seconds, sent, late, rest = [], [], list[float](), list[float]()

        async def turn(version: int, x: Any, out: Any) -> None:
            await group.barrier()
            over = asyncio.Event()
            begin = time.monotonic()
            if group.rank == 0:
                watching = asyncio.create_task(lateness(over))
                before = out.bytes_sent
                await out.publish({"w": x}, version=version)
            else:
                await out.latest(newer_than=version - 1)
            ends = await group.all_gather(begin if group.rank == 0 else time.monotonic())
            seconds.append(max(ends[1:]) - ends[0])
            over.set()
            if group.rank == 0:
                late.extend(await watching if version >= 2 else [await watching][:0])
                await asyncio.sleep(1.5)
                sent.append(out.bytes_sent - before)
                over = asyncio.Event()
                asyncio.get_running_loop().call_later(1.0, over.set)
                rest.extend(await lateness(over))

        make: Any = aiodist.publisher if group.rank == 0 else aiodist.subscriber
        async with make("benchmark", **options) as out:
            trees = versions(mib * MIB, share, 2 + TURNS)
            for version in range(2 + TURNS):
                await turn(version, next(trees) if group.rank == 0 else None, out)
            await group.barrier()
        if group.rank == 0:
            p99 = [float(np.percentile(one, 99)) for one in (rest, late)]
            print(json.dumps([seconds[2:], [one / mib / MIB for one in sent[2:]], p99]), flush=True)


def show_real(hosts: int, mib: int) -> None:
    print(
        "| MiB | hosts | changed | until all have it | bytes sent | loop late, idle | publishing |"
    )
    print("| ---: | ---: | --- | --- | ---: | ---: | ---: |")
    for share in (0.02, 0.0, 1.0):
        arguments = ("--member", str(share), "--mib", str(mib))
        seconds, sent, (idle, late) = said_by_first(
            "benchmarks.far_deltas",
            *arguments,
            hosts=1 + hosts,
            line=LongLine(RATE, DELAY),
            seconds=400,
        )
        took = ", ".join(f"{one:.2f}" for one in seconds)
        print(
            f"| {mib} | {hosts} | {share:.0%} | {took} s | {max(sent):.2%}"
            f" | {idle * 1e3:.1f} ms | {late * 1e3:.1f} ms |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.far_deltas", description=__doc__)
    parser.add_argument("--hosts", type=int, default=HOSTS)
    parser.add_argument("--mib", type=int, default=SIZE)
    parser.add_argument("--real", action="store_true", help="namespaces instead of a simulation")
    parser.add_argument("--member", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.member is not None:
        asyncio.run(member(options.mib, options.member))
    elif options.real:
        show_real(options.hosts, options.mib)
    else:
        show_simulated(options.hosts, options.mib)


if __name__ == "__main__":
    main()
