"""Reductions of arrays on the stand-in device, of ranks in one loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgpack
import numpy as np
import pytest
from standin import StandinArray, StandinDevice

import aiodist
from aiodist import Group, ReduceOp
from aiodist.buffers.kernels import Kernel
from aiodist.devices.handles import Handles

Devices = Callable[[int], list[StandinDevice]]


def inputs(size: int, shape: tuple[int, ...] = (1000,), dtype: str = "float32") -> list[Any]:
    rng = np.random.default_rng(7)
    return [(rng.random(shape) * 50).astype(dtype) for _ in range(size)]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", ["float32", "float16", "int64", "uint8", "complex64"])
async def test_all_reduce(devices: Devices, size: int, dtype: str) -> None:
    ranks = devices(size)
    given = inputs(size, (37, 5), dtype)
    due = np.empty((37, 5), dtype)
    flat = [x.reshape(-1) for x in given]
    Kernel.of(ReduceOp.SUM, dtype).reduce(flat, due.reshape(-1), size)  # in rank order
    async with aiodist.local(size) as groups:
        for _ in range(3):
            xs = [device.put(x) for device, x in zip(ranks, given, strict=True)]
            got = await asyncio.gather(*(g.all_reduce(x) for g, x in zip(groups, xs, strict=True)))
            for device, x, result in zip(ranks, xs, got, strict=True):
                assert result is x
                np.testing.assert_array_equal(device.get(x), due)


async def test_a_handle_of_memory_is_told_once(
    devices: Devices, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[bool] = []
    describe = Handles.describe

    def noted(*args: Any) -> bytes:
        words = describe(*args)
        _, _, [[_, handle, *_]] = msgpack.unpackb(words[1:])
        told.append(bool(handle))
        return words

    monkeypatch.setattr(Handles, "describe", noted)
    async with aiodist.local(2) as groups:
        xs = [device.put(np.ones(9)) for device in devices(2)]
        for _ in range(3):
            await asyncio.gather(*(g.all_reduce(x) for g, x in zip(groups, xs, strict=True)))
    assert told == [True] * 2 + [False] * 4


async def test_it_starts_after_what_is_queued_on_the_current_stream(devices: Devices) -> None:
    ranks = devices(2)
    async with aiodist.local(2) as groups:
        xs = [device.put(np.zeros(10)) for device in ranks]
        gate = ranks[1].current().hold()
        for device, x in zip(ranks, xs, strict=True):
            device.fill(x, 1.0)
        works = [g.all_reduce(x) for g, x in zip(groups, xs, strict=True)]
        for _ in range(10):  # however long it is waited
            await asyncio.gather(*(g.all_reduce(1, tag="other") for g in groups))
        assert not any(work.done() for work in works)
        gate.set()
        await asyncio.gather(*works)
        for device, x in zip(ranks, xs, strict=True):
            np.testing.assert_array_equal(device.get(x), np.full(10, 2.0))


async def both(groups: list[Group], call: Callable[[Group, int], Any]) -> list[Any]:
    return list(await asyncio.gather(*(call(g, g.rank) for g in groups)))


async def test_other_reductions(devices: Devices) -> None:
    ranks = devices(3)
    given = inputs(3, (7, 3), "int64")

    def put() -> list[StandinArray]:
        return [device.put(x) for device, x in zip(ranks, given, strict=True)]

    async with aiodist.local(3) as groups:
        xs = put()
        got = await both(groups, lambda g, r: g.reduce(xs[r], 1, ReduceOp.MAX))
        assert got[0] is got[2] is None
        np.testing.assert_array_equal(ranks[1].get(got[1]), np.maximum.reduce(given))
        np.testing.assert_array_equal(ranks[0].get(xs[0]), given[0])
        xs = put()
        got = await both(groups, lambda g, r: g.reduce_scatter(xs[r]))
        parts = np.array_split(sum(given), 3)
        for device, result, part in zip(ranks, got, parts, strict=True):
            np.testing.assert_array_equal(device.get(result), part)
        for exclusive in (False, True):
            xs = put()
            name = "exscan" if exclusive else "scan"
            got = await both(groups, lambda g, r, n=name, xs=xs: getattr(g, n)(xs[r]))
            for r, (device, result) in enumerate(zip(ranks, got, strict=True)):
                stop = r if exclusive else r + 1
                due = sum(given[:stop]) if stop else given[0]
                np.testing.assert_array_equal(device.get(result), due)


async def test_lists_views_and_out(devices: Devices) -> None:
    ranks = devices(2)
    given = inputs(2, (6, 4))
    async with aiodist.local(2) as groups:
        xs = [device.put(x) for device, x in zip(ranks, given, strict=True)]
        ns = [device.put(np.arange(5)) for device in ranks]
        got = await both(groups, lambda g, r: g.all_reduce([xs[r].T, ns[r][1:3]]))
        for device, x, n, result in zip(ranks, xs, ns, got, strict=True):
            assert len(result) == 2
            np.testing.assert_array_equal(device.get(x), given[0] + given[1])
            np.testing.assert_array_equal(device.get(n), [0, 2, 4, 3, 4])
        xs = [device.put(x) for device, x in zip(ranks, given, strict=True)]
        outs = [device.new("float32", (6, 4)) for device in ranks]
        got = await both(groups, lambda g, r: g.all_reduce(xs[r], out=outs[r]))
        for device, x, out, own, result in zip(ranks, xs, outs, given, got, strict=True):
            assert result is out
            np.testing.assert_array_equal(device.get(x), own)
            np.testing.assert_array_equal(device.get(out), given[0] + given[1])


def seen_as(x: StandinArray, dtype: str) -> StandinArray:
    return StandinArray(x.__aiodist_device__, x.base.view(dtype), x.block)


@pytest.mark.parametrize("op", ["all_reduce", "scan", "exscan", "reduce"])
async def test_all_inputs_are_read_before_out_is_written(devices: Devices, op: str) -> None:
    ranks = devices(2)
    async with aiodist.local(2) as groups:
        rows = [device.put(np.arange(9.0)) for device in ranks]
        squares = [device.put(np.arange(9.0).reshape(3, 3)) for device in ranks]
        # of two dtypes: each result goes where the other input lies
        ones = [device.put(np.arange(4, dtype="float32")) for device in ranks]
        others = [device.put(np.arange(10, 14, dtype="int32")) for device in ranks]
        crossed = [
            [seen_as(other, "float32"), seen_as(one, "int32")]
            for one, other in zip(ones, others, strict=True)
        ]
        dst = {"dst": 1} if op == "reduce" else {}

        def call(xs: Any, outs: Any) -> Callable[[Group, int], Any]:
            return lambda g, r: getattr(g, op)(
                xs[r], out=outs[r] if r == 1 or op != "reduce" else None, **dst
            )

        await both(groups, call([row[1:] for row in rows], [row[:-1] for row in rows]))
        await both(groups, call([square.T for square in squares], squares))
        pairs = [[one, other] for one, other in zip(ones, others, strict=True)]
        await both(groups, call(pairs, crossed))
        times = 1 if op == "exscan" else 2  # exscan gives rank 1 what rank 0 has
        for array, due in (
            (rows[1][:-1], np.arange(1.0, 9)),
            (squares[1], np.arange(9.0).reshape(3, 3).T),
            (crossed[1][0], np.arange(4)),
            (crossed[1][1], np.arange(10, 14)),
        ):
            np.testing.assert_array_equal(ranks[1].get(array), times * due)


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda g, x: g.all_reduce({"a": x}), TypeError, "x: expected an array or a flat list"),
        (lambda g, x: g.all_reduce([x, [x]]), TypeError, r"x\[1\]: expected an array, got list"),
        (lambda g, x: g.all_reduce([x, None]), TypeError, r"x\[1\]: expected an array, got None"),
        (lambda g, x: g.all_reduce(x, out={"a": x}), TypeError, "out: .* flat list .*, got dict"),
        (lambda g, x: g.all_reduce(x, out=[x]), ValueError, "expected one array, .* got 1 items"),
        (lambda g, x: g.all_reduce([x], out=x), ValueError, "a list of 1 arrays, as x is, got a S"),
        (lambda g, x: g.all_reduce([x], out=[]), ValueError, "a list of 1 arrays, .* got 0 items"),
        (lambda g, x: g.reduce_scatter({"a": x}), TypeError, "xs: expected a list of 1 slots"),
        (lambda g, x: g.reduce_scatter([{"a": x}]), TypeError, "one array of one dtype a slot"),
        (lambda g, x: g.reduce_scatter([x], out=[x]), TypeError, "out: expected an array, got l"),
        (lambda g, x: g.all_reduce([x, x]), ValueError, "share memory: give each array once"),
        (lambda g, x: g.all_reduce([x[:2], x[2:]], out=[x[:2], x[1:3]]), ValueError, "give each"),
        (lambda g, x: g.all_reduce(x, out=windows(x)), ValueError, "share one place in memory"),
    ],
)
async def test_calls_that_are_refused(
    devices: Devices, call: Callable[[Group, Any], Any], error: type[Exception], match: str
) -> None:
    (device,) = devices(1)
    async with aiodist.local(1) as groups:
        with pytest.raises(error, match=match):
            call(groups[0], device.put(np.ones((4, 2))))


def windows(x: StandinArray) -> StandinArray:
    base = np.lib.stride_tricks.as_strided(x.base.reshape(-1), (4, 2), (8, 8))
    return StandinArray(x.__aiodist_device__, base, x.block)


async def test_an_out_that_does_not_fit(devices: Devices) -> None:
    """It is refused on the rank that gives it, and the ranks are in step afterwards."""
    ranks = devices(2)
    async with aiodist.local(2) as groups:
        xs = [device.put(np.ones(6)) for device in ranks]
        other = groups[1].reduce_scatter(xs[1])
        for out in (ranks[0].new("float64", (2,)), ranks[0].new("int64", (3,))):
            with pytest.raises((ValueError, TypeError), match=r"out: is .*slot 0 of xs is"):
                groups[0].reduce_scatter(xs[0], out=out)
            with pytest.raises(aiodist.CollectiveAbortedError):
                await other
            other = groups[1].reduce_scatter(xs[1])
        out = ranks[0].new("float64", (6,))[::2]
        assert await groups[0].reduce_scatter(xs[0], out=out) is out
        await other
        np.testing.assert_array_equal(ranks[0].get(out), np.full(3, 2.0))
