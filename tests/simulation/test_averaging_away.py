"""Members of an averager wait for a coordinator that is away for long, on a simulated network."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import pytest
from averaging_stage import Stage

from aiodist.membership.averaging import Averaging


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
