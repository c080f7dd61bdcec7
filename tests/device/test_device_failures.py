"""What is read of devices when ranks cancel, differ, or die; and what is kept until when."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Callable

import numpy as np
import pytest
from standin import StandinDevice, hold

import aiodist
from aiodist import CollectiveAbortedError, CollectiveTimeoutError, Group, MismatchError

Devices = Callable[[int], list[StandinDevice]]
Blind = Callable[[StandinDevice], None]


async def turns(groups: list[Group], count: int = 10) -> None:
    """Let that many other collectives pass."""
    for _ in range(count):
        await asyncio.gather(*(g.all_reduce(1, tag="turn") for g in groups))


async def drained(groups: list[Group]) -> None:
    while any(g._context.device_memory._limbo for g in groups):
        await turns(groups, 1)


async def test_cancelled_while_work_is_queued(devices: Devices) -> None:
    ranks = devices(2)
    async with aiodist.local(2) as groups:
        xs = [device.put(np.ones(10)) for device in ranks]
        gate = ranks[1].current().hold()  # so is what rank 0 has queued
        ranks[1].fill(xs[1], 2.0)
        works = [g.all_reduce(x) for g, x in zip(groups, xs, strict=True)]
        await turns(groups)
        works[0].cancel()
        # This comes after what the operation had queued, and nothing of it comes after this.
        ranks[0].fill(xs[0], 7.0)
        with pytest.raises(CollectiveAbortedError) as caught:
            await works[1]
        assert caught.value.rank == 0
        assert all(g._context.device_memory._limbo for g in groups)
        gate.set()
        await drained(groups)
        np.testing.assert_array_equal(ranks[0].get(xs[0]), np.full(10, 7.0))
        works = [g.all_reduce(x) for g, x in zip(groups, xs, strict=True)]
        await asyncio.gather(*works)  # the group is as good as before


async def test_what_ends_before_it_starts_writes_and_keeps_nothing(devices: Devices) -> None:
    ranks = devices(2)
    async with aiodist.local(2) as groups:
        memory = groups[0]._context.device_memory
        x, out = ranks[0].put(np.ones(4)), ranks[0].put(np.zeros(4))
        ranks[0].get(out)
        gate = hold(memory.stream(ranks[0]))
        groups[1].all_reduce(ranks[1].put(np.ones(4))).cancel()
        groups[1].share(None).cancel()
        await turns(groups)  # rank 0 has heard of both
        for work in (groups[0].all_reduce(x, out=out), groups[0].share(x)):
            with pytest.raises(CollectiveAbortedError):
                await work
        ranks[0].fill(out, 7.0)
        ranks[0].get(out)
        gate.set()
        done = asyncio.Event()
        memory.when_drained(done.set)
        await done.wait()
        np.testing.assert_array_equal(ranks[0].get(out), np.full(4, 7.0))
        assert not memory.shares._lent


async def test_memory_is_kept_while_a_failed_operation_may_read_it(devices: Devices) -> None:
    ranks = devices(2)
    async with aiodist.local(2) as groups:
        xs = [device.put(np.ones(300_000)) for device in ranks]
        gates = [device.current().hold() for device in ranks]
        works = [g.all_reduce(x) for g, x in zip(groups, xs, strict=True)]
        await turns(groups)
        works[0].cancel()
        pools = [device.allocations for device in ranks]
        with pytest.raises(CollectiveAbortedError):
            await works[1]
        xs.clear()
        works.clear()
        gc.collect()
        assert [device.allocations for device in ranks] == pools
        for gate in gates:
            gate.set()
        await drained(groups)
        gc.collect()
        assert [device.allocations for device in ranks] == [count - 1 for count in pools]


async def test_memory_is_kept_while_another_rank_may_read_it(devices: Devices) -> None:
    ranks = devices(2)
    async with aiodist.local(2) as groups:
        device_memory = groups[1]._context.device_memory
        gate = hold(device_memory.stream(ranks[1]))  # rank 0 has nothing left to do, rank 1 has all
        xs = [device.put(np.ones(300_000)) for device in ranks]
        works = [g.reduce(x, 1) for g, x in zip(groups, xs, strict=True)]
        await turns(groups)
        works[0].cancel()
        pools = ranks[0].allocations
        with pytest.raises(CollectiveAbortedError):
            await works[1]
        xs.clear()
        works.clear()
        await turns(groups)
        gc.collect()
        assert ranks[0].allocations == pools
        gate.set()
        await drained(groups)
        gc.collect()
        assert ranks[0].allocations == pools - 1


async def test_different_calls(devices: Devices) -> None:
    ranks = devices(2)
    async with aiodist.local(2) as groups:
        works = [
            groups[0].all_reduce(ranks[0].put(np.ones(3))),
            groups[1].all_reduce(ranks[1].put(np.ones(4))),
        ]
        for work in works:
            with pytest.raises(MismatchError, match=r"float64\[4\]\)\n"):
                await work
        await drained(groups)


async def test_a_rank_that_does_not_come(devices: Devices) -> None:
    (device,) = devices(1)
    async with aiodist.local(2) as groups:
        with pytest.raises(CollectiveTimeoutError) as caught:
            await groups[0].all_reduce(device.put(np.ones(3)), timeout=0.05)
        assert caught.value.missing == (1,)
        await drained(groups)


async def test_the_device_takes_longer_than_the_deadline(devices: Devices) -> None:
    ranks = devices(2)
    async with aiodist.local(2) as groups:
        xs = [device.put(np.ones(3)) for device in ranks]
        gate = ranks[1].current().hold()
        works = [g.all_reduce(x, timeout=0.1) for g, x in zip(groups, xs, strict=True)]
        ends = await asyncio.gather(*works, return_exceptions=True)
        assert any(isinstance(end, CollectiveTimeoutError) for end in ends)
        assert not any(end is None for end in ends)
        gate.set()
        await drained(groups)


async def test_synchronize(devices: Devices) -> None:
    ranks = devices(2)
    async with aiodist.local(2) as groups:
        works = [g.all_reduce(d.put(np.ones(3))) for g, d in zip(groups, ranks, strict=True)]
        with pytest.raises(RuntimeError, match="await it"):
            works[0].synchronize()
        await asyncio.gather(*works)
        works[0].synchronize()


async def test_allocations_are_opened_once(devices: Devices) -> None:
    ranks = devices(3)
    async with aiodist.local(3) as groups:
        for _ in range(4):
            xs = [device.put(np.ones(100)) for device in ranks]
            for tag in (None, "a"):
                await asyncio.gather(
                    *(g.all_reduce(x, tag=tag) for g, x in zip(groups, xs, strict=True))
                )
        assert [device.opened for device in ranks] == [2, 2, 2]


async def test_through_the_host_where_a_device_is_not_seen(
    devices: Devices, blind: Blind, caplog: pytest.LogCaptureFixture
) -> None:
    ranks = devices(3)

    blind(ranks[1])
    caplog.set_level(logging.WARNING, "aiodist.group")
    async with aiodist.local(3) as groups:
        for _ in range(2):
            xs = [device.put(np.arange(6.0).reshape(2, 3)) for device in ranks]
            got = await asyncio.gather(
                *(g.all_reduce(x.T) for g, x in zip(groups, xs, strict=True))
            )
            assert len(got) == 3
            for device, x in zip(ranks, xs, strict=True):
                np.testing.assert_array_equal(device.get(x), 3 * np.arange(6.0).reshape(2, 3))
    said = [line for line in caplog.messages if "go through host memory" in line]
    assert len(said) == 3 and all("no peer access" in line for line in said)


async def test_the_stream_of_the_call_comes_after_what_was_queued(devices: Devices) -> None:
    """Also where the operation ends when another stream is the current one."""
    ranks = devices(2)
    async with aiodist.local(2) as groups:
        xs = [device.put(np.ones(10)) for device in ranks]
        for device, x in zip(ranks, xs, strict=True):
            device.get(x)
        gate = hold(groups[0]._context.device_memory.stream(ranks[0]))
        usual, side = ranks[0]._current, ranks[0].stream()
        ranks[0]._current = side
        work = groups[0].all_reduce(xs[0])
        ranks[0]._current = usual
        other = groups[1].all_reduce(xs[1])
        await turns(groups)
        other.cancel()
        with pytest.raises(CollectiveAbortedError):
            await work
        ranks[0]._current = side
        ranks[0].fill(xs[0], 7.0)
        gate.set()
        await drained(groups)
        np.testing.assert_array_equal(ranks[0].get(xs[0]), np.full(10, 7.0))


def test_an_event_that_two_streams_record(devices: Devices) -> None:
    """The last record counts, whichever stream comes first."""
    (device,) = devices(1)
    event = device.event()
    first, last = device.stream(), device.stream()
    gate = first.hold()
    first.record(event)
    assert not event.done()
    last.record(event)
    device.get(device.put(np.ones(1)))
    while last.queue:
        device.get(device.put(np.ones(1)))
    assert event.done()
    gate.set()
    while first.queue:
        device.get(device.put(np.ones(1)))
    assert event.done()
