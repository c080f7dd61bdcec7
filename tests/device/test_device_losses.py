"""Messages and trees on stand-in devices when ranks are lost, late, or leave."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable

import numpy as np
import pytest
from over_links import until
from standin import StandinDevice, hold

import aiodist
from aiodist import CollectiveTimeoutError, Group, PeerLostError
from aiodist.devices import memory as device_memory
from aiodist.devices.waiting import Looks

Devices = Callable[[int], list[StandinDevice]]


def on(groups: list[Group], ranks: list[StandinDevice]) -> None:
    for group, device in zip(groups, ranks, strict=True):
        group._context.device_memory.use(device)


async def nobody_looks() -> None:
    """Until nothing is waited for that is queued on a device."""
    async with asyncio.timeout(10):
        loop = asyncio.get_running_loop()
        while any(type(it) is Looks and it._loop is loop for it in gc.get_objects()):
            gc.collect()
            await asyncio.sleep(0)


async def turns(groups: list[Group], count: int = 10) -> None:
    for _ in range(count):
        await asyncio.gather(*(g.barrier(tag="turn") for g in groups))


async def test_the_receiver_is_lost(devices: Devices) -> None:
    ranks = devices(3)
    async with aiodist.local(3) as groups:
        on(groups, ranks)
        gate = hold(groups[1]._context.device_memory.stream(ranks[1]))
        x = ranks[0].put(np.ones(300_000))
        pools = ranks[0].allocations
        sending = groups[0].send(x, 1)
        receiving = groups[1].recv()
        await turns(groups)
        groups[1].abort("it falls")
        with pytest.raises(PeerLostError) as caught:
            await sending
        assert tuple(caught.value.ranks) == (1,)
        with pytest.raises(aiodist.AiodistError):
            await receiving
        del x, sending, caught
        while groups[0]._context.device_memory._limbo:
            await turns([groups[0], groups[2]], 0)
            await asyncio.sleep(0)
        gc.collect()
        assert ranks[0].allocations == pools - 1
        gate.set()


@pytest.mark.parametrize("given", [False, True])
async def test_the_sender_is_lost(
    devices: Devices, monkeypatch: pytest.MonkeyPatch, given: bool
) -> None:
    """What was being read is given up; what is queued later on the stream comes after it."""
    monkeypatch.setattr(device_memory, "LINGER", 0.05)
    ranks = devices(2)
    async with aiodist.local(2) as groups:
        on(groups, ranks)
        gate = hold(groups[1]._context.device_memory.stream(ranks[1]))
        out = ranks[1].put(np.zeros(1000)) if given else None
        sending = groups[0].send(ranks[0].put(np.ones(1000)), 1)
        receiving = groups[1].recv(src=0, out=out)
        await turns(groups)
        groups[0].abort("it falls")
        with pytest.raises(PeerLostError):
            await receiving
        with pytest.raises(aiodist.AiodistError):
            await sending
        if out is not None:
            ranks[1].fill(out, 7.0)
        gate.set()
        if out is not None:
            np.testing.assert_array_equal(ranks[1].get(out), np.full(1000, 7.0))
        del receiving, sending
        async with asyncio.timeout(10):
            while ranks[0].allocations:
                await nobody_looks()
                await asyncio.sleep(0)


async def test_deadlines(devices: Devices) -> None:
    ranks = devices(2)
    async with aiodist.local(2) as groups:
        on(groups, ranks)
        x = ranks[0].put(np.ones(1000))
        with pytest.raises(CollectiveTimeoutError):
            await groups[0].send(x, 1, timeout=0.05)
        out = ranks[1].put(np.zeros(1000))
        with pytest.raises(CollectiveTimeoutError):
            await groups[1].recv(src=0, out=out, timeout=0.05)
        # The device takes longer than that.
        gate = ranks[0].current().hold()
        sending = groups[0].send(x, 1, tag=2)
        with pytest.raises(CollectiveTimeoutError):
            await groups[1].recv(src=0, tag=2, out=out, timeout=0.05)
        ranks[1].fill(out, 7.0)
        gate.set()
        np.testing.assert_array_equal(ranks[1].get(out), np.full(1000, 7.0))
        np.testing.assert_array_equal(ranks[1].get(await groups[1].recv(tag=2)), np.ones(1000))
        await sending
        with pytest.raises(CollectiveTimeoutError) as caught:
            await groups[0].all_gather({"x": x}, timeout=0.05)
        assert caught.value.missing == (1,)
        while any(g._context.device_memory._limbo for g in groups):
            await turns(groups, 1)


async def test_a_cancelled_tree(devices: Devices) -> None:
    """Nothing is written to what was given after what is queued then, and nobody completes with
    what is written then."""
    ranks = devices(3)
    async with aiodist.local(3) as groups:
        on(groups, ranks)
        for turn in range(6):
            gate = ranks[turn % 3].current().hold()
            xs = [device.put(np.full(20_000, float(turn))) for device in ranks]
            works = [
                g.broadcast({"x": x} if g.rank == 0 else None, 0) if turn % 2 else g.all_gather([x])
                for g, x in zip(groups, xs, strict=True)
            ]
            await turns(groups, turn)
            works[0].cancel()
            ranks[0].fill(xs[0], 7.0)
            gate.set()
            for work in works[1:]:
                with pytest.raises(aiodist.CollectiveAbortedError):
                    await work
            np.testing.assert_array_equal(ranks[0].get(xs[0]), np.full(20_000, 7.0))
        while any(g._context.device_memory._limbo for g in groups):
            await turns(groups, 1)


async def test_leaving_with_work_under_way(
    devices: Devices, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group that ends keeps what others may be reading for a while."""
    monkeypatch.setattr(device_memory, "LINGER", 0.05)
    ranks = devices(2)
    async with aiodist.local(2) as groups:
        on(groups, ranks)
        gate = hold(groups[1]._context.device_memory.stream(ranks[1]))
        x = ranks[0].put(np.ones(300_000))
        pools = ranks[0].allocations
        sending, receiving = groups[0].send(x, 1), groups[1].recv()
        await turns(groups)
        groups[0].abort("it falls")
        del x, sending
        gc.collect()
        assert ranks[0].allocations == pools
        gate.set()
        with pytest.raises(PeerLostError):
            await receiving
        del receiving
        async with asyncio.timeout(10):
            while ranks[0].allocations == pools:
                await nobody_looks()
                await asyncio.sleep(0)


async def test_a_rank_that_has_sent_may_leave_while_others_copy(
    devices: Devices, blind: Callable[[StandinDevice], None]
) -> None:
    """A gather through the host: ranks 1 and 2 send to rank 0 only."""
    ranks = devices(3)
    blind(ranks[0])
    async with aiodist.local(3) as groups:
        on(groups, ranks)
        gate = hold(groups[1]._context.device_memory.stream(ranks[1]))
        sources = [device.put(np.full(1000, float(rank))) for rank, device in enumerate(ranks)]
        zero, one, two = [g.gather(x, dst=0) for g, x in zip(groups, sources, strict=True)]
        await two
        await groups[2].close()
        await until(lambda: 2 in groups[0].lost and 2 in groups[1].lost)
        gate.set()
        await one
        got = await zero
        assert [ranks[0].get(x)[0] for x in got] == [0.0, 1.0, 2.0]
