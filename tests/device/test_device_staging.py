"""Large reductions through the host, in sections."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from standin import StandinDevice

import aiodist
from aiodist import ReduceOp
from aiodist.devices import sections

Devices = Callable[[int], list[StandinDevice]]


def test_sections() -> None:
    def cuts(lengths: list[int], sizes: list[int], most: int) -> list[list[tuple[int, int, int]]]:
        return list(sections.cuts(lengths, sizes, most))

    assert cuts([10], [1], 4) == [[(0, 0, 4)], [(0, 4, 8)], [(0, 8, 10)]]
    assert cuts([1, 1, 1], [2, 2, 2], 4) == [[(0, 0, 1), (1, 0, 1)], [(2, 0, 1)]]
    assert cuts([0, 3], [8, 8], 16) == [[(1, 0, 2)], [(1, 2, 3)]]
    assert cuts([2], [16], 8) == [[(0, 0, 1)], [(0, 1, 2)]]  # at least an element
    assert cuts([0], [8], 8) == [[]]
    assert cuts([3], [4], 6) == [[(0, 0, 1)], [(0, 1, 2)], [(0, 2, 3)]]
    assert cuts([1, 2, 3], [1, 4, 1], 7) == [[(0, 0, 1), (1, 0, 1)], [(1, 1, 2), (2, 0, 3)]]


@pytest.fixture
def ranks(
    devices: Devices, monkeypatch: pytest.MonkeyPatch, blind: Callable[[StandinDevice], None]
) -> list[StandinDevice]:
    monkeypatch.setattr(sections, "SECTION", 1000)
    made = devices(3)
    for device in made:
        blind(device)
    return made


@pytest.mark.parametrize("tag", [None, "tagged"])
async def test_in_sections(ranks: list[StandinDevice], tag: str | None) -> None:
    xs = [np.random.default_rng(r).random((70, 50)) for r in range(3)]
    due = xs[0] + xs[1] + xs[2]
    async with aiodist.local(3) as groups:

        async def each(call: Callable[[Any, int], Any]) -> list[Any]:
            return list(await asyncio.gather(*(call(g, g.rank) for g in groups)))

        on = [device.put(x) for device, x in zip(ranks, xs, strict=True)]
        turned = [device.put(x.T.copy()) for device, x in zip(ranks, xs, strict=True)]
        small = [device.put(np.full(3, r)) for r, device in enumerate(ranks)]
        outs = [device.new("float64", (70, 50)) for device in ranks]
        await each(lambda g, r: g.all_reduce(on[r], out=outs[r], tag=tag))
        for device, out, x, given in zip(ranks, outs, on, xs, strict=True):
            np.testing.assert_array_equal(device.get(out), due)
            np.testing.assert_array_equal(device.get(x), given)
        await each(lambda g, r: g.all_reduce([turned[r].T, small[r], on[r]], tag=tag))
        for device, back, few, x in zip(ranks, turned, small, on, strict=True):
            np.testing.assert_array_equal(device.get(back), due.T)
            np.testing.assert_array_equal(device.get(few), np.full(3, 3))
            np.testing.assert_array_equal(device.get(x), due)
        on = [device.put(x) for device, x in zip(ranks, xs, strict=True)]
        got = await each(lambda g, r: g.reduce(on[r], 1, ReduceOp.MAX, tag=tag))
        assert got[0] is got[2] is None
        np.testing.assert_array_equal(ranks[0].get(on[0]), xs[0])
        np.testing.assert_array_equal(ranks[1].get(on[1]), np.maximum.reduce(xs))
        on = [device.put(x) for device, x in zip(ranks, xs, strict=True)]
        await each(lambda g, r: g.exscan(on[r], tag=tag))
        for device, x, before in zip(ranks, on, [xs[0], xs[0], xs[0] + xs[1]], strict=True):
            np.testing.assert_array_equal(device.get(x), before)


async def test_all_inputs_are_read_before_out_is_written(ranks: list[StandinDevice]) -> None:
    x = np.arange(700.0)
    async with aiodist.local(3) as groups:
        pairs = [[device.put(x), device.put(-x)] for device in ranks]
        rows = [device.put(np.arange(701.0)) for device in ranks]
        given = [[*pair, row[1:]] for pair, row in zip(pairs, rows, strict=True)]
        outs = [[*pair[::-1], row[:-1]] for pair, row in zip(pairs, rows, strict=True)]
        works = [g.all_reduce(given[r], out=outs[r]) for r, g in enumerate(groups)]
        await asyncio.gather(*works)
        for device, out in zip(ranks, outs, strict=True):
            for array, due in zip(out, [3 * x, -3 * x, 3 * x + 3], strict=True):
                np.testing.assert_array_equal(device.get(array), due)


async def test_cancelled_between_sections(ranks: list[StandinDevice]) -> None:
    async with aiodist.local(3) as groups:
        on = [device.put(np.ones(5000)) for device in ranks]
        works = [g.all_reduce(x) for g, x in zip(groups, on, strict=True)]
        for _ in range(30):
            await asyncio.sleep(0)
        works[2].cancel()
        ranks[2].fill(on[2], 7.0)
        for work in works[:2]:
            with pytest.raises(aiodist.CollectiveAbortedError):
                await work
        np.testing.assert_array_equal(ranks[2].get(on[2]), np.full(5000, 7.0))
        while any(g._context.device_memory._limbo for g in groups):
            await asyncio.gather(*(g.barrier(tag="turn") for g in groups))
        np.testing.assert_array_equal(ranks[2].get(on[2]), np.full(5000, 7.0))
