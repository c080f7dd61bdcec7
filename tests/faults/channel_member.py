"""One who publishes to a channel, or takes from it, in `chaos_weights`: says, as lines of JSON,
which versions it has, what it found wrong with them, and in the end what is left of them.

SIGUSR1 prints where all of its tasks are.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import random
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

import aiodist
from aiodist.channels import chains, manifest
from aiodist.channels.holding import Holding

PATIENCE = 2.0
STAMP = 1000
"""What each publisher writes can be told from what the others do."""

SIZES = (150_000, 1_000)
"""Elements of the first array: some chunks of it, so many that differences are taken, and now and
then another shape than before."""

DAMAGE = 0.02
"""The share of chunks whose codes a subscriber finds damaged, or has another base for."""

CHUNK = 1 << 16

WAYS = ("latest", "latest", "into", "in_place", "slices", "stream")


def say(**fields: object) -> None:
    print(json.dumps(fields), flush=True)


def files() -> dict[str, str]:
    found = {}
    for one in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # that of the listing itself
            found[one] = os.readlink(f"/proc/self/fd/{one}")
    return found


def mapped() -> set[str]:
    """The memories of versions that this process maps."""
    with open("/proc/self/maps") as lines:
        return {line.split()[4] for line in lines if "memfd:aiodist-weights" in line}


def tree(value: int, size: int) -> dict[str, Any]:
    """Arrays that share a chunk, and one that has several."""
    return {"w": np.full(size, value), "v": [np.full(100, value), np.full(99, value)]}


def problems(version: int, given: int, arrays: list[Any]) -> Iterator[str]:
    """What must not be, of a version that was given after `given`."""
    if version <= given:
        yield "older"
    value = int(arrays[0][0])
    if value // STAMP != version:
        yield "wrong"
    if any((array != value).any() for array in arrays):
        yield "mixed"


def damage(chooser: random.Random) -> None:
    """From now on, some differences do not bring what was published."""
    true = chains.apply

    def apply(base: Holding, holding: Holding, number: int, codes: Sequence[bytes]) -> None:
        chance = chooser.random()
        if chance < DAMAGE / 2:
            codes = [code[: len(code) // 2] + b"x" for code in codes]
        elif chance < DAMAGE:
            base = holding
        true(base, holding, number, codes)

    chains.apply = apply


class Member:
    def __init__(self, channel: str, address: str, transports: str, seed: str) -> None:
        self.chooser = random.Random(seed)
        self.channel = channel
        self.options: dict[str, Any] = {
            "address": address,
            "token": "secret",
            "patience": PATIENCE,
            "timeout": 600.0,  # to be let in: as long as it takes
            "transports": (transports,) if transports else None,
        }
        self.stop = asyncio.Event()

    async def publish(self, stamp: int, version: int) -> None:
        """Versions above that one, until it is told to stop; some are lent."""
        lent: dict[int, Any] = {}
        loop = asyncio.get_running_loop()
        deltas = self.chooser.choice([None, True, True])
        async with aiodist.publisher(self.channel, deltas=deltas, **self.options) as out:
            version = max(version, -1 if out.newest is None else out.newest)
            while not self.stop.is_set():
                version += 1
                x = tree(version * STAMP + stamp, SIZES[version % 7 == 0])
                lends = self.chooser.random() < 0.2
                start = loop.time()
                await out.publish(x, version=version, lend=lends)
                pairs = len(out._participant.meetings._pairs)
                say(published=version, maps=len(mapped()), pairs=pairs)
                for old in [*lent]:
                    await out.take_back(old)
                    self.spoil(lent.pop(old))
                if lends:
                    lent[version] = x
                else:
                    self.spoil(x)
                # By how fast the machine is: versions that go before they can come come nowhere.
                pause = self.chooser.choice([0.1, 0.5]) + 3 * (loop.time() - start)
                with suppress(TimeoutError):
                    async with asyncio.timeout(pause):
                        await self.stop.wait()

    def spoil(self, x: dict[str, Any]) -> None:
        """Write something else to arrays that are ours again."""
        for array in (x["w"], *x["v"]):
            array.fill(-1)

    async def subscribe(self) -> None:
        given = -1
        async with aiodist.subscriber(self.channel, **self.options) as weights:
            say(version=-1)
            while True:
                way = self.chooser.choice(WAYS)
                try:
                    version, arrays = await self.take(weights, way, given)
                except ValueError as error:
                    # Another size than `into` has, or a version that is gone by now.
                    if way == "latest" or (way != "stream" and "into['w']" not in str(error)):
                        raise
                    continue
                if arrays is None:
                    continue
                for kind in problems(version, given, arrays):
                    values = [np.unique(array) for array in arrays]
                    say(problem=kind, text=f"{way}: {version} after {given} is {values}")
                given, arrays = version, None
                pairs = len(weights._participant.meetings._pairs)
                hands_on = way != "slices"  # all of it
                say(version=version, hands_on=hands_on, maps=len(mapped()), pairs=pairs)
                known = weights._participant.stock.differences
                say(saved=known.saved, chain=known.chain, fallbacks=known.fallbacks)

    async def take(self, weights: aiodist.Subscriber, way: str, given: int) -> tuple[int, Any]:
        """A version, and its arrays; None: there is none that can be streamed."""
        if way == "stream":
            version = weights.newest
            if version is None or version <= given:
                return given, None
            return version, [array async for _, array in weights.stream(version)]
        into: Any = None
        if way != "latest":
            into = tree(-STAMP, SIZES[0])
        if way == "slices":
            half = SIZES[0] // 2
            own = into["w"][half:].copy()
            into = {"w": aiodist.Shard(own, (slice(half, 2 * half),), (2 * half,))}
            return await weights.latest(newer_than=given, into=into), [own]
        if into is None:
            version, got = await weights.latest(newer_than=given)
        else:
            in_place = way == "in_place"
            version = await weights.latest(newer_than=given, into=into, in_place=in_place)
            got = into
        return version, [got["w"], *got["v"]]


def dump() -> None:
    for task in asyncio.all_tasks():
        print(f"{os.getpid()} {task.get_name()}:", file=sys.stderr)
        awaited: Any = task.get_coro()
        while (frame := getattr(awaited, "cr_frame", None)) is not None:
            print(f"    {frame.f_code.co_filename}:{frame.f_lineno}", file=sys.stderr)
            awaited = awaited.cr_await


async def main(channel: str, address: str, role: str, transports: str, seed: str, *more: str):
    member = Member(channel, address, transports, seed)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR1, dump)

    def wait() -> None:
        sys.stdin.read()
        loop.call_soon_threadsafe(member.stop.set)

    threading.Thread(target=wait, daemon=True).start()
    before = files()
    if role == "publish":
        await member.publish(*map(int, more))
    else:
        damage(member.chooser)
        taking = asyncio.create_task(member.subscribe())
        stopping = asyncio.create_task(member.stop.wait())
        await asyncio.wait([taking, stopping], return_when=asyncio.FIRST_COMPLETED)
        if taking.done():
            await taking
        taking.cancel()
        await asyncio.gather(taking, return_exceptions=True)
        del taking  # with what it had, which the loop has, too, until the next turn
        await asyncio.sleep(0)
    gc.collect()  # what only a cycle kept open is no leak
    left = {n: f for n, f in files().items() if n not in before and "memfd" in f}
    tasks = [task.get_name() for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    say(over=True, left=[*left.values(), *tasks, *mapped()])


if __name__ == "__main__":
    manifest.CHUNK = CHUNK
    logging.getLogger("aiodist").setLevel(os.environ.get("CHAOS_LOG", "CRITICAL"))
    logging.basicConfig(format=f"{os.getpid()} %(asctime)s %(message)s")
    asyncio.run(main(*sys.argv[1:]))
