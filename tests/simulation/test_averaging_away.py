"""Members of an averager wait for a coordinator that is away for long, on a simulated network."""

from __future__ import annotations

import asyncio
import math
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from averaging_stage import CALLS, Stage

import aiodist
from aiodist.membership.averaging import Averaging
from aiodist.membership.loans import Loans
from aiodist.wire.averaging import AverageDecision


def test_a_coordinator_that_dies_again_before_it_lets_members_in_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The members wait for it, for longer than they may wait when they join."""
    stage = Stage(2, durable=True)
    let_in = Averaging._on_enter
    entrances = 0

    def enter(averaging: Averaging, *args: Any) -> None:
        nonlocal entrances
        entrances += 1
        if entrances == 3:  # the first one after the restart
            stage.sim.restart_coordinator(8.0)
        else:
            let_in(averaging, *args)

    monkeypatch.setattr(Averaging, "_on_enter", enter)

    async def main(member: int) -> int:
        async with stage.averager(member, timeout=4.0) as avg:
            await stage.call(avg, member, 0)
            if member == 0:
                stage.sim.restart_coordinator(1.0)
            return (await stage.call(avg, member, 1)).round

    assert stage.play(main) == [2, 2]
    assert entrances == 5  # a request that is out of date is not repeated


def test_a_member_that_was_ruled_lost_waits_for_a_coordinator_that_is_away() -> None:
    """It waits for longer than it may when it joins first."""
    stage = Stage(3, durable=True, lease=1.0)

    async def main(member: int) -> Any:
        async with stage.averager(member, quorum=2, max_stale=50, timeout=4.0) as avg:
            await stage.call(avg, member, 0)
            if member == 2:
                node = stage.sim.nodes[2]
                node.stop()
                stage.sim.network.later_by(5.0, node.resume)
                stage.sim.network.later_by(4.9, stage.sim.restart_coordinator, 20.0)
                await asyncio.sleep(0.01)  # it goes on after the stop
            else:
                await asyncio.sleep(60.0)
            return {*(await avg.average(stage.place(member, 1))).contributors}

    assert stage.play(main) == [{"m0", "m1", "m2"}] * 3


def go_silent(stage: Stage, seconds: float) -> None:
    stage.sim.coordinator.stop()
    stage.sim.network.later_by(seconds, stage.sim.coordinator.resume)


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("silent", "the coordinator is silent"),
        ("away", "the coordinator is away: no coordinator answers at "),
        ("restarted", "m1 has not contributed"),
        ("cancelled", ""),
    ],
)
def test_a_call_that_is_given_up_while_the_coordinator_is_away_is_withdrawn(
    how: str, text: str
) -> None:
    stage = Stage(2, durable=True, lease=30.0)

    async def main(member: int) -> Any:
        async with stage.averager(member, carry=True) as avg:
            if member == 1:
                await asyncio.sleep(20.0)
                return [await stage.call(avg, 1, call) for call in (1, 2)]
            began = asyncio.get_running_loop().time()
            work = avg.average(stage.place(0, 0), timeout=1.0)
            await asyncio.sleep(0.5)
            if how in ("restarted", "away"):
                stage.sim.restart_coordinator(1.0 if how == "restarted" else 10.0)
            else:
                go_silent(stage, 10.0)
            if how == "cancelled":
                await asyncio.sleep(1.0)  # its own deadline is over
                work.cancel()
            with pytest.raises((aiodist.CollectiveTimeoutError, asyncio.CancelledError)) as failed:
                await work
            assert text in str(failed.value)
            assert asyncio.get_running_loop().time() - began < 3.1
            if how == "away":
                with pytest.raises(aiodist.CollectiveTimeoutError, match=f"within 1 s: {text}"):
                    await avg.state(timeout=1.0)
            await asyncio.sleep(30.0)
            return [await stage.call(avg, 0, call) for call in (1, 2)]

    rounds, _ = stage.play(main)
    counted = [np.flatnonzero(one.value).tolist() for one in rounds]
    assert counted == [[1, CALLS + 1], [2, CALLS + 2]]


@pytest.mark.parametrize("cancels", [True, False])
def test_a_call_that_is_made_and_given_up_while_the_coordinator_is_away(cancels: bool) -> None:
    """It counts in no round, and holds up none."""
    stage = Stage(2, durable=True, lease=30.0)

    async def main(member: int) -> Any:
        async with stage.averager(member) as avg:
            results = [await stage.call(avg, member, 0)]
            await asyncio.sleep(1.0)
            if member == 0:
                stage.sim.restart_coordinator(6.0)
                await asyncio.sleep(0.5)
                work = avg.average(stage.place(0, 1), timeout=math.inf if cancels else 0.5)
                if cancels:
                    asyncio.get_running_loop().call_later(0.5, work.cancel)
                with pytest.raises((aiodist.CollectiveTimeoutError, asyncio.CancelledError)):
                    await work
                await asyncio.sleep(8.0)
            return [*results, *[await stage.call(avg, member, call) for call in (2, 3)]]

    rounds, _ = stage.play(main)
    counted = [np.flatnonzero(one.value).tolist() for one in rounds]
    assert counted == [[0, CALLS], [2, CALLS + 2], [3, CALLS + 3]]


@pytest.mark.parametrize("durable", [True, False])
def test_a_decision_of_which_a_member_hears_after_it_has_given_up(
    monkeypatch: pytest.MonkeyPatch, durable: bool
) -> None:
    """The coordinator dies when one member has heard of its decision, and the other one not."""
    stage = Stage(2, durable=durable, lease=30.0)
    tell, unheard = Loans.tell, []

    def tell_others(loans: Loans, room: Any, who: str, message: Any) -> None:
        is_second = isinstance(message, AverageDecision) and message.round == 2
        if unheard or not is_second or room.name_of(who) != "m0":
            tell(loans, room, who, message)
        else:
            unheard.append(message)
            stage.sim.network.later_by(0.05, stage.sim.restart_coordinator, 3.0)

    monkeypatch.setattr(Loans, "tell", tell_others)

    async def main(member: int) -> Any:
        async with stage.averager(member) as avg:
            results = [await stage.call(avg, member, 0)]
            if member == 0:
                with pytest.raises(aiodist.CollectiveTimeoutError):
                    await avg.average(stage.place(0, 1), timeout=1.0)
                return [*results, *[await stage.call(avg, member, call) for call in (2, 3)]]
            return [*results, *[await stage.call(avg, member, call) for call in (1, 2)]]

    rounds, _ = stage.play(main)
    assert len(unheard) == 1
    counted = [np.flatnonzero(one.value).tolist() for one in rounds]
    # With its state file, the coordinator knows that the call is decided on, so it counts.
    assert counted == [[0, CALLS], [1 if durable else 2, CALLS + 1], [3, CALLS + 2]]


@pytest.mark.parametrize("patience", [1.0, 10.0])
def test_a_member_that_gives_up_to_publish_a_state_is_not_elected(patience: float) -> None:
    stage = Stage(3, lease=30.0)

    async def main(member: int) -> Any:
        async with stage.averager(member) as avg:
            await asyncio.sleep(1.0 + 10.0 * member)
            if member == 2:
                tree, _ = await avg.state(timeout=20.0)
                return tree
            if member == 0:
                go_silent(stage, 8.0)
            with suppress(TimeoutError):
                async with asyncio.timeout(patience):
                    published = await avg.publish_state(member)
                    assert published == (member == 1)
            await asyncio.sleep(30.0)
            return None

    assert stage.play(main)[2] == 1
