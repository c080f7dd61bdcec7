"""Point to point of arrays on stand-in devices: where they go, and what is read until when."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from standin import SLOTS, StandinArray, StandinDevice, hold

import aiodist
from aiodist import Group, MismatchError
from aiodist.devices import sections
from aiodist.devices.work import EVENTS

Devices = Callable[[int], list[StandinDevice]]


@pytest.fixture(params=["device", "host", "sections"])
def two(
    request: pytest.FixtureRequest,
    devices: Devices,
    blind: Callable[[StandinDevice], None],
    monkeypatch: pytest.MonkeyPatch,
) -> list[StandinDevice]:
    """Two devices, that see each other's memory or do not; then what goes through the host may go
    in many sections."""
    made = devices(2)
    if request.param == "sections":
        monkeypatch.setattr(sections, "SECTION", 1000)
    if request.param != "device":
        for device in made:
            blind(device)
    return made


def check(device: StandinDevice, got: Any, due: Any) -> None:
    assert isinstance(got, StandinArray)
    np.testing.assert_array_equal(device.get(got), due)


async def turns(groups: list[Group], count: int = 10) -> None:
    for _ in range(count):
        await asyncio.gather(*(g.all_reduce(1, tag="turn") for g in groups))


def on(groups: list[Group], ranks: list[StandinDevice]) -> None:
    """What comes from a device goes to that of the rank."""
    for group, device in zip(groups, ranks, strict=True):
        group._context.device_memory.use(device)


@pytest.mark.parametrize("length", [0, 5, 200_000])
@pytest.mark.parametrize("given", ["nothing", "out", "strided"])
@pytest.mark.sample(11)
async def test_from_device_to_device(two: list[StandinDevice], length: int, given: str) -> None:
    x = np.arange(2.0 * length).reshape(2, length)
    async with aiodist.local(2) as groups:
        on(groups, two)
        out = None
        if given != "nothing":
            out = two[1].put(np.zeros(x.shape if given == "out" else x.T.shape))
        mine = two[0].put(x)
        sending = groups[0].send(mine, 1, tag="a")
        assert sending.nbytes == x.nbytes
        receiving = groups[1].recv(tag="a", out=out.T if given == "strided" and out else out)
        got, _ = await asyncio.gather(receiving, sending)
        check(two[1], got, x)
        assert (receiving.source, receiving.tag, receiving.nbytes) == (0, "a", x.nbytes)
        if out is not None:
            check(two[1], out, x if given == "out" else x.T)


async def test_views_and_order_on_the_stream(two: list[StandinDevice]) -> None:
    async with aiodist.local(2) as groups:
        on(groups, two)
        x = two[0].put(np.zeros((3, 4)))
        gate = two[0].current().hold()
        two[0].fill(x, 5.0)
        sending = groups[0].send(x.T, 1)
        receiving = groups[1].recv()
        await turns(groups)
        assert not sending.done() and not receiving.done()
        gate.set()
        await sending
        two[0].fill(x, 9.0)
        check(two[1], await receiving, np.full((4, 3), 5.0))


async def test_trees_and_mixes(two: list[StandinDevice]) -> None:
    tree = {"a": np.arange(3.0), "n": 7, "b": [np.ones((2, 2), np.int32), "text"]}
    async with aiodist.local(2) as groups:
        on(groups, two)
        mixed = {"a": two[0].put(tree["a"]), "n": 7, "b": [tree["b"][0], "text"]}
        await_all = asyncio.gather(groups[0].send(mixed, 1), groups[1].recv())
        _, got = await await_all
        check(two[1], got["a"], tree["a"])
        assert isinstance(got["b"][0], np.ndarray) and got["n"] == 7 and got["b"][1] == "text"
        # From the host to a device, from a device to the host, both small and large.
        for length in (4, 100_000):
            x = np.arange(float(length))
            out = two[1].put(np.zeros(length))
            _, got = await asyncio.gather(groups[0].send(x, 1), groups[1].recv(out=out))
            assert got is out
            check(two[1], out, x)
            there = np.zeros(length)
            sending = groups[0].send(two[0].put(x), 1)
            _, got = await asyncio.gather(sending, groups[1].recv(out=there))
            assert got is there
            np.testing.assert_array_equal(there, x)


async def test_to_a_rank_without_a_device(devices: Devices) -> None:
    (device,) = devices(1)
    async with aiodist.local(2) as groups:
        x = np.arange(70_000.0)
        _, got = await asyncio.gather(groups[0].send([device.put(x)], 1), groups[1].recv())
        np.testing.assert_array_equal(np.asarray(got[0]), x)
        out = np.zeros(70_000)
        await asyncio.gather(groups[0].send(device.put(x), 1), groups[1].recv(out=out))
        np.testing.assert_array_equal(out, x)


async def test_any_source_order_and_oneself(devices: Devices) -> None:
    ranks = devices(3)
    async with aiodist.local(3) as groups:
        # From here on the others have the memory of each rank open, and the rank itself has not.
        await asyncio.gather(*(g.all_gather(ranks[g.rank].put(np.ones(3))) for g in groups))
        on(groups, ranks)
        sends = [
            groups[rank].send(ranks[rank].put(np.full(4, 10.0 * rank + turn)), 2, tag=5)
            for turn in range(3)
            for rank in range(3)
        ]
        seen: dict[int, list[float]] = {0: [], 1: [], 2: []}
        for _ in range(9):
            work = groups[2].recv(tag=5)
            value = await work
            assert work.source is not None
            seen[work.source].append(float(ranks[2].get(value)[0]))
        assert seen == {r: [10.0 * r + turn for turn in range(3)] for r in range(3)}
        await asyncio.gather(*sends)
        both = [g.sendrecv(ranks[g.rank].put(np.full(3, g.rank)), (g.rank + 1) % 3) for g in groups]
        for rank, got in enumerate(await asyncio.gather(*both)):
            check(ranks[rank], got, np.full(3, (rank - 1) % 3))


async def test_out_that_does_not_fit_leaves_the_message(two: list[StandinDevice]) -> None:
    async with aiodist.local(2) as groups:
        on(groups, two)
        sending = groups[0].send(two[0].put(np.ones(4)), 1)
        with pytest.raises(MismatchError, match=r"float64\[5\]"):
            await groups[1].recv(out=two[1].put(np.ones(5)))
        with pytest.raises(MismatchError, match="float32"):
            await groups[1].recv(out=two[1].put(np.ones(4, np.float32)))
        with pytest.raises(ValueError, match="share one place"):
            wide = two[1].put(np.ones(1))
            two[1].get(wide)
            wide.base = np.broadcast_to(wide.base, 4)
            groups[1].recv(out=wide)
        with pytest.raises(ValueError, match="share a part of their memory"):
            x = two[1].put(np.ones(5))
            groups[1].recv(out=[x[1:], x[:4]])
        check(two[1], await groups[1].recv(), np.ones(4))
        await sending


async def test_what_is_sent_is_read_before_out_is_written(two: list[StandinDevice]) -> None:
    x = np.arange(1000.0)
    async with aiodist.local(2) as groups:
        on(groups, two)
        pairs = [[device.put(x + r), device.put(-x - r)] for r, device in enumerate(two)]
        gate = hold(groups[1]._context.device_memory.stream(two[1]))
        works = [g.sendrecv(pairs[r], 1 - r, out=pairs[r][::-1]) for r, g in enumerate(groups)]
        await turns(groups)
        gate.set()
        await asyncio.gather(*works)
        for rank, (device, (a, b)) in enumerate(zip(two, pairs, strict=True)):
            check(device, b, x + 1 - rank)
            check(device, a, -x - 1 + rank)


async def test_a_cancelled_receive_loses_no_message(two: list[StandinDevice]) -> None:
    """Whenever it is cancelled: nothing is written to `out` after what is queued then."""
    x = np.arange(50_000.0)
    async with aiodist.local(2) as groups:
        on(groups, two)
        for turn in range(12):
            gate = two[turn % 2].current().hold()
            sending = groups[0].send(two[0].put(x + turn), 1)
            out = two[1].put(np.zeros(50_000)) if turn % 3 else None
            receiving = groups[1].recv(out=out)
            await turns(groups, turn % 4)
            if turn % 2:
                gate.set()
            await turns(groups, turn // 4)
            cancelled = receiving.cancel()
            if out is not None:
                two[1].fill(out, 7.0)
            gate.set()
            got = await groups[1].recv() if cancelled else await receiving
            check(two[1], got, x + turn if cancelled or out is None else np.full(50_000, 7.0))
            if cancelled and out is not None:
                check(two[1], out, np.full(50_000, 7.0))
            await sending


async def test_a_cancelled_send_is_not_received(two: list[StandinDevice]) -> None:
    async with aiodist.local(2) as groups:
        on(groups, two)
        for late in (False, True):
            gate = two[0].current().hold()
            x = two[0].put(np.ones(1000))
            sending = groups[0].send(x, 1)
            receiving = groups[1].recv()
            await turns(groups)
            assert sending.cancel()
            two[0].fill(x, 7.0)
            await turns(groups, 3 if late else 0)
            second = groups[0].send(two[0].put(np.zeros(3)), 1)
            gate.set()
            check(two[1], await receiving, np.zeros(3))
            await second


async def test_what_was_sent_is_kept_while_it_may_be_read(devices: Devices) -> None:
    ranks = devices(2)
    async with aiodist.local(2) as groups:
        on(groups, ranks)
        gate = hold(groups[1]._context.device_memory.stream(ranks[1]))
        x = ranks[0].put(np.ones(300_000))
        sending = groups[0].send(x, 1)
        receiving = groups[1].recv()
        await turns(groups)
        sending.cancel()
        pools = ranks[0].allocations
        del x, sending
        await turns(groups)
        gc.collect()
        assert ranks[0].allocations == pools
        gate.set()
        while groups[0]._context.device_memory._limbo:
            await turns(groups, 1)
        gc.collect()
        assert ranks[0].allocations == pools - 1
        receiving.cancel()


async def test_memory_that_was_sent_to_oneself_is_closed(devices: Devices) -> None:
    (device,) = devices(1)
    async with aiodist.local(1) as groups:
        on(groups, [device])
        handles = groups[0]._context.device_memory.handles
        x = device.put(np.ones(300_000))
        await asyncio.gather(groups[0].send(x, 0), groups[0].recv(out=device.put(np.ones(300_000))))
        assert handles._memories
        del x
        gc.collect()
        handles.review()
        assert not handles._memories


async def test_events_and_memory_come_back(devices: Devices) -> None:
    """Any number of messages needs no more events, and nothing is opened twice."""
    ranks = devices(2)
    async with aiodist.local(2) as groups:
        on(groups, ranks)
        x = ranks[0].put(np.ones(10))
        for _ in range(30):
            await asyncio.gather(groups[0].send(x, 1), groups[1].recv())
        assert all(SLOTS - len(device._slots) <= 3 * EVENTS for device in ranks)
        assert ranks[1].opened == 1
        while not all(g._context.p2p.idle for g in groups):  # credit comes back a little later
            await turns(groups, 1)
