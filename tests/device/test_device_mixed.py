"""Reductions to which some ranks give arrays on a device, and others arrays of the host."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from standin import StandinArray, StandinDevice, hold

import aiodist
from aiodist import (
    CollectiveAbortedError,
    CollectiveTimeoutError,
    Group,
    MismatchError,
    PeerLostError,
    ReduceOp,
)
from aiodist.devices import sections
from aiodist.engine.roll_call import marked

Devices = Callable[[int], list[StandinDevice]]

PATTERNS = [
    pattern
    for size in (2, 3, 4)
    for pattern in itertools.product("dh", repeat=size)
    if len(set(pattern)) > 1
]
"""Whose arrays are on a device (d), and whose on the host (h)."""


class Ranks:
    """The devices of some ranks, None where there is none."""

    def __init__(self, make: Devices, pattern: tuple[str, ...]) -> None:
        self.size = len(pattern)
        self._devices = [make(1)[0] if each == "d" else None for each in pattern]

    def put(self, rank: int, values: Any) -> Any:
        device = self._devices[rank]
        return values.copy() if device is None else device.put(values)

    def check(self, rank: int, got: Any, due: Any) -> None:
        device = self._devices[rank]
        assert isinstance(got, np.ndarray if device is None else StandinArray)
        np.testing.assert_array_equal(got if device is None else device.get(got), due)


async def each(groups: list[Group], call: Callable[[Group, int], Any]) -> list[Any]:
    return list(await asyncio.gather(*(call(g, g.rank) for g in groups)))


async def test_many_slots_are_described_alike(devices: Devices) -> None:
    """With more than four, the text of a call has a digest of them."""
    ranks = Ranks(devices, tuple("ddddh"))
    async with aiodist.local(5) as groups:
        for listed in (True, False):

            def slots(group: Group, rank: int, listed: bool = listed) -> Any:
                if listed:
                    return group.reduce_scatter([ranks.put(rank, np.ones(3)) for _ in range(5)])
                return group.reduce_scatter(ranks.put(rank, np.ones(15)))

            for rank, got in enumerate(await each(groups, slots)):
                ranks.check(rank, got, np.full(3, 5.0))


@pytest.mark.parametrize("pattern", PATTERNS, ids="".join)
@pytest.mark.parametrize("length", [7, 300_000])
@pytest.mark.sample(12)
async def test_reductions(devices: Devices, pattern: tuple[str, ...], length: int) -> None:
    ranks = Ranks(devices, pattern)
    size = ranks.size
    xs = [np.random.default_rng(rank).random(length).astype(np.float32) for rank in range(size)]
    async with aiodist.local(size) as groups:

        def given() -> list[Any]:
            return [ranks.put(rank, x) for rank, x in enumerate(xs)]

        host = [x.copy() for x in xs]
        await each(groups, lambda g, r: g.all_reduce(host[r]))
        for tag in (None, "tagged"):
            on = given()
            got = await each(groups, lambda g, r, on=on, t=tag: g.all_reduce(on[r], tag=t))
            for rank in range(size):
                assert got[rank] is on[rank]
                ranks.check(rank, got[rank], host[0])
            on = given()
            got = await each(
                groups, lambda g, r, on=on, t=tag: g.reduce(on[r], size - 1, ReduceOp.MAX, tag=t)
            )
            ranks.check(size - 1, got[size - 1], np.maximum.reduce(xs))
            ranks.check(0, on[0], xs[0])
            on = given()
            got = await each(
                groups,
                lambda g, r, on=on, t=tag: g.reduce_scatter(on[r], ReduceOp.MIN, tag=t),
            )
            for rank in range(size):
                ranks.check(rank, got[rank], np.array_split(np.minimum.reduce(xs), size)[rank])
            on = given()
            got = await each(groups, lambda g, r, on=on, t=tag: g.scan(on[r], ReduceOp.MAX, tag=t))
            for rank in range(size):
                ranks.check(rank, got[rank], np.maximum.reduce(xs[: rank + 1]))


@pytest.mark.parametrize("late", range(4))
async def test_whoever_comes_late(devices: Devices, late: int) -> None:
    """What has come before a rank has called it is of either kind."""
    ranks = Ranks(devices, ("d", "h", "d", "h"))
    async with aiodist.local(4) as groups:
        xs = [ranks.put(rank, np.full(9, rank + 1.0)) for rank in range(4)]
        works = {g.rank: g.all_reduce(xs[g.rank]) for g in groups if g.rank != late}
        await each(groups, lambda g, r: g.barrier(tag="turn"))
        assert not any(work.done() for work in works.values())
        works[late] = groups[late].all_reduce(xs[late])
        for rank, work in works.items():
            ranks.check(rank, await work, np.full(9, 10.0))


async def test_the_first_word_of_a_rank_counts(
    devices: Devices, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 waits for the word of rank 2 when rank 1 has had all, and goes on without the mark."""
    made = devices(3)
    async with aiodist.local(3) as groups:
        last = groups[2]._context.calls.arrivals
        say, delayed = last._say_called, []

        def call_roll(op: Any) -> None:
            say(1, op, marked(op.call))
            delayed.append(op)

        monkeypatch.setattr(last, "call_roll", call_roll)
        works = [g.all_reduce(d.put(np.ones(9)), tag=7) for g, d in zip(groups, made, strict=True)]
        waiting, through, _ = [next(iter(group._context.calls.ops.values())) for group in groups]
        while through.roll != {0: True, 2: True}:
            await each(groups, lambda g, r: g.barrier(tag="turn"))
        await each(groups, lambda g, r: g.barrier(tag="turn"))  # behind what rank 1 sends then
        assert waiting.roll == {1: True}
        say(0, delayed[0], marked(delayed[0].call))
        for device, work in zip(made, works, strict=True):
            np.testing.assert_array_equal(device.get(await work), np.full(9, 3.0))
        assert [device.opened for device in made] == [2, 2, 2]  # nothing went through the host


async def test_lists_out_and_operators(devices: Devices) -> None:
    ranks = Ranks(devices, ("h", "d", "d"))
    shapes = [(3,), (2, 5), (4,), (1,), (0,), (6,)]
    longest = ReduceOp.custom(np.maximum, commutative=True, elementwise=True, name="longest")
    async with aiodist.local(3) as groups:
        xs = [
            [
                ranks.put(r, np.full(shape, r + 1, t))
                for shape, t in zip(shapes, "fdifdi", strict=True)
            ]
            for r in range(3)
        ]
        got = await each(groups, lambda g, r: g.all_reduce(xs[r]))
        for rank in range(3):
            for result, shape in zip(got[rank], shapes, strict=True):
                ranks.check(rank, result, np.full(shape, 6))
        one = [ranks.put(r, np.full((5, 4), r + 1.0)) for r in range(3)]
        outs = [ranks.put(r, np.zeros((5, 4))) for r in range(3)]
        await each(groups, lambda g, r: g.all_reduce(one[r], out=outs[r]))
        for rank in range(3):
            ranks.check(rank, one[rank], np.full((5, 4), rank + 1))
            ranks.check(rank, outs[rank], np.full((5, 4), 6))
        got = await each(groups, lambda g, r: g.all_reduce(one[r], longest))
        for rank in range(3):
            ranks.check(rank, got[rank], np.full((5, 4), 3))
        few = [ranks.put(r, np.full(3, r + 1, np.uint16)) for r in range(3)]
        await each(groups, lambda g, r: g.all_reduce(few[r]))
        for rank in range(3):
            ranks.check(rank, few[rank], np.full(3, 6))


async def test_many_at_once_in_another_order_everywhere(devices: Devices) -> None:
    ranks = Ranks(devices, ("d", "h", "d"))
    async with aiodist.local(3) as groups:
        xs = [[ranks.put(r, np.full(50, float(tag))) for tag in range(6)] for r in range(3)]
        await each(
            groups,
            lambda g, r: asyncio.gather(
                *(g.all_reduce(xs[r][(tag + 2 * r) % 6], tag=(tag + 2 * r) % 6) for tag in range(6))
            ),
        )
        for rank in range(3):
            for tag in range(6):
                ranks.check(rank, xs[rank][tag], np.full(50, 3.0 * tag))


async def test_it_is_said_once(devices: Devices, caplog: pytest.LogCaptureFixture) -> None:
    ranks = Ranks(devices, ("d", "h"))
    with caplog.at_level(logging.WARNING, "aiodist.group"):
        async with aiodist.local(2) as groups:
            for _ in range(3):
                xs = [ranks.put(r, np.ones(3)) for r in range(2)]
                await each(groups, lambda g, r, xs=xs: g.all_reduce(xs[r]))
    (line,) = [record.getMessage() for record in caplog.records]
    assert "rank 0" in line and "other ranks give tensors of the host" in line


async def test_other_shapes_are_a_mismatch(devices: Devices) -> None:
    ranks = Ranks(devices, ("d", "h", "d"))
    async with aiodist.local(3) as groups:
        for wrong in range(3):
            xs = [ranks.put(r, np.ones(4 if r == wrong else 3)) for r in range(3)]
            works = [g.all_reduce(x) for g, x in zip(groups, xs, strict=True)]
            for work in works:
                with pytest.raises(MismatchError) as caught:
                    await work
                assert "device" not in str(caught.value)
                assert caught.value.calls[wrong] == "all_reduce(SUM, float64[4])"
        xs = [ranks.put(r, np.ones(3)) for r in range(3)]
        await each(groups, lambda g, r: g.all_reduce(xs[r]))
        for rank in range(3):
            ranks.check(rank, xs[rank], np.full(3, 3.0))


async def test_devices_are_read_where_they_lie_again_afterwards(devices: Devices) -> None:
    made = devices(2)
    async with aiodist.local(2) as groups:
        await each(groups, lambda g, r: g.all_reduce(np.ones(3) if r else made[0].put(np.ones(3))))
        assert [device.opened for device in made] == [0, 0]
        xs = [device.put(np.ones(3)) for device in made]
        await each(groups, lambda g, r: g.all_reduce(xs[r]))
        assert [device.opened for device in made] == [1, 1]


async def test_given_up(devices: Devices) -> None:
    """Cancelled by a rank of either kind, while the copies are held up or while another is late."""
    made = devices(1)
    async with aiodist.local(3) as groups:
        for quitter in (0, 1):
            gate = made[0].current().hold()
            x = made[0].put(np.ones(50))
            xs = [x, np.ones(50), np.ones(50)]
            works = [g.all_reduce(x) for g, x in zip(groups, xs, strict=True)]
            await each(groups, lambda g, r: g.barrier(tag="turn"))
            works[quitter].cancel()
            made[0].fill(x, 7.0)
            for rank, work in enumerate(works):
                if rank != quitter:
                    with pytest.raises(CollectiveAbortedError):
                        await work
            gate.set()
            np.testing.assert_array_equal(made[0].get(x), np.full(50, 7.0))
        entered = groups[1].all_reduce(np.ones(50))
        await each(groups, lambda g, r: g.barrier(tag="turn"))
        works = [groups[0].all_reduce(x, timeout=0.05), entered]
        for work in works:
            with pytest.raises(CollectiveTimeoutError) as caught:
                await work
            assert list(caught.value.missing) == [2]
        while any(g._context.device_memory._limbo for g in groups):
            await each(groups, lambda g, r: g.barrier(tag="turn"))


async def test_a_rank_is_lost(devices: Devices) -> None:
    ranks = Ranks(devices, ("d", "h", "d"))
    async with aiodist.local(3) as groups:
        xs = [ranks.put(r, np.ones(5)) for r in range(3)]
        works = [groups[r].all_reduce(xs[r]) for r in (0, 2)]
        await each(groups, lambda g, r: g.barrier(tag="turn"))
        groups[1].abort()
        for work in works:
            with pytest.raises(aiodist.AiodistError):
                await work


async def test_who_is_done_with_a_reduction_may_leave(devices: Devices) -> None:
    """Others that wait for their own device alone do not need it any more."""
    (device,) = devices(1)
    async with aiodist.local(3) as groups:
        x = device.put(np.ones(50))
        works = [groups[0].all_reduce(x), groups[1].all_reduce(np.full(50, 2.0))]
        context = groups[0]._context
        (op,) = context.calls.ops.values()
        while not context.device_memory._said or op.waiting_for is None:  # it has its copies
            await each(groups, lambda g, r: g.barrier(tag="turn"))
        gate = hold(context.device_memory.stream(device))
        await groups[2].all_reduce(np.full(50, 4.0))
        await works[1]
        await asyncio.gather(groups[1].close(), groups[2].close())
        for left in (1, 2):
            with pytest.raises(PeerLostError):
                await groups[0].recv(src=left)
        assert not works[0].done()
        gate.set()
        np.testing.assert_array_equal(device.get(await works[0]), np.full(50, 7.0))


async def test_who_is_done_with_a_broadcast_may_leave(devices: Devices) -> None:
    (device,) = devices(1)
    async with aiodist.local(2) as groups:
        x = device.put(np.zeros(50_000))
        gate = hold(groups[0]._context.device_memory.stream(device))
        work = groups[0].broadcast(x, 1)
        await groups[1].broadcast(np.ones(50_000), 1)
        await groups[1].close()
        with pytest.raises(PeerLostError):
            await groups[0].recv(src=1)
        assert not work.done()
        gate.set()
        np.testing.assert_array_equal(device.get(await work), np.ones(50_000))


async def test_values_go_from_and_to_ranks_without_a_device(devices: Devices) -> None:
    ranks = Ranks(devices, ("d", "h", "d"))
    async with aiodist.local(3) as groups:
        xs = [ranks.put(r, np.full(2000, float(r))) for r in range(3)]
        for root in range(3):
            into = [ranks.put(r, np.full(2000, float(r))) for r in range(3)]
            got = await each(groups, lambda g, r, i=into, s=root: g.broadcast(i[r], s))
            for rank in range(3):
                ranks.check(rank, got[rank], np.full(2000, float(root)))
            parts = await each(groups, lambda g, r, s=root: g.gather(xs[r], s))
            for src, part in enumerate(parts[root]):
                np.testing.assert_array_equal(_host(part), np.full(2000, float(src)))
            slots = [ranks.put(root, np.full(30, float(r))) for r in range(3)]
            outs = [ranks.put(r, np.zeros(30)) for r in range(3)]
            got = await each(
                groups,
                lambda g, r, s=root, k=slots, o=outs: g.scatter(k if r == s else None, s, out=o[r]),
            )
            for rank in range(3):
                ranks.check(rank, outs[rank], np.full(30, float(rank)))
        for parts in await each(groups, lambda g, r: g.all_gather(xs[r])):
            for src, part in enumerate(parts):
                np.testing.assert_array_equal(_host(part), np.full(2000, float(src)))
        slots = [[ranks.put(r, np.full(9, 3.0 * r + dst)) for dst in range(3)] for r in range(3)]
        for dst, parts in enumerate(await each(groups, lambda g, r: g.all_to_all(slots[r]))):
            for src, part in enumerate(parts):
                np.testing.assert_array_equal(_host(part), np.full(9, 3.0 * src + dst))
        # By now values go through the host; reductions go on as well.
        await each(groups, lambda g, r: g.all_reduce(xs[r]))
        for rank in range(3):
            ranks.check(rank, xs[rank], np.full(2000, 3.0))


@pytest.mark.parametrize("custom", [False, True])
@pytest.mark.parametrize("tag", [None, "tagged"])
async def test_ranks_that_would_go_in_sections(
    devices: Devices, monkeypatch: pytest.MonkeyPatch, custom: bool, tag: str | None
) -> None:
    """Those whose devices do not reach each other, or have no such operator, have begun to."""
    monkeypatch.setattr(sections, "SECTION", 100)
    longest = ReduceOp.custom(np.maximum, commutative=True, elementwise=True, name="longest")
    op = longest if custom else ReduceOp.MAX
    ranks = Ranks(devices, ("d", "h", "d"))
    all_ranks = Ranks(devices, ("d", "d", "d"))
    xs = [np.random.default_rng(r).random(500) for r in range(3)]
    async with aiodist.local(3, transports=("inproc",)) as groups:
        for which in (all_ranks, ranks, all_ranks):
            for late in (None, 0, 1):
                given = [which.put(r, x) for r, x in enumerate(xs)]
                works = {
                    r: groups[r].all_reduce(given[r], op, tag=tag) for r in range(3) if r != late
                }
                if late is not None:
                    await each(groups, lambda g, r: g.barrier(tag="turn"))
                    works[late] = groups[late].all_reduce(given[late], op, tag=tag)
                for rank, work in works.items():
                    which.check(rank, await work, np.maximum.reduce(xs))


async def test_messages_between_a_device_and_the_host(devices: Devices) -> None:
    ranks = Ranks(devices, ("d", "h"))
    async with aiodist.local(2) as groups:
        for length in (3, 200_000):
            x, y = [ranks.put(r, np.full(length, float(r + 1))) for r in range(2)]
            into = [ranks.put(r, np.zeros(length)) for r in range(2)]
            await asyncio.gather(groups[0].send(x, 1), groups[1].recv(src=0, out=into[1]))
            ranks.check(1, into[1], np.full(length, 1.0))
            await asyncio.gather(groups[1].send(y, 0), groups[0].recv(src=1, out=into[0]))
            ranks.check(0, into[0], np.full(length, 2.0))
            _, got = await asyncio.gather(groups[1].send(y, 0), groups[0].recv(src=1))
            np.testing.assert_array_equal(got, y)


def _host(array: Any) -> Any:
    device: StandinDevice | None = getattr(array, "__aiodist_device__", None)
    return array if device is None else device.get(array)
