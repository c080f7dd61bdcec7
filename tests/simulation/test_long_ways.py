"""Ranks that are far from each other keep the wire busy: windows follow the round trip."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from aiodist import Group
from aiodist.codecs import int8
from aiodist.schedules.costs import agreed
from aiodist.testing import Conditions, Simulation
from aiodist.testing.virtual_loop import current_process
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
    ("operation", "size", "crossing", "share"),
    [
        (all_reduce, 2, 1.0, 0.92),
        pytest.param(all_reduce, 4, 1.5, 0.95, marks=pytest.mark.long),
        (broadcast, 2, 1.0, 0.92),
        (broadcast, 4, 1.0, 0.85),
        pytest.param(all_gather, 2, 1.0, 0.9, marks=pytest.mark.long),
        (send, 2, 1.0, 0.92),
        (messages, 2, 1.0, 0.85),
    ],
)
def test_the_wire_is_busy(
    operation: Operation, size: int, crossing: float, share: float, delay: float
) -> None:
    """`crossing`: how often as many bytes as the array has leave the busiest rank. `share`: of the
    time that goes by the line is busy for as long, with 50 ms each way."""
    nbytes = 64 * MIB
    assert crossing * nbytes / RATE >= share * seconds(operation, size, delay, nbytes)


@pytest.mark.parametrize("operation", [all_reduce, broadcast, all_gather])
def test_the_first_operation_takes_longer_only_by_the_making_of_links(operation: Operation) -> None:
    """Three round trips at most: the windows need no warming up."""

    async def program(group: Group) -> list[float]:
        x, loop = np.zeros(MIB, np.float32), asyncio.get_running_loop()
        times = [loop.time()]
        for _ in range(3):
            await operation(group, x)
            times.append(loop.time())
        return [after - before for before, after in itertools.pairwise(times)]

    for first, second, third in Simulation(2, seed=1, conditions=line(0.05)).run(program):
        assert second == pytest.approx(third, rel=0.01)
        assert first <= third + 3.05 * 0.1


class Slow(int8):
    """Takes the time of a core: it encodes 1 GB/s of float32, and decodes 2 GB/s."""

    def encode(self, values: Any, out: Any) -> int:
        self._compute(values.nbytes / 1e9)
        return super().encode(values, out)

    def decode(self, data: Any, out: Any) -> None:
        self._compute(out.nbytes / 2e9)
        super().decode(data, out)

    def __init__(self) -> None:
        super().__init__()
        self._until = 0.0  # when the core has done what it was given

    def _compute(self, seconds: float) -> None:
        process = current_process()
        assert process is not None
        loop = process.loop
        self._until = max(loop.time(), self._until) + seconds
        process.block()
        until = self._until
        loop.call_in_thread(
            until - loop.time(), lambda: process.resume() if until == self._until else None
        )


@pytest.mark.parametrize(
    ("delay", "mib", "times"),
    [pytest.param(0.01, 64, 3.0, marks=pytest.mark.long), (0.05, 32, 2.5)],
)
def test_codecs_save_time_where_bytes_take_long(delay: float, mib: int, times: float) -> None:
    """Each host has a core, which codes while the line is busy."""

    async def coded(group: Group, x: Any) -> None:
        await group.all_reduce(x, codec=Slow())

    taken = [seconds(each, 4, delay, mib * MIB) for each in (all_reduce, coded)]
    assert taken[0] >= times * taken[1]


@pytest.mark.parametrize("exclusive", [False, True])
def test_a_scan_writes_nothing_again_that_has_not_left(exclusive: bool) -> None:
    """Its first frames leave before they are granted, and wait for room on the line."""

    async def program(group: Group) -> int:
        arrays = np.random.default_rng(1).random((group.size, 600_003))
        x = arrays[group.rank].copy()
        await (group.exscan(x) if exclusive else group.scan(x))
        before = group.rank + (not exclusive)
        return int((x != np.add.accumulate(arrays)[max(0, before - 1)]).sum())

    delay = 1e-3
    narrow = Conditions((delay, delay), 0.0, room=(MIB, MIB), largest=1 << 16, short=0.0, rate=RATE)
    assert Simulation(3, seed=1, conditions=narrow).run(program) == [0] * 3


def ahead_of(group: Group) -> int:
    """Bytes that are kept here of collectives that were not called."""
    early = group._context.calls.arrivals.early.values()
    return sum(len(frame.memory) for one in early for frame in one.frames)


@pytest.mark.parametrize("cancels", [False, True])
@pytest.mark.parametrize("operation", [all_reduce, send])
def test_a_busy_rank_keeps_no_more_than_is_said(operation: Operation, cancels: bool) -> None:
    """What goes ahead of being asked for is limited, over all that is under way."""
    size, nbytes, count = 3, 16 * MIB, 4

    async def program(group: Group) -> float:
        arrays = [np.full(nbytes // 4, i, np.float32) for i in range(count)]
        await group.barrier()
        if group.rank == 1:
            await asyncio.sleep(60)
            kept = ahead_of(group)
            if operation is all_reduce:
                assert 0 < kept <= 8 * MIB * (size - 1)
            else:
                assert kept < 100  # the barrier of ranks that have nothing to send
        if cancels and operation is send and group.rank == 1:
            arrays = []  # because no message comes
        works = [asyncio.ensure_future(operation(group, x)) for x in arrays]
        if cancels and group.rank == 0:
            await asyncio.sleep(30)
            for work in works:
                work.cancel()
        await asyncio.gather(*works, return_exceptions=True)
        if not cancels:
            factor = size if operation is all_reduce else 1
            assert all((x == factor * i).all() for i, x in enumerate(arrays))
        await group.barrier(tag="end")
        assert not ahead_of(group) and not any(group._context.calls._unsolicited)
        return 0.0

    assert Simulation(size, seed=1, conditions=line(0.05)).run(program) == [0.0] * size


@pytest.mark.parametrize(("delay", "trip"), [(1e-4, 0.0), (0.02, 0.08)])
def test_all_ranks_know_how_far_they_are(delay: float, trip: float) -> None:
    """The simulated coordinator is as far from each of them."""

    async def program(group: Group) -> float:
        heard = agreed(member.addresses for member in group._actor.people.values())
        assert heard == group._context.costs
        return heard.trip

    simulation = Simulation(3, seed=1, conditions=line(delay))
    assert simulation.run(program) == [trip] * 3
