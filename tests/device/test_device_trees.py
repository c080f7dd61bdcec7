"""Collectives of trees with arrays on stand-in devices, and ranks of which some have none."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from standin import SLOTS, StandinArray, StandinDevice

import aiodist
from aiodist import Group, MismatchError
from aiodist.devices.work import EVENTS

Devices = Callable[[int], list[StandinDevice]]


async def each(groups: list[Group], call: Callable[[Group, int], Any]) -> list[Any]:
    return list(await asyncio.gather(*(call(g, g.rank) for g in groups)))


def on(groups: list[Group], ranks: list[StandinDevice]) -> None:
    for group, device in zip(groups, ranks, strict=True):
        group._context.device_memory.use(device)


def check(device: StandinDevice, got: Any, due: Any) -> None:
    assert isinstance(got, StandinArray)
    np.testing.assert_array_equal(device.get(got), due)


@pytest.mark.parametrize("tag", [None, "tagged"])
@pytest.mark.parametrize("length", [3, 40_000])
async def test_trees(ranks: list[StandinDevice], tag: str | None, length: int) -> None:
    async with aiodist.local(3) as groups:
        on(groups, ranks)

        def tree(rank: int) -> dict[str, Any]:
            device = ranks[rank]
            return {
                "w": device.put(np.arange(float(length)) + rank),
                "host": np.full(length, rank, np.int32),
                "list": [rank, device.put(np.full((2, 2), rank, np.uint8)).T, "text"],
            }

        def check_tree(at: int, rank: int, got: Any) -> None:
            check(ranks[at], got["w"], np.arange(float(length)) + rank)
            np.testing.assert_array_equal(got["host"], np.full(length, rank))
            assert got["list"][0] == rank and got["list"][2] == "text"
            check(ranks[at], got["list"][1], np.full((2, 2), rank))

        results = await each(groups, lambda g, r: g.all_gather(tree(r), tag=tag))
        for at, parts in enumerate(results):
            for rank, part in enumerate(parts):
                check_tree(at, rank, part)
        parts = await each(groups, lambda g, r: g.gather(tree(r), 1, tag=tag))
        assert parts[0] is parts[2] is None
        for rank, part in enumerate(parts[1]):
            check_tree(1, rank, part)
        results = await each(
            groups, lambda g, r: g.broadcast(tree(2) if r == 2 else None, 2, tag=tag)
        )
        for at, got in enumerate(results):
            check_tree(at, 2, got)
        slots = [[tree(src) for _ in range(3)] for src in range(3)]
        results = await each(
            groups, lambda g, r: g.scatter(slots[0] if r == 0 else None, 0, tag=tag)
        )
        for at, got in enumerate(results):
            check_tree(at, 0, got)
        results = await each(groups, lambda g, r: g.all_to_all(slots[r], tag=tag))
        for at, parts in enumerate(results):
            for src, part in enumerate(parts):
                check_tree(at, src, part)


async def test_what_is_given_receives_whatever_it_is(ranks: list[StandinDevice]) -> None:
    """Arrays on the host where others are on devices, and the other way round."""
    x = np.arange(10_000.0)
    async with aiodist.local(3) as groups:
        on(groups, ranks)
        for src in range(3):
            given = [ranks[0].put(x * 0), np.zeros_like(x), ranks[2].put(x * 0)]
            given[src] = x + src if src == 1 else ranks[src].put(x + src)
            results = await each(
                groups, lambda g, r, given=given, src=src: g.broadcast(given[r], src)
            )
            for rank, got in enumerate(results):
                assert got is given[rank]
                if rank == 1:
                    np.testing.assert_array_equal(got, x + src)
                else:
                    check(ranks[rank], got, x + src)
        mixed = [ranks[0].put(x), x + 1, ranks[2].put(x + 2)]
        outs = [np.zeros_like(x), ranks[1].put(x * 0), np.zeros_like(x)]
        await each(groups, lambda g, r: g.gather(mixed[r], 1, out=outs if r == 1 else None))
        np.testing.assert_array_equal(outs[0], x)
        check(ranks[1], outs[1], x + 1)
        np.testing.assert_array_equal(outs[2], x + 2)
        results = await each(groups, lambda g, r: g.all_gather(mixed[r]))
        for at, parts in enumerate(results):
            check(ranks[at], parts[0], x)
            np.testing.assert_array_equal(parts[1], x + 1)
            check(ranks[at], parts[2], x + 2)


async def test_a_rank_without_a_device(devices: Devices, caplog: pytest.LogCaptureFixture) -> None:
    """What the others have comes to it as arrays of the host, and all go through the host."""
    ranks = devices(2)
    caplog.set_level(logging.WARNING, "aiodist.group")
    x = np.arange(20_000.0)
    async with aiodist.local(3) as groups:
        on(groups[:2], ranks)
        for _ in range(2):
            given = [{"x": ranks[0].put(x)}, {"x": ranks[1].put(x + 1)}, {"x": x + 2}]
            results = await each(groups, lambda g, r, given=given: g.all_gather(given[r]))
            for at, parts in enumerate(results):
                for src, part in enumerate(parts):
                    if at < 2 and src < 2:
                        check(ranks[at], part["x"], x + src)
                    else:
                        np.testing.assert_array_equal(np.asarray(part["x"]), x + src)
    said = [line for line in caplog.messages if "go through host memory" in line]
    assert len(said) == 3 and all("rank 2" in line for line in said)


async def test_arrays_of_two_devices_are_refused(devices: Devices) -> None:
    one, other = devices(2)
    async with aiodist.local(1) as (group,):
        both = [one.put(np.ones(2)), other.put(np.ones(2))]
        for call in (group.all_gather, group.broadcast, group.all_reduce):
            with pytest.raises(TypeError, match="on one device"):
                call(both)
        with pytest.raises(TypeError, match="on one device"):
            group.all_reduce([one.put(np.ones(2)), np.ones(2)])
        with pytest.raises(TypeError, match=r"value\[0\]"):
            array = one.put(np.ones(2))
            array.name = None
            group.all_gather([array])


async def test_what_does_not_fit(ranks: list[StandinDevice]) -> None:
    async with aiodist.local(3) as groups:
        on(groups, ranks)
        for wrong in (ranks[1].put(np.ones(5)), ranks[1].put(np.ones(4, np.int8)), np.ones(5)):
            given = [ranks[0].put(np.ones(4)), wrong, None]
            works = [g.broadcast(x, 0) for g, x in zip(groups, given, strict=True)]
            ends = await asyncio.gather(*works, return_exceptions=True)
            assert isinstance(ends[1], MismatchError)
            assert all(isinstance(end, aiodist.AiodistError) for end in ends)
        works = [g.broadcast(ranks[1].put(np.ones(4)) if g.rank == 1 else 7, 0) for g in groups]
        ends = await asyncio.gather(*works, return_exceptions=True)
        assert isinstance(ends[1], MismatchError)


async def test_calls_that_raise_lose_no_events(devices: Devices) -> None:
    (device,) = devices(1)
    async with aiodist.local(1) as (group,):
        x = device.put(np.ones(3))
        for _ in range(10):
            with pytest.raises(TypeError):
                group.all_gather([x, object()])
            with pytest.raises(ValueError):
                group.all_reduce(x, out=device.put(np.ones(4)))
            with pytest.raises(ValueError):
                group.all_gather(x, out=[1, 2])
        gc.collect()
        await group.all_reduce(x)
        assert SLOTS - len(device._slots) <= 3 * EVENTS


async def test_allocations_that_are_freed_are_closed(devices: Devices) -> None:
    ranks = devices(2)
    async with aiodist.local(2) as groups:
        on(groups, ranks)
        memories = [g._context.device_memory for g in groups]
        for turn in range(4):
            xs = [device.put(np.full(300_000, turn)) for device in ranks]  # an allocation each
            await each(groups, lambda g, r, xs=xs: g.all_gather(xs[r]))
            del xs
            gc.collect()
        for memory in memories:
            memory.handles.review()
        while any(len(memory.handles._memories) > 1 for memory in memories):
            await each(groups, lambda g, r: g.barrier())


async def test_into_one_array(ranks: list[StandinDevice]) -> None:
    """Rows, equal parts, and parts as long as what comes."""
    async with aiodist.local(3) as groups:
        on(groups, ranks)
        xs = [device.put(np.arange(2.0) + r) for r, device in enumerate(ranks)]
        outs = [device.new("float64", (3, 2)) for device in ranks]
        await each(groups, lambda g, r: g.all_gather(xs[r], out=outs[r]))
        for device, out in zip(ranks, outs, strict=True):
            check(device, out, [[0.0, 1.0], [1.0, 2.0], [2.0, 3.0]])
        uneven = [device.put(np.full(r + 1, float(r))) for r, device in enumerate(ranks)]
        outs = [device.new("float64", (6,)) for device in ranks]
        await each(groups, lambda g, r: g.all_gather(uneven[r], out=outs[r]))
        for device, out in zip(ranks, outs, strict=True):
            check(device, out, [0.0, 1.0, 1.0, 2.0, 2.0, 2.0])
        there = np.zeros(6)
        await each(groups, lambda g, r: g.gather(uneven[r], 1, out=there if r == 1 else None))
        np.testing.assert_array_equal(there, [0.0, 1.0, 1.0, 2.0, 2.0, 2.0])
        slots = [
            [device.put(np.full(2, 10.0 * r + d)) for d in range(3)]
            for r, device in enumerate(ranks)
        ]
        outs = [device.new("float64", (6,)) for device in ranks]
        await each(groups, lambda g, r: g.all_to_all(slots[r], out=outs[r]))
        for rank, (device, out) in enumerate(zip(ranks, outs, strict=True)):
            check(device, out, [v for src in range(3) for v in (10.0 * src + rank,) * 2])
