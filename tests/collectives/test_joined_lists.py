"""Reductions of lists between hosts: prepared calls join the arrays, and results stay the same."""

from __future__ import annotations

import asyncio
import gc
import random
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest
from over_links import nothing_is_left
from seeds import seeds

import aiodist
from aiodist import CollectiveAbortedError, ReduceOp

pytestmark = pytest.mark.usefixtures("no_turn_is_due")

LIBRARY = f"{Path(aiodist.__file__).parent}/"

layouts = pytest.mark.parametrize("layout", ["ab", "abc", "aabb", "abbca"])


def start(name, group, op, xs, outs):
    x, out = xs[group.rank], None if outs is None else outs[group.rank]
    if name == "reduce":
        dst = group.size - 1
        return group.reduce(x, dst, op, out=out if group.rank == dst else None)
    return getattr(group, name)(x, op, out=out)


def memory(lists):
    return [[array.tobytes() for array in arrays] for arrays in lists or ()]


@layouts
@pytest.mark.parametrize("name", ["all_reduce", "reduce", "scan", "exscan"])
@pytest.mark.parametrize("seed", seeds(2, 10))
async def test_the_same_as_the_ordinary_way(on_hosts, layout, name, seed):
    """Some ranks go the ordinary way, some call late, and some calls find another one pending."""
    chance = random.Random(f"{layout} {name} {seed}")
    size = len(layout)

    def values(shapes, dtype):
        numbers = np.random.default_rng(chance.randrange(1 << 30))
        return [[numbers.uniform(-9, 9, s).astype(dtype) for s in shapes] for _ in range(size)]

    async with on_hosts(layout) as ranks:
        express = [group._context.express for group in ranks]
        for _ in range(3):
            op = chance.choice([ReduceOp.SUM, ReduceOp.MAX, ReduceOp.PRODUCT])
            dtype = chance.choice(["f4", "f8", "f2", "i8"])
            length = chance.choice([1, 7, 300, 3_000])
            shapes = [(chance.randint(1, length),) for _ in range(chance.randint(1, 40))]
            shapes[0] = (1, *shapes[0])
            has_out, is_one = chance.random() < 0.5, chance.random() < 0.2
            for turn in range(6):
                given, places = values(shapes, dtype), values(shapes, dtype) if has_out else None
                found = []
                for is_ordinary in (True, False):
                    xs = [[x.copy() for x in arrays] for arrays in given]
                    outs = places and [[x.copy() for x in arrays] for arrays in places]
                    shown, into = (
                        [arrays[0] for arrays in lists] if lists and is_one else lists
                        for lists in (xs, outs)
                    )
                    for group, its_own in zip(ranks, express, strict=True):
                        held_back = is_ordinary or (turn > 2 and chance.random() < 0.3)
                        group._context.express = None if held_back else its_own
                    works, more = [], []
                    for rank in chance.sample(range(size), size):
                        if chance.random() < 0.2:
                            await asyncio.sleep(0)
                        if turn % 2:
                            more.append(ranks[rank].all_reduce(np.ones(3)))
                        works.append((rank, start(name, ranks[rank], op, shown, into)))
                    for rank, work in works:
                        result = await work
                        if name == "reduce" and rank != size - 1:
                            assert result is None
                        else:
                            assert result is (shown if into is None else into)[rank]
                    await asyncio.gather(*more)
                    found.append((memory(xs), memory(outs)))
                assert found[0] == found[1]
        nothing_is_left(ranks)


@layouts
@pytest.mark.parametrize("length", [10, 2_000])
async def test_cancelled_at_every_turn(on_hosts, layout, length):
    """Nothing is written to the arrays of the rank that cancels, and the group goes on."""

    def lists():
        return [[np.full(length, rank + 1.0) for _ in range(20)] for rank in range(len(layout))]

    async def called():
        xs = lists()
        await asyncio.gather(*[g.all_reduce(x) for g, x in zip(ranks, xs, strict=True)])
        assert all((x == sum(range(len(layout) + 1))).all() for arrays in xs for x in arrays)

    async with on_hosts(layout) as ranks:
        for _ in range(3):
            await called()
        for victim in range(len(ranks)):
            for turns in range(5):
                xs = lists()
                works = [g.all_reduce(x) for g, x in zip(ranks, xs, strict=True)]
                for _ in range(turns):
                    await asyncio.sleep(0)
                if works[victim].cancel():
                    assert memory(xs)[victim] == memory(lists())[victim]
                await asyncio.wait(works)
                for rank, work in enumerate(works):
                    if rank != victim and work.exception() is not None:
                        assert isinstance(work.exception(), CollectiveAbortedError)
                await called()
        nothing_is_left(ranks)


@pytest.mark.parametrize("layout", ["ab", "aabb", "aa"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("length", [3, 3_000])
@pytest.mark.parametrize("tag", [None, "a tag"])
async def test_tensors(on_hosts, layout, dtype, length, tag):
    """They are written, marked as written, and let go."""
    torch = pytest.importorskip("torch")
    dtype = getattr(torch, dtype)
    async with on_hosts(layout) as ranks:
        size = len(ranks)
        for number in range(5):
            lists = [
                [torch.full((length, 1), 2.0 * rank + at + number, dtype=dtype) for at in range(9)]
                for rank in range(size)
            ]
            versions = [[x._version for x in tensors] for tensors in lists]
            works = [g.all_reduce(xs, tag=tag) for g, xs in zip(ranks, lists, strict=True)]
            results = await asyncio.gather(*works)
            for tensors, result, before in zip(lists, results, versions, strict=True):
                assert result is tensors
                for at, (x, version) in enumerate(zip(tensors, before, strict=True)):
                    assert (x == size * (size - 1 + at + number)).all()
                    assert x._version > version
            kept = [weakref.ref(x) for x in lists[0]]
            del lists, works, results, result, tensors, x
            for _ in range(3):  # the loop lets go of what it has called last
                await asyncio.sleep(0)
            gc.collect()
            assert not any(ref() is not None for ref in kept)
        nothing_is_left(ranks)


@pytest.mark.parametrize("layout", ["ab", "aabb", "aa"])
@pytest.mark.parametrize("name", ["all_reduce", "reduce", "exscan"])
@pytest.mark.parametrize("length", [10, 1_000])
@pytest.mark.parametrize("has_out", [False, True])
@pytest.mark.strength(2)
async def test_an_array_more_costs_five_functions_at_most(on_hosts, layout, name, length, has_out):
    async with on_hosts(layout) as ranks:

        async def cost(count):
            xs, outs = ([[np.ones(length) for _ in range(count)] for _ in ranks] for _ in range(2))
            calls = 0

            def note(frame, event, _):
                nonlocal calls
                calls += event == "call" and frame.f_code.co_filename.startswith(LIBRARY)

            for _ in range(4):
                calls, before = 0, sys.getprofile()
                sys.setprofile(note)
                try:
                    works = [
                        start(name, g, ReduceOp.SUM, xs, outs if has_out else None) for g in ranks
                    ]
                    await asyncio.gather(*works)
                finally:
                    sys.setprofile(before)
            return calls / len(ranks)

        few, many = await cost(20), await cost(200)
        assert many - few <= 5 * 180


SLOTS = {
    "another dtype": lambda rank: np.full(2, rank + 0.5, np.float32),
    "another byte order": lambda rank: np.arange(3.0).astype(">f8") + rank,
    "in Fortran's order": lambda rank: np.asfortranarray(np.arange(6.0).reshape(2, 3) + rank),
    "with steps": lambda rank: (np.arange(12.0) + rank)[::3],
    "backwards": lambda rank: (np.arange(5.0) + rank)[::-1],
    "empty": lambda rank: np.empty(0),
    "with more axes": lambda rank: np.arange(8.0).reshape(2, 2, 2) + rank,
}


@pytest.mark.parametrize("layout", ["aa", "ab", "aab"])
@pytest.mark.parametrize("tag", [None, "a"])
@pytest.mark.parametrize("slot", SLOTS)
async def test_slots_of_any_kind_are_reduced(on_hosts, layout, slot, tag):
    """One slot is as it is named here, and the others are plain. All calls are of one kind."""
    size = len(layout)
    async with on_hosts(layout) as ranks:
        for odd in (0, size - 1):
            for _ in range(4):
                lists = [
                    [SLOTS[slot](r) if s == odd else np.arange(3.0) * (r + s) for s in range(size)]
                    for r in range(size)
                ]
                works = [g.reduce_scatter(lists[g.rank], tag=tag) for g in ranks]
                for rank, found in enumerate(await asyncio.gather(*works)):
                    expected = sum(np.asarray(one[rank]) for one in lists)
                    np.testing.assert_array_equal(found, expected)
                    assert np.shape(found) == expected.shape
