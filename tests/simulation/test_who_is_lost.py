"""Two ranks that live cannot reach each other: the others hear of that from both, and name the one
that the coordinator turns out."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

import aiodist
from aiodist.control import line
from aiodist.testing import Conditions, Simulation

CALLS = {
    "all_reduce": lambda group: group.all_reduce(np.ones(3)),
    "large": lambda group: group.all_reduce(np.ones(40_000)),
    "barrier": lambda group: group.barrier(),
    "broadcast": lambda group: group.broadcast(np.ones(3), 0),
    "gather": lambda group: group.gather(group.rank, dst=1),
    "late": lambda group: group.all_reduce(np.ones(3)),
}


class Broken:
    """Once all ranks have links, that of ranks 0 and 1 is cut for good; then all call something."""

    def __init__(self, simulation: Simulation, name: str) -> None:
        self.simulation = simulation
        self.name = name

    async def __call__(self, group: aiodist.Group) -> Any:
        await group.all_to_all(list(range(group.size)))
        await group.barrier()
        await asyncio.sleep(0.1)  # all are through
        a, b, *_ = self.simulation.nodes
        if group.rank == 0:
            self.simulation.network.partition([a], [b])
            self.simulation.network.break_links(a, b)
        if self.name == "late" and group.rank > 1:
            await asyncio.sleep(3.2)  # it is over for the two, and the coordinator has not ruled
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            await CALLS[self.name](group)
        except (aiodist.PeerLostError, aiodist.GroupClosedError) as error:
            seconds = loop.time() - began
            if group.rank < 2:
                await asyncio.sleep(10.0)  # who leaves is gone, whatever the coordinator says
            return error, seconds
        return None


def broken(size: int, seed: int, name: str, **options: Any) -> list[Any]:
    conditions = Conditions(delay=(20e-6, 2e-3), loss=0.0)
    simulation = Simulation(
        size, seed=seed, conditions=conditions, lease=8.0, op_timeout=60.0, **options
    )
    return simulation.run(Broken(simulation, name))


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("size", [3, 4, 5])
@pytest.mark.sample(7)
def test_a_bystander_names_who_is_turned_out(size: int, name: str) -> None:
    for seed in range(4):
        for outcome in broken(size, seed, name)[2:]:
            if outcome is None:
                continue  # it had all that it needed
            error, seconds = outcome
            assert error.ranks == (1,)
            assert "rank 1 is lost: " in str(error)
            assert seconds < 5.0


@pytest.mark.parametrize("how", ["away", "busy"])
def test_without_a_ruling_it_is_what_was_heard(how: str) -> None:
    """While the coordinator is away nobody waits for it; where it says nothing, for a lease."""
    conditions = Conditions(delay=(20e-6, 2e-3), loss=0.0)
    simulation = Simulation(3, seed=1, conditions=conditions, lease=8.0, op_timeout=60.0)
    if how == "away":
        simulation.network.later_by(1.0, lambda: simulation.restart_coordinator(30.0))
    else:
        simulation.network.later_by(3.0, simulation.coordinator.block)
        simulation.network.later_by(30.0, simulation.coordinator.resume)
    error, seconds = simulation.run(Broken(simulation, "all_reduce"))[2]
    assert error.ranks in ((0,), (1,))
    assert "(its system has not answered for 3 s)" in str(error)
    assert seconds < 3.1 if how == "away" else 10.9 < seconds < 11.1


@pytest.mark.parametrize("seconds", [0.0, 3.0, 60.0])
def test_a_rank_that_was_removed_hears_it_from_the_coordinator(seconds: float) -> None:
    """Its peers refuse it, or say that it is lost. It waits for the coordinator, which is away from
    here alone for so many `seconds`, but no longer than a lease."""
    said = set()
    for seed in range(8):
        conditions = Conditions(delay=(20e-6, 2e-3), loss=0.0)
        simulation = Simulation(3, seed=seed, conditions=conditions, lease=8.0, op_timeout=60.0)

        async def main(
            group: aiodist.Group, simulation: Simulation = simulation
        ) -> tuple[aiodist.AiodistError, float]:
            await group.all_to_all([0, 1, 2])
            await group.barrier()
            await asyncio.sleep(0.1)  # all are through
            loop = asyncio.get_running_loop()
            began = loop.time()
            if group.rank == 0:
                network, ways = simulation.network, (simulation.nodes[0], simulation.coordinator)
                network.break_links(*ways)
                network.partition(ways[:1], ways[1:])
                network.later_by(seconds, network.heal)
            with pytest.raises(aiodist.AiodistError) as caught:
                while True:
                    await group.all_reduce(np.ones(3))
            took = loop.time() - began
            await asyncio.sleep(10.0)  # a rank that leaves would be named rightly
            return caught.value, took

        (error, took), *others = simulation.run(main)
        assert [other.ranks for other, _ in others] == [(0,), (0,)]
        if seconds < 8.0:
            assert isinstance(error, aiodist.GroupClosedError), error
            assert seconds < took < seconds + 0.1
        else:
            assert isinstance(error, aiodist.PeerLostError)
            assert 8.0 < took < 8.1
            said.update(text for text in ("refuses", "has lost the") if text in str(error))
    assert seconds < 8.0 or said == {"refuses", "has lost the"}


@pytest.mark.parametrize("end", ["cancel", "revoke", "close"])
def test_what_waits_for_a_ruling_ends_with_its_work_and_group(end: str) -> None:
    conditions = Conditions(delay=(20e-6, 2e-3), loss=0.0)
    simulation = Simulation(3, seed=1, conditions=conditions, lease=8.0, op_timeout=60.0)
    program = Broken(simulation, "all_reduce")

    async def main(group: aiodist.Group) -> Any:
        if group.rank < 2:
            return await program(group)
        await group.all_to_all([0, 1, 2])
        await group.barrier()
        await asyncio.sleep(0.1)
        work = group.all_reduce(np.ones(3))
        await asyncio.sleep(3.2)
        assert not work.done()  # the two have given up, and the coordinator has not ruled
        if end == "cancel":
            work.cancel()
            assert work.cancelled()
            return await group.all_reduce(1)
        if end == "revoke":
            group.revoke()
            return await work
        closing = asyncio.ensure_future(group.close())
        try:
            return await work
        finally:
            await closing

    error = simulation.run(main)[2]
    if end == "revoke":
        assert isinstance(error, aiodist.GroupRevokedError)
    else:
        assert isinstance(error, aiodist.PeerLostError)
        assert error.ranks == (1,)


def test_a_rank_whose_way_back_ends_right_behind_the_greeting_tries_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is back within its lease, and is not ruled lost."""
    ended = []

    async def dial(*args: Any, **options: Any) -> Any:
        greeted = await dials(*args, **options)
        if not ended:
            ended.append(greeted)
            greeted.sock.close()
        return greeted

    dials = line.dial
    monkeypatch.setattr(line, "dial", dial)

    async def main(group: aiodist.Group) -> Any:
        await group.barrier()
        if group.rank == 0:
            simulation.restart_coordinator(0.5)
        await asyncio.sleep(20.0)
        return await group.all_reduce(group.rank)

    simulation = Simulation(2, seed=1, lease=4.0, durable=True)
    assert simulation.run(main) == [1, 1]
    assert ended


@pytest.mark.parametrize("how", ["late", "late elsewhere", "aborts", "cancels"])
def test_of_a_group_that_is_not_made_ranks_are_those_of_the_caller(how: str) -> None:
    async def main(group: aiodist.Group) -> str:
        await group.barrier()
        if group.rank == 3:
            if how == "aborts":
                await asyncio.sleep(0.5)
                group.abort("the disk is full")
            elif how == "cancels":
                group.subgroup([3, 2, 0]).cancel()
            await asyncio.sleep(10.0)
        elif group.rank in (0, 2):
            timeout = 2.0 if how == "late" or group.rank == 2 else 60.0
            try:
                await group.subgroup([3, 2, 0], timeout=timeout)
            except aiodist.PeerLostError as error:
                assert error.ranks == (3,)
                return str(error)
            except aiodist.CollectiveTimeoutError as error:
                assert error.missing == (3,)
                assert list(error.last_seen) == [3]
                return str(error)
            except aiodist.CollectiveAbortedError as error:
                assert error.rank == 3
                return str(error)
        return ""

    text = Simulation(4, seed=1, lease=60.0).run(main)[0]
    expected = {
        "late": "not entered within 2 s by rank 3 (in no operation at ",
        "late elsewhere": "rank 2 gave up: not entered within 2 s by rank 3 (in no operation at ",
        "aborts": "rank 3 is lost: it aborted: the disk is full",
        "cancels": "rank 3 gave up the operation: the operation was cancelled",
    }
    assert text.startswith(expected[how]), text
    assert text.endswith(" [group 'world', epoch 1, subgroup]")
