"""A rank whose loop does not turn for a minute, whoever calls it meanwhile: it is waited for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest

import aiodist
from aiodist.testing import Conditions, Simulation
from aiodist.testing.simulation import Killed
from aiodist.testing.virtual_loop import current_process
from aiodist.testing.wires import Node

QUICK = Conditions(delay=(20e-6, 200e-6), loss=0.0)
BUSY = 60.0


def simulated(size: int, **options: Any) -> Simulation:
    return Simulation(size, conditions=QUICK, lease=5.0, op_timeout=600.0, **options)


async def compute(seconds: float = BUSY) -> None:
    """What a long computation on the loop does."""
    node = current_process()
    assert isinstance(node, Node)
    node.network.later_by(seconds, node.resume)
    node.block()
    await asyncio.sleep(0)


async def all_reduce(group: aiodist.Group) -> Any:
    return float((await group.all_reduce(np.ones(3)))[0])


async def subgroup(group: aiodist.Group) -> Any:
    return await all_reduce(await group.dup())


async def message(group: aiodist.Group) -> Any:
    """To the busy rank, of everyone else."""
    if group.rank != 1:
        await group.send("for you", 1)
    else:
        for src in set(range(group.size)) - {1}:
            assert await group.recv(src=src) == "for you"
    return await all_reduce(group)


PROGRAMS: dict[str, Callable[[aiodist.Group], Coroutine[Any, Any, Any]]] = {
    "all_reduce": all_reduce,
    "subgroup": subgroup,
    "message": message,
}


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_before_there_are_links(name: str, size: int) -> None:
    async def main(group: aiodist.Group) -> Any:
        if group.rank == 1:
            await compute()
        return await PROGRAMS[name](group)

    assert simulated(size).run(main) == [float(size)] * size


@pytest.mark.parametrize("size", [2, 3, 4])
def test_all_are_busy_one_after_the_other(size: int) -> None:
    async def main(group: aiodist.Group) -> Any:
        await asyncio.sleep(0.01 * group.rank)
        work = group.all_reduce(np.ones(3))  # it begins to call others
        await compute(BUSY / (1 + group.rank))
        return float((await work)[0])

    assert simulated(size).run(main) == [float(size)] * size


@pytest.mark.parametrize("milliseconds", [0.0, 0.1, 0.2, 0.3, 0.5, 0.8, 1.2])
def test_in_the_midst_of_a_greeting(milliseconds: float) -> None:
    """Whichever side it is, and whatever it has said by then."""

    async def main(group: aiodist.Group, busy: int) -> Any:
        await group.store.add("there", 1)
        work = group.send("x", 1) if group.rank == 0 else group.recv(src=0)
        if group.rank == busy:
            await asyncio.sleep(milliseconds / 1000)
            await compute()
        await work
        return await all_reduce(group)

    for busy in range(2):
        assert simulated(2).run(main, busy) == [2.0, 2.0]


@pytest.mark.parametrize("size", [2, 3])
def test_a_connection_breaks_while_a_rank_is_busy(size: int) -> None:
    simulation = simulated(size)

    async def main(group: aiodist.Group) -> Any:
        await all_reduce(group)
        await group.all_to_all(list(range(size)))
        if group.rank == 1:
            await compute()
        elif group.rank == 0:
            simulation.network.break_links(*simulation.nodes[:2])
        return await all_reduce(group)

    assert simulation.run(main) == [float(size)] * size
    assert simulation.network.broken


@pytest.mark.parametrize("size", [2, 3])
def test_a_busy_rank_that_dies_is_lost_at_once(size: int) -> None:
    simulation = simulated(size)

    async def main(group: aiodist.Group) -> Any:
        if group.rank == 1:
            await asyncio.sleep(0)
            simulation.network.later_by(20.0, simulation.nodes[1].kill)
            await compute()
        with pytest.raises(aiodist.PeerLostError) as lost:
            await all_reduce(group)
        assert lost.value.ranks == (1,)
        return asyncio.get_running_loop().time()

    *others, last = [outcome for outcome in simulation.run(main) if not _was_killed(outcome)]
    assert all(20.0 < time < 20.1 for time in (*others, last))


@pytest.mark.parametrize("size", [2, 3])
def test_a_rank_that_stops_is_lost_by_its_lease(size: int) -> None:
    simulation = simulated(size)

    async def main(group: aiodist.Group) -> Any:
        if group.rank == 1:
            simulation.network.later_by(BUSY, simulation.nodes[1].resume)
            simulation.nodes[1].stop()
            await asyncio.sleep(0)
        with pytest.raises((aiodist.PeerLostError, aiodist.GroupClosedError)) as lost:
            await all_reduce(group)
        return lost.value, asyncio.get_running_loop().time()

    outcomes = simulation.run(main)
    for error, time in outcomes[:1] + outcomes[2:]:
        assert error.ranks == (1,)
        assert 3.0 < time < 8.0
    assert isinstance(outcomes[1][0], aiodist.GroupClosedError)


@pytest.mark.parametrize("call", ["shrink", "rendezvous"])
def test_a_rank_that_is_evicted_while_it_votes_gets_no_group(call: str) -> None:
    """It reads the view that it voted for and its eviction in one go."""
    simulation = simulated(3)

    async def main(group: aiodist.Group) -> Any:
        if group.rank == 1:
            simulation.network.later_by(0.1, simulation.nodes[1].stop)  # its vote is on its way
            simulation.network.later_by(0.1 + BUSY, simulation.nodes[1].resume)
            with pytest.raises(aiodist.GroupClosedError, match="ruled this rank lost"):
                await getattr(group, call)()
            return None
        await asyncio.sleep(1.0)
        group = await getattr(group, call)()
        with pytest.raises(aiodist.PeerLostError):
            await all_reduce(group)
        return (await group.shrink()).size

    assert simulation.run(main) == [2, None, 2]


def stopped_while_it_joins(others: float, timeout: float) -> list[Any]:
    """What comes of three ranks that connect. The last one comes after `others` seconds, and rank 1
    is stopped for a minute before that."""
    simulation = simulated(3)

    async def main(rank: int) -> Any:
        if rank == 1:
            simulation.network.later_by(0.1, simulation.nodes[1].stop)
            simulation.network.later_by(BUSY, simulation.nodes[1].resume)
        await asyncio.sleep(others if rank == 2 else 0.0)
        connecting = simulation.connecting(rank, timeout=timeout if rank == 1 else 5 * BUSY)
        async with connecting as group:
            try:
                return await group.all_reduce(1)
            except aiodist.PeerLostError:
                if timeout < BUSY:
                    group = await group.shrink()
                else:
                    group = await group.rendezvous()
                return await group.all_reduce(1)

    return simulation.play({rank: main(rank) for rank in range(3)})


# If its group is complete meanwhile, it reads the view and its eviction in one go.
evicted_while_it_joins = pytest.mark.parametrize(
    "others", [2 * BUSY, 1.0], ids=["others are awaited", "its group is complete"]
)


@evicted_while_it_joins
def test_a_rank_that_is_evicted_while_it_joins_asks_again(others: float) -> None:
    assert stopped_while_it_joins(others, timeout=5 * BUSY) == [3, 3, 3]


@evicted_while_it_joins
def test_a_rank_that_is_evicted_for_all_of_its_time_has_not_joined(others: float) -> None:
    outcomes = stopped_while_it_joins(others, timeout=BUSY - 1.0)
    assert isinstance(outcomes[1], aiodist.JoinError)


def test_without_a_coordinator_who_is_busy_is_waited_for() -> None:
    simulation = simulated(2)

    async def main(group: aiodist.Group) -> Any:
        if group.rank == 1:
            simulation.restart_coordinator(2 * BUSY)
            await compute()
        return await all_reduce(group)

    assert simulation.run(main) == [2.0, 2.0]


def test_a_rank_that_cannot_be_reached_is_no_busy_one() -> None:
    """Its system does not take the connection: the coordinator rules, as ever."""
    simulation = simulated(2)
    simulation.network.partition(simulation.nodes[:1], simulation.nodes[1:])

    async def main(group: aiodist.Group) -> Any:
        try:
            await all_reduce(group)
        except aiodist.PeerLostError as error:
            return str(error)
        except aiodist.GroupClosedError:
            return "evicted"

    first, second = simulation.run(main)
    assert "its system has not answered for 10 s" in first
    assert "10 s" in second or second == "evicted"


def _was_killed(outcome: Any) -> bool:
    return isinstance(outcome, Killed)


@pytest.mark.parametrize("seconds", [0.1, 0.5, 1.0, 2.0, 4.0, 8.0])
@pytest.mark.parametrize("name", ["all_reduce", "recv", "vote"])
def test_what_a_deadline_says_of_a_busy_rank(name: str, seconds: float) -> None:
    """However short it is; also what the rank was doing when it had answered before."""

    async def fail(group: aiodist.Group) -> str:
        if name == "recv":
            failing = group.recv(src=1, timeout=seconds)
        elif name == "vote":
            failing = group.agree(True, timeout=seconds)
        else:
            failing = group.all_reduce(np.ones(3), timeout=seconds)
        with pytest.raises(aiodist.CollectiveTimeoutError) as caught:
            await failing
        assert caught.value.missing == (1,)
        return caught.value.last_seen[1]

    async def main(group: aiodist.Group) -> Any:
        if group.rank == 0:
            first = await fail(group)
            await group.store.set("go on", b"")
            await asyncio.sleep(0.1)
            return first, await fail(group)
        await group.store.wait("go on")
        await compute()
        return None

    (first, second), _ = simulated(2).run(main)
    assert first.startswith("in ")
    assert second.startswith("no answer; its last sign of life came ")
    assert " s ago it was in " in second


@pytest.mark.parametrize("size", [2, 3])
def test_after_all_have_entered(size: int, caplog: pytest.LogCaptureFixture) -> None:
    """Its data does not come: both the log and the error name it."""

    async def main(group: aiodist.Group) -> Any:
        await group.barrier()
        work = group.all_reduce(np.ones(1 << 20), timeout=30.0)
        if group.rank == 1:
            await asyncio.sleep(100e-6)  # some of it has come
            await compute()
            with pytest.raises(aiodist.AiodistError):  # by then, the others may have left
                await work
            return None
        with pytest.raises(aiodist.CollectiveTimeoutError) as caught:
            await work
        assert caught.value.missing == (1,)
        known = "all ranks have entered: rank 1 (", "not entered within 30 s by rank 1 ("
        texts.append([text in str(caught.value) for text in known])
        return caught.value.last_seen[1]

    texts: list[list[bool]] = []
    seen = simulated(size).run(main)
    assert all(map(any, texts))
    assert any(entered for entered, _ in texts)
    silent = "no answer; its last sign of life came "
    assert seen.pop(1) is None
    assert [text for text in seen if not text.startswith(silent)] == []
    told = [record.getMessage() for record in caplog.records if record.name == "aiodist.group"]
    waits = [text for text in told if "has waited for" in text]
    assert len(waits) == size - 1
    assert all(f" for rank 1 ({silent}" in text for text in waits)
