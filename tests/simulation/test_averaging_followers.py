"""Members of averagers that add up all results, as those that train do."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import partial
from random import Random
from typing import Any

import numpy as np
import pytest
from averaging_stage import CALLS, Stage
from seeds import seeds

import aiodist
from aiodist.testing import Conditions


class Follower:
    """A member that adds up all results, as one that trains does. `totals`: by round, what the
    first member had that followed so far."""

    def __init__(self, avg: aiodist.Averager, totals: dict[int, bytes]) -> None:
        self.avg = avg
        self.totals = totals
        self.total: np.ndarray[Any, Any] | None = None
        self.round: int | None = None

    def took(self, found: aiodist.Averaged) -> None:
        assert self.round is None or found.round == self.round + 1
        if found.first:
            self.total = np.zeros_like(found.value)
        self.round = found.round
        if self.total is not None:
            self.total = self.total + found.value
            self.check()

    def check(self) -> None:
        assert self.total is not None and self.round is not None
        data = self.total.tobytes()
        assert self.totals.setdefault(self.round, data) == data, f"round {self.round} differs"

    async def publish(self) -> None:
        if self.total is not None:
            await self.avg.publish_state({"total": self.total, "round": self.round})

    async def join(self) -> None:
        """Begin where the others are, if one of them gives its state in time."""
        with suppress(aiodist.CollectiveTimeoutError):
            tree, rounds = await self.avg.state(timeout=5.0)
            assert tree["round"] == rounds[""]
            self.total, self.round = tree["total"], tree["round"]
            self.check()
            return
        self.total = self.round = None


@pytest.mark.parametrize("seed", seeds(4, 100))
def test_members_that_follow_the_state_of_others(seed: int) -> None:
    """Some begin late or are away for too long, and take the state of another member. Others die,
    and the coordinator is restarted. After the same round, all have the same total."""
    random = Random(seed)
    stage = Stage(5, seed, conditions=Conditions((0.0, 0.05), 0.0), durable=True, lease=2.0)
    sim = stage.sim
    dead = set(random.sample(range(1, 5), random.randint(0, 2)))
    totals: dict[int, bytes] = {}

    async def main(member: int) -> None:
        if member == 0:
            for one in dead:
                kill = partial(sim.nodes[one].kill, random.choice(["reset", "silent"]))
                sim.network.later_by(random.uniform(1, 15), kill)
            for _ in range(random.randint(0, 3)):
                sim.network.later_by(random.uniform(1, 18), sim.restart_coordinator, 0.1)
            for _ in range(random.randint(0, 3)):
                node = sim.nodes[random.choice(sorted({*range(5)} - dead))]
                at = random.uniform(1, 15)
                sim.network.later_by(at, node.stop)
                sim.network.later_by(at + random.choice([0.5, 4.0]), node.resume)
        loop = asyncio.get_running_loop()
        end = loop.time() + 25.0
        if begins_late := member and random.random() < 0.5:
            await asyncio.sleep(random.uniform(2, 10))
        async with stage.averager(member, quorum=2, grace=0.2, max_stale=2) as avg:
            follower = Follower(avg, totals)
            if begins_late:
                await follower.join()
            for call in range(CALLS):
                if loop.time() >= end:
                    break
                await asyncio.sleep(random.uniform(0.1, 0.6) * random.choice([1, 1, 1, 4]))
                try:
                    follower.took(await stage.call(avg, member, call, timeout=10.0))
                except aiodist.StaleError:
                    await follower.join()
                except aiodist.CollectiveTimeoutError:
                    continue
                await follower.publish()

    stage.play(main)
    assert totals  # at least one member followed
