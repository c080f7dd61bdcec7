"""Members of averagers that add up all results, as those that train do."""

from __future__ import annotations

import asyncio
from functools import partial
from random import Random
from typing import Any

import numpy as np
import pytest
from averaging_stage import CALLS, Stage, stop_for
from seeds import seeds

import aiodist
from aiodist.testing import Conditions
from aiodist.testing.simulation import Killed
from aiodist.wire.averaging import Reached


class Follower:
    """A member that adds up all results, as one that trains does. `totals`: by round and digest,
    what the first member had that followed so far."""

    def __init__(self, avg: aiodist.Averager, totals: dict[Reached, bytes]) -> None:
        self.avg = avg
        self.totals = totals
        self.total: np.ndarray[Any, Any] | None = None
        self.told: list[str] = []  # why it had to take the state of another member

    @property
    def reached(self) -> Reached | None:
        return self.avg._parts[""].reached

    async def average(self, place: np.ndarray[Any, Any]) -> None:
        """Follow one round, or the state of another member, if this one does not follow yet."""
        is_first = self.reached is None
        try:
            found = await self.avg.average(place, timeout=10.0)
        except aiodist.StaleError as error:
            self.told.append(str(error))
            self.total = None
        except aiodist.CollectiveTimeoutError:
            return
        else:
            if is_first and found.round != 1:
                self.total = None  # the others have begun before
            if self.total is not None:
                self.total = self.total + found.value
                self.check()
        if self.total is None:
            await self.join()
        else:
            await self.publish()

    async def begin(self, total: np.ndarray[Any, Any]) -> None:
        """Begin with the others, before the first round."""
        self.total = total
        await self.publish()

    async def publish(self) -> None:
        state = {"total": self.total, "rounds": self.avg.rounds}
        await self.avg.publish_state(lambda: state)

    def check(self) -> None:
        assert self.total is not None and self.reached is not None
        data = self.total.tobytes()
        assert self.totals.setdefault(self.reached, data) == data, f"{self.reached} differs"

    async def join(self) -> None:
        """Begin where the others are."""
        tree, rounds = await self.avg.state(timeout=60.0)
        assert tree["rounds"] == rounds
        self.total = tree["total"]
        self.check()
        await self.publish()  # the one that gave it may be lost


@pytest.mark.parametrize("early", [False, True])
def test_members_whose_last_round_was_decided_again(early: bool) -> None:
    """All that held its result were away while a coordinator without memory decided on it. They are
    told when they come back, take the state of another member, and go on with the others."""
    stage = Stage(4, lease=30.0)
    totals: dict[Reached, bytes] = {}

    async def main(member: int) -> Any:
        is_away = member < 2
        async with stage.averager(member, quorum=2, grace=0.5, max_stale=20) as avg:
            follower = Follower(avg, totals)
            await follower.begin(stage.nothing)
            for call in range(12):
                if call == 1 and not is_away:
                    await asyncio.sleep(5.0)  # the second round is of members 0 and 1 alone
                await asyncio.sleep(1.0)
                await follower.average(stage.place(member, call))
                if call == 1 and is_away:
                    node = stage.sim.nodes[member]
                    if member == 0:
                        stage.sim.restart_coordinator(0.5)
                    stage.sim.network.later_by(0.1, node.stop)
                    stage.sim.network.later_by(1.0 if early else 12.0, node.resume)
                    await asyncio.sleep(0.2)
            return follower.told

    told = stage.play(main)
    assert [len(one) for one in told] == ([0, 0, 0, 0] if early else [1, 1, 0, 0])
    assert all("decided again without" in text for texts in told for text in texts)
    assert len(totals) - max(one.round for one in totals) == (0 if early else 1)


@pytest.mark.parametrize("seed", seeds(4, 40))
@pytest.mark.sample(2)
def test_members_that_follow_the_state_of_others(seed: int) -> None:
    """Some begin late or are away for too long, and take the state of another member. Others die,
    and the coordinator is restarted, under every second seed without a state file. With the same
    history, all have the same total, and in the end all that live have the same history."""
    random = Random(seed)
    durable = seed % 2 == 0
    stage = Stage(5, seed, conditions=Conditions((0.0, 0.05), 0.0), durable=durable, lease=2.0)
    sim = stage.sim
    dead = set(random.sample(range(1, 5), random.randint(0, 2)))
    totals: dict[Reached, bytes] = {}
    alive = {*range(5)} - dead
    over: set[int] = set()
    all_over = asyncio.Event()
    calm = 25.0
    ends: dict[int, set[Reached]] = {}  # by member, what it reached in the end

    async def main(member: int) -> None:
        if member == 0:
            for one in dead:
                kill = partial(sim.nodes[one].kill, random.choice(["reset", "silent"]))
                sim.network.later_by(random.uniform(1, 15), kill)
            for _ in range(random.randint(0, 3)):
                away = random.choice([0.1, 1.0])
                sim.network.later_by(random.uniform(1, 18), sim.restart_coordinator, away)
            for _ in range(random.randint(0, 4)):
                node = sim.nodes[random.choice(sorted(alive))]
                at = random.uniform(1, 15)
                sim.network.later_by(at, stop_for, node, random.choice([0.5, 4.0, 8.0]))
            for _ in range(random.randint(0, 2)):  # most who have the last round may be away
                at = random.uniform(3, 15)
                sim.network.later_by(at, sim.restart_coordinator, 0.1)
                for one in random.sample(sorted(alive), 2):
                    sim.network.later_by(at, stop_for, sim.nodes[one], 7.0)
        loop = asyncio.get_running_loop()
        if begins_late := member and random.random() < 0.5:
            await asyncio.sleep(random.uniform(2, 10))
        call = 0
        async with stage.averager(member, quorum=2, grace=0.2, max_stale=2) as avg:
            follower = Follower(avg, totals)
            if begins_late:
                await follower.join()
            else:
                await follower.begin(stage.nothing)
            while loop.time() < calm + 20.0:
                slow = 4 if loop.time() < calm and random.random() < 0.25 else 1
                await asyncio.sleep(slow * random.uniform(0.1, 0.6))
                await follower.average(stage.place(member, call % CALLS))
                call += 1
                if loop.time() > calm + 15.0 and follower.reached is not None:
                    ends.setdefault(member, set()).add(follower.reached)
            over.add(member)
            if alive <= over:
                all_over.set()
            await all_over.wait()  # others may need a result or the state

    for outcome in sim.play({one: main(one) for one in range(5)}, 600):
        if isinstance(outcome, BaseException) and not isinstance(outcome, Killed):
            raise outcome
    assert totals
    assert ends.keys() == alive
    digests: dict[int, bytes] = {}
    for reached in set().union(*ends.values()):
        assert digests.setdefault(reached.round, reached.digest) == reached.digest


def test_a_member_that_missed_too_many_rounds_enters_again() -> None:
    """No member has published a state, so `state` cannot help."""
    stage = Stage(2)
    ahead, back = asyncio.Event(), asyncio.Event()

    async def main(member: int) -> Any:
        options = {"quorum": 1, "grace": 0.1}
        async with stage.averager(member, **options) as avg:
            await avg.average(stage.place(member, 0))
            if member == 0:
                for _ in range(4):
                    await avg.average(stage.place(member, 0))
                ahead.set()
                await back.wait()
                return (await avg.average(stage.place(member, 0))).round
            await ahead.wait()
            for _ in range(2):
                with pytest.raises(aiodist.StaleError, match="leave the averager and enter it"):
                    await avg.average(stage.place(member, 0))
        async with stage.averager(member, **options) as avg:
            back.set()
            return (await avg.average(stage.place(member, 0))).round

    first, second = stage.play(main)
    assert first == second > 4
