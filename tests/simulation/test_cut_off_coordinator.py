"""A coordinator that lives, and that nobody reaches for longer than the lease, evicts nobody."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import aiodist
from aiodist.testing import Killed, Simulation

LEASE = 6.0


async def work(group: aiodist.Group) -> tuple[int, int, int]:
    """A sum a second for a minute; then what takes the coordinator."""
    total = 0
    for _ in range(60):
        await asyncio.sleep(1.0)
        total += await group.all_reduce(1)
    assert await group.store.get("k") == b"v"
    assert await group.agree(True)
    survivors = await group.shrink()
    return total, survivors.size, survivors.epoch


async def main(group: aiodist.Group) -> tuple[int, int, int]:
    await group.store.set("k", b"v")
    return await work(group)


@pytest.mark.strength(2)
@pytest.mark.parametrize("cut", [5.0, 7.0, 24.0, 40.0])
def test_all_ranks_are_members_when_it_is_back(cut: float) -> None:
    for seed in range(2):
        simulation = Simulation(3, seed=seed, lease=LEASE, op_timeout=100.0)
        network, nodes = simulation.network, simulation.nodes
        network.later_by(10.0, network.partition, [simulation.coordinator], nodes)
        network.later_by(10.0 + cut, network.heal)
        assert simulation.run(main) == [(180, 3, 2)] * 3, seed


def test_one_that_dies_meanwhile_is_lost_a_lease_after_it_is_back() -> None:
    async def dying(group: aiodist.Group) -> Any:
        with pytest.raises(aiodist.PeerLostError):
            await main(group)
        survivors = await group.shrink()
        return survivors.size, simulation.loop.time()

    simulation = Simulation(3, lease=LEASE, op_timeout=100.0)
    network, nodes = simulation.network, simulation.nodes
    network.later_by(10.0, network.partition, [simulation.coordinator], nodes)
    network.later_by(20.0, nodes[1].kill)
    network.later_by(34.0, network.heal)
    first, killed, third = simulation.run(dying)
    assert isinstance(killed, Killed)
    assert first[0] == third[0] == 2
    assert max(first[1], third[1]) < 34.0 + 2 * LEASE


def test_a_join_under_way_goes_on() -> None:
    async def late(rank: int) -> int:
        if rank == 2:
            await asyncio.sleep(40.0)
        async with simulation.connecting(rank, timeout=100.0) as group:
            return int(await group.all_reduce(1))

    simulation = Simulation(3, lease=LEASE, op_timeout=100.0)
    network, nodes = simulation.network, simulation.nodes
    network.later_by(5.0, network.partition, [simulation.coordinator], nodes)
    network.later_by(5.0 + 1.2 * LEASE, network.heal)
    assert simulation.play({rank: late(rank) for rank in range(3)}) == [3, 3, 3]


@pytest.mark.parametrize("seconds", [3.9, 4.1, 5.9, 6.1, 8.0, 24.0])
def test_one_that_is_stopped_reads_what_came_before_it_judges(seconds: float) -> None:
    """A coordinator is stopped, as SIGSTOP would do it. When it goes on, the signs of life of its
    members lie unread, and its timers are due."""
    for seed in range(2):
        simulation = Simulation(3, seed=seed, lease=LEASE, op_timeout=100.0)
        network = simulation.network
        network.later_by(10.0, simulation.coordinator.stop)
        network.later_by(10.0 + seconds, simulation.coordinator.resume)
        assert simulation.run(main) == [(180, 3, 2)] * 3, seed


@pytest.mark.parametrize("call", ["agree", "shrink"])
def test_a_vote_that_nobody_rules_on_says_so(call: str) -> None:
    """The text says how long nothing has come, and advises nothing that needs a coordinator."""
    simulation = Simulation(2, seed=1, lease=LEASE, op_timeout=100.0)

    async def vote(group: aiodist.Group) -> float:
        await group.barrier()
        if group.rank == 0:
            await asyncio.sleep(20.0)
            simulation.coordinator.block()
            began = simulation.loop.time()
            with pytest.raises(
                aiodist.CollectiveTimeoutError,
                match=r"within 1 s; the coordinator at tcp://10\.0\.0\.1:29500 has not answered "
                r"for 3 s: it may be stopped or cut off \[",
            ):
                if call == "agree":
                    await group.agree(True, timeout=1.0)
                await group.shrink(timeout=1.0)
            took = simulation.loop.time() - began
            simulation.coordinator.resume()
            return took
        return 3.0

    assert simulation.run(vote) == [3.0, 3.0]
