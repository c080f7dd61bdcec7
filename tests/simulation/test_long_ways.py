"""Ranks that are far from each other keep the wire busy: windows follow the round trip."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from aiodist import Group
from aiodist.schedules.costs import agreed
from aiodist.testing import Conditions, Simulation
from aiodist.transports.tcp import UNSENT

MIB = 1 << 20
RATE = 50e6

Operation = Callable[[Group, Any], Awaitable[object]]


def line(delay: float) -> Conditions:
    """A line of RATE each way that loses nothing. Its connections hold what is on the way, and 4
    MiB that are not yet, as TCP to far peers does."""
    room = round(delay * RATE) + UNSENT
    return Conditions((delay, delay), 0.0, room=(room, room), largest=1 << 16, short=0.0, rate=RATE)


async def all_reduce(group: Group, x: Any) -> None:
    await group.all_reduce(x)


async def broadcast(group: Group, x: Any) -> None:
    await group.broadcast(x)


async def all_gather(group: Group, x: Any) -> None:
    await group.all_gather(x)


async def send(group: Group, x: Any) -> None:
    if group.rank == 0:
        await group.send(x, 1)
    elif group.rank == 1:
        await group.recv(src=0, out=x)


async def messages(group: Group, x: Any) -> None:
    """Small ones, of one tag."""
    parts = np.split(x, len(x) // 8192)
    if group.rank == 0:
        await asyncio.gather(*[group.isend(part, 1) for part in parts])
    elif group.rank == 1:
        for part in parts:
            await group.recv(src=0, out=part)


def seconds(operation: Operation, size: int, delay: float, nbytes: int) -> float:
    """Virtual seconds that it takes the slowest rank, once there are connections."""

    async def program(group: Group) -> float:
        x = np.zeros(nbytes // 4, np.float32)
        await operation(group, x[: 16 * MIB // 4])  # by the plan that all of it goes by
        await group.barrier()
        loop = asyncio.get_running_loop()
        start = loop.time()
        await operation(group, x)
        return loop.time() - start

    return max(Simulation(size, seed=1, conditions=line(delay)).run(program))


@pytest.mark.parametrize("delay", [pytest.param(0.01, marks=pytest.mark.long), 0.05])
@pytest.mark.parametrize(
    ("operation", "size", "crossing"),
    [
        (all_reduce, 2, 1.0),
        pytest.param(all_reduce, 4, 1.5, marks=pytest.mark.long),
        (broadcast, 3, 1.0),
        pytest.param(all_gather, 2, 1.0, marks=pytest.mark.long),
        (send, 2, 1.0),
        (messages, 2, 1.0),
    ],
)
def test_the_wire_is_busy(operation: Operation, size: int, crossing: float, delay: float) -> None:
    """`crossing`: how often as many bytes as the array has leave the busiest rank."""
    nbytes = 64 * MIB
    assert crossing * nbytes / RATE >= 0.85 * seconds(operation, size, delay, nbytes)


@pytest.mark.parametrize(("delay", "trip"), [(1e-4, 0.0), (0.02, 0.08)])
def test_all_ranks_know_how_far_they_are(delay: float, trip: float) -> None:
    """The simulated coordinator is as far from each of them."""

    async def program(group: Group) -> float:
        heard = agreed(member.addresses for member in group._actor.people.values())
        assert heard == group._context.costs
        return heard.trip

    simulation = Simulation(3, seed=1, conditions=line(delay))
    assert simulation.run(program) == [trip] * 3
