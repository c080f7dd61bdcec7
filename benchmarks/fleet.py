"""A trainer and 20 servers on hosts that are far from each other: ``make bench-fleet``.

Each server answers requests, one after the other, and takes each new version meanwhile. The trainer
is killed while it sends a version, and another one goes on in its place. One server comes late, and
another one takes a version only now and then.

Seconds are virtual ones of a simulation, in which each host has processors that are infinitely
fast. Lines carry 50 MB/s, with 50 ms each way. One packet in a hundred is lost. It is sent again
after a round trip, and all that is behind it waits.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import zlib
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import aiodist
from aiodist.testing import Conditions, Simulation
from aiodist.testing.simulation import Killed

MIB = 1 << 20
RATE, DELAY, LOSS = 50e6, 0.05, 0.01
PACKET = 1448
"""The most bytes of a packet."""

CHANGED = 0.02
"""The share of the elements that change in a step."""

STEP = 2.0
"""Seconds of a step of the trainer."""

ANSWER = 0.02
"""Seconds of a request."""

DEADLINE = 1.1
"""Seconds after which a request has failed."""

SAMPLE = 1024
"""Elements of the weights that a request reads."""

LATE, LAGS = 0, 1
"""The servers that come late, and that seldom take a version."""

SELDOM = 9.0
"""Seconds between two versions of the server that lags."""

COMES = 4.5
"""Steps after which the late server comes."""

KILLED_AT, KILLED_AFTER = 6, 0.5
"""The version that the trainer sends when it is killed, and how many seconds it has then sent."""


class Span(NamedTuple):
    """Since when a server answered with a version."""

    server: int
    version: int
    begin: float


class Fleet:
    """What was found: `spans`, `failed` requests, `mixed` versions, and the longest `pause` of a
    server between two answers. `begun`: when each version was published."""

    def __init__(self, servers: int, mib: int, versions: int, seed: int) -> None:
        self.servers = servers
        self.versions = versions
        self.spans: list[Span] = []
        self.answered = 0
        self.failed = 0
        self.mixed = 0
        self.pause = 0.0
        self.begun: dict[int, float] = {}
        self.events: dict[str, float] = {}
        self._checks: dict[int, int] = {}  # of each version that was published
        self._samples: dict[int, int] = {}  # of their first elements
        self._models: dict[int, tuple[int, Any]] = {}  # by server
        self._killed = asyncio.Event()
        self._ended = [asyncio.Event() for _ in range(servers)]
        self._chances = np.random.default_rng(seed)
        self._first = self._chances.integers(0x3C00, 0x3E00, mib * MIB // 2).astype(np.uint16)
        room = round(DELAY * RATE) + 4 * MIB
        line = Conditions(
            (DELAY, DELAY), LOSS, 2 * DELAY, room=(room, room), largest=PACKET, short=0.0, rate=RATE
        )
        # the servers, and then the trainer, and the one that comes after it
        self.sim = Simulation(servers + 2, seed=seed, conditions=line)
        self._options: Any = {"address": self.sim.address, "transports": ("tcp",)}

    def run(self) -> Fleet:
        """Returns itself. Raises what a trainer or a server raises."""
        mains: dict[int, Coroutine[Any, Any, None]] = {
            at: self._serve(at) for at in range(self.servers)
        }
        mains |= {self.servers: self._train(), self.servers + 1: self._train_again()}
        for one in self.sim.play(mains):
            if isinstance(one, BaseException) and not isinstance(one, Killed):
                raise one
        return self

    def behind(self) -> list[float]:
        """For each version that a server took when it was published, how many seconds later it had
        it."""
        return [
            one.begin - self.begun[one.version]
            for one in self.spans
            if one.server not in (LATE, LAGS)
        ]

    # The trainer.

    async def _train(self) -> None:
        async with aiodist.publisher("policy", **self._options) as out:
            await asyncio.sleep(STEP)  # the servers have come
            await self._steps(out, 0, self._first)

    async def _train_again(self) -> None:
        """Go on after the trainer has died, with the newest weights that a server has."""
        await self._killed.wait()
        async with aiodist.publisher("policy", **self._options) as out:
            async with aiodist.subscriber("policy", **self._options) as weights:
                version, tree = await weights.latest()
            self.check(version, tree)
            assert out.newest is not None
            self.events["new trainer"] = self.sim.loop.time()
            await self._steps(out, out.newest + 1, tree["w"])
            for ended in self._ended:
                await ended.wait()

    async def _steps(self, out: aiodist.Publisher, first: int, w: Any) -> None:
        for version in range(first, self.versions):
            step = self._chances.choice(np.array([1, -1], np.int16), len(w))
            changes = self._chances.random(len(w)) < CHANGED
            w = w + (step * changes).view(np.uint16)
            self.publishes(version, w)
            await out.publish({"w": w, "version": version}, version=version)
            if version == KILLED_AT:
                await asyncio.sleep(KILLED_AFTER)
                self.events["trainer killed"] = self.sim.loop.time()
                self.sim.network.later_by(0.0, self._kill)
            await asyncio.sleep(STEP)

    def _kill(self) -> None:
        self.sim.nodes[self.servers].kill()
        self._killed.set()

    def publishes(self, version: int, w: Any) -> None:
        """Note what will be published."""
        self._checks[version] = zlib.crc32(w)
        self._samples[version] = zlib.crc32(w[:SAMPLE])
        self.begun[version] = self.sim.loop.time()

    def check(self, version: int, tree: Any) -> None:
        """Count a version that a server has taken as mixed, unless it is what was published."""
        is_right = tree["version"] == version and zlib.crc32(tree["w"]) == self._checks[version]
        self.mixed += not is_right

    def answers(self, version: int, tree: Any, seconds: float) -> None:
        """Count an answer. It fails if it is late, or if its weights have changed meanwhile."""
        is_right = zlib.crc32(tree["w"][:SAMPLE]) == self._samples[version]
        self.failed += not is_right or seconds > DEADLINE
        self.answered += 1
        self.pause = max(self.pause, seconds)

    # The servers.

    async def _serve(self, at: int) -> None:
        if at == LATE:
            await asyncio.sleep(STEP * COMES)
            self.events["one comes late"] = self.sim.loop.time()
        async with aiodist.subscriber("policy", **self._options) as weights:
            self._models[at] = await weights.latest()
            following = asyncio.create_task(self._follow(at, weights))
            await self._answer(at)
            await following
        self._ended[at].set()

    async def _follow(self, at: int, weights: aiodist.Subscriber) -> None:
        """Take each newest version, while requests are answered."""
        clock = self.sim.loop.time
        while True:
            version, tree = self._models[at]
            self.check(version, tree)
            self.spans.append(Span(at, version, clock()))
            if version == self.versions - 1:
                break
            if at == LAGS:
                await asyncio.sleep(SELDOM)
            self._models[at] = await weights.latest(newer_than=version)

    async def _answer(self, at: int) -> None:
        """Answer requests, until the last version is there."""
        clock = self.sim.loop.time
        answered = clock()
        while (model := self._models[at])[0] < self.versions - 1:
            await asyncio.sleep(ANSWER)
            version, tree = model
            self.answers(version, tree, clock() - answered)
            answered = clock()


def plot(fleet: Fleet, path: Path) -> None:
    """A row for each server, with a colour for each version."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    end = max(one.begin for one in fleet.spans) + STEP
    for at in range(fleet.servers):
        begins = [one for one in fleet.spans if one.server == at]
        ends = [*(one.begin for one in begins[1:]), end]
        axes.broken_barh(
            [(one.begin, stop - one.begin) for one, stop in zip(begins, ends, strict=True)],
            (at - 0.4, 0.8),
            facecolors=[f"C{one.version % 10}" for one in begins],
        )
    for text, when in fleet.events.items():
        axes.axvline(when, color="black", linewidth=0.7, linestyle="dashed")
        axes.text(when, fleet.servers - 0.2, f" {text}", fontsize=8)
    axes.set(xlabel="seconds", ylabel="server", ylim=(-0.8, fleet.servers + 0.8), yticks=[])
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--servers", type=int, default=20)
    parser.add_argument("--mib", type=int, default=4)
    parser.add_argument("--versions", type=int, default=12)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--plot", type=Path, help="draw the versions of each server, as SVG")
    given = parser.parse_args()
    fleet = Fleet(given.servers, given.mib, given.versions, given.seed).run()
    behind = fleet.behind()
    print("| found | |\n| --- | ---: |")
    print(f"| requests answered, failed | {fleet.answered:,}, {fleet.failed} |")
    print(f"| versions taken, mixed | {len(fleet.spans)}, {fleet.mixed} |")
    print(f"| longest pause between two answers of a server | {fleet.pause:.2f} s |")
    print(f"| publish to a server has it, median | {statistics.median(behind):.2f} s |")
    print(f"| the longest | {max(behind):.2f} s |")
    for text, when in fleet.events.items():
        print(f"| {text} after | {when:.1f} s |")
    if given.plot:
        plot(fleet, given.plot)


if __name__ == "__main__":
    main()
