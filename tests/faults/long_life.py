"""A long life, simulated: `make long-life HOURS=24`. Does anything grow?

Three ranks answer requests, each with a tag of its own. Groups are made of theirs and closed.
Another member joins a group of its own and leaves, again and again. A trainer publishes weights,
and a server takes them. Two members average. The coordinator has a state file. All of it runs in
virtual time, so a day takes minutes. `long_life_real.py` does the same with real processes.

Once an hour it counts what is there: tasks, sockets, objects of Python, and memory.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple

import numpy as np

import aiodist
from aiodist.testing import Simulation

REQUEST, GROUP, JOIN, VERSION, ROUND = 10.0, 60.0, 300.0, 300.0, 300.0
"""Seconds between two of each."""
SERVERS = 3
PROCESSES = SERVERS + 3


class Count(NamedTuple):
    """What there is at an hour of the simulation. `memory`: MiB of this process."""

    hour: float
    requests: int
    tasks: int
    sockets: int
    objects: int
    memory: float


class Roles:
    """What processes do until `is_over()`. All times between two of a kind are `pace` times those
    above; `options` are those of `aiodist.connect`."""

    def __init__(
        self, address: str, is_over: Callable[[], bool], pace: float = 1.0, **options: Any
    ) -> None:
        self.requests = 0
        self._is_over = is_over
        self._pace = pace
        self._options: dict[str, Any] = {"address": address, "lease": 60.0, **options}

    def play(self, number: int) -> Coroutine[Any, Any, None]:
        """The role of process `number` of `PROCESSES`."""
        if number < SERVERS:
            return self._serve(number)
        return (self._come_and_go, self._publish, self._average)[number - SERVERS]()

    async def _sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds * self._pace)

    async def _serve(self, rank: int) -> None:
        """Answer requests, and make groups."""
        async with aiodist.connect(
            rank=rank, size=SERVERS, group="service", **self._options
        ) as group:
            number = 0
            while not await group.all_reduce(self._is_over(), aiodist.ReduceOp.LOR):
                number += 1
                x = np.full(100, float(rank))
                await group.all_reduce(x, tag=f"request {number}")
                assert (x == 3).all()
                self.requests += 1
                if number % (GROUP // REQUEST) == 0:
                    pair = await group.split(rank % 2)
                    assert await pair.all_reduce(1) == pair.size
                    await pair.close()
                await self._sleep(REQUEST)

    async def _come_and_go(self) -> None:
        while not self._is_over():
            async with aiodist.connect(size=1, group="guests", **self._options) as group:
                await group.store.set("k", b"v")
            await self._sleep(JOIN)

    async def _publish(self) -> None:
        """Publish versions, and take them, as two participants of a channel."""
        tree, taken = ({"w": np.zeros(20_000, np.float32)} for _ in range(2))
        async with (
            aiodist.publisher("policy", **self._options) as out,
            aiodist.subscriber("policy", **self._options) as weights,
        ):
            version = 0
            while not self._is_over():
                version += 1
                tree["w"][version % 20_000] = version
                await out.publish(tree, version=version, timeout=None)
                assert await weights.latest(newer_than=version - 1, into=taken) == version
                assert (taken["w"] == tree["w"]).all()
                await self._sleep(VERSION)

    async def _average(self) -> None:
        """Average, as two members."""
        async with (
            aiodist.averager("outer", quorum=2, name="a", **self._options) as one,
            aiodist.averager("outer", quorum=2, name="a's peer", **self._options) as two,
        ):
            while not self._is_over():
                means = await asyncio.gather(
                    one.average(np.zeros(100, np.float32)), two.average(np.ones(100, np.float32))
                )
                assert all((mean.value == 0.5).all() for mean in means)
                await self._sleep(ROUND)


class Life:
    """`counts` has one entry for each `every` seconds of `seconds`."""

    def __init__(self, seconds: float, every: float) -> None:
        self.simulation = Simulation(PROCESSES, seed=1, durable=True, lease=60.0)
        self.counts: list[Count] = []
        self._seconds, self._every = seconds, every
        self._roles = [
            Roles(self.simulation.address, self._is_over, transports=("tcp",))
            for _ in range(PROCESSES)
        ]

    def run(self) -> list[Count]:
        mains = {number: roles.play(number) for number, roles in enumerate(self._roles)}
        self.simulation.loop.call_later(self._every, self._hour)
        outcomes = self.simulation.play(mains, limit=2 * self._seconds)
        assert outcomes == [None] * len(mains), outcomes
        return self.counts

    def _is_over(self) -> bool:
        return self.simulation.loop.time() >= self._seconds

    def _hour(self) -> None:
        simulation = self.simulation
        # The simulation's own record of all operations grows. It is not what is looked at here.
        entries = simulation.history.entries
        entries[:] = [entry for entry in entries if entry.end == "start"]
        gc.collect()
        with open("/proc/self/statm") as file:
            memory = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
        nodes = simulation.network.nodes.values()
        self.counts.append(
            Count(
                simulation.loop.time() / 3600,
                self._roles[0].requests,
                sum(not task.done() for node in nodes for task in node.tasks),
                sum(len(node.sockets) for node in nodes),
                len(gc.get_objects()),
                memory,
            )
        )
        if not self._is_over():
            simulation.loop.call_later(self._every, self._hour)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hours", type=float, default=24.0)
    given = parser.parse_args()
    print(f"{'hour':>5}{'requests':>10}{'tasks':>8}{'sockets':>9}{'objects':>10}{'MiB':>8}")
    for one in Life(given.hours * 3600, 3600).run():
        print(
            f"{one.hour:5.1f}{one.requests:10}{one.tasks:8}{one.sockets:9}"
            f"{one.objects:10}{one.memory:8.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
