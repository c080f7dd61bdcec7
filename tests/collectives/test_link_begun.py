"""Collectives of small values over sockets that are done within the call, beside ordinary ones."""

from __future__ import annotations

import asyncio

import numpy as np
import over_links
import pytest
import torch
from over_links import OVER_SOCKETS, ordinary

import aiodist
from aiodist.operations import collectives
from aiodist.prepared import express, kinds, link_express, link_frames
from aiodist.prepared.link_express import LinkExpress

pytestmark = OVER_SOCKETS

TREE = {"a": np.arange(3.0), "b": [1, "two", None]}
WIDE = ["a word"] * (kinds.WIDE + 1)
"""Wider than the values that are prepared by what they are."""


OPERATIONS = {
    "broadcast": lambda g, x: g.broadcast(x if g.rank == 0 else None, 0),
    "broadcast in place": lambda g, x: g.broadcast(x if g.rank == 0 else np.zeros_like(x), 0),
    "broadcast of a tree": lambda g, x: g.broadcast(TREE if g.rank == 0 else None, 0),
    "all_gather": lambda g, x: g.all_gather(x + g.rank),
    "all_gather with out": lambda g, x: g.all_gather(x, out=np.zeros((g.size, *x.shape))),
    "gather": lambda g, x: g.gather(x * g.rank, 1),
    "scatter": lambda g, x: g.scatter([x + r for r in range(g.size)] if g.rank == 1 else None, 1),
    "all_to_all": lambda g, x: g.all_to_all([x * g.rank + r for r in range(g.size)]),
    "barrier": lambda g, x: g.barrier(),
}


def same(found, expected):
    assert type(found) is type(expected)
    if isinstance(found, (list, tuple)):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            same(one, other)
    elif isinstance(found, dict):
        same([*found.items()], [*expected.items()])
    elif isinstance(found, np.ndarray):
        assert found.tobytes() == expected.tobytes()
    else:
        assert found == expected


def nothing_is_left(ranks):
    over_links.nothing_is_left(ranks)
    for group in ranks:
        assert all(known.frames.memory is None for known in group._context.express._known.values())


async def learn(ranks, operation, x):
    """The first call joins the ranks, the second one tells them what the others show, or that it is
    no array; then the third one, how long their words are."""
    for _ in range(3):
        expected = await called(ranks, operation, x)
    return expected


async def called(ranks, operation, x, order=None):
    works = {rank: operation(ranks[rank], x) for rank in order or range(len(ranks))}
    return [await works[rank] for rank in range(len(ranks))]


@pytest.mark.parametrize("name", OPERATIONS)
async def test_the_last_rank_is_done_within_its_call(groups, name):
    operation = OPERATIONS[name]
    async with groups(2) as ranks:
        x = np.arange(5.0)
        expected = await learn(ranks, operation, x)
        for last in (1, 0):
            first = operation(ranks[1 - last], x)
            assert not first.done()
            second = operation(ranks[last], x)
            assert second.done()
            same(second.result(), expected[last])
            same(await first, expected[1 - last])
            assert (first.op, first.seq, first.nbytes) == (second.op, second.seq, first.nbytes)
        nothing_is_left(ranks)


@pytest.mark.parametrize("size", [2, 3, 5, 8])
async def test_it_gives_what_the_ordinary_way_gives(groups, size):
    """Another rank is late each time, and some go the ordinary way."""
    async with groups(size) as ranks:
        x = np.arange(4.0)
        for operation in OPERATIONS.values():
            expected = await learn(ranks, operation, x)
            for first in range(0, size, 2):
                order = [*range(first, size), *range(first)]
                with ordinary(ranks[first // 2]):
                    found = await called(ranks, operation, x, order)
                same(found, expected)
        nothing_is_left(ranks)


async def test_another_length_than_last_time_comes(groups):
    """At the rank that has nothing to share itself, it is found out by the frame alone."""
    async with groups(2) as ranks:
        for length in (3, 3, 1, 700, 700, 3, 100_000, 3):
            x = np.arange(float(length))
            for order in ((0, 1), (1, 0)):
                same(await called(ranks, OPERATIONS["broadcast"], x, order), [x, x])
        nothing_is_left(ranks)


async def test_what_does_not_fit_is_told_to_all(groups):
    def operation(group, x):
        return group.broadcast(x if group.rank == 0 else np.zeros(7), 0)

    async with groups(3) as ranks:
        await learn(ranks, OPERATIONS["broadcast in place"], np.ones(3))
        for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0)):
            works = [operation(ranks[rank], np.ones(3)) for rank in order]
            await asyncio.wait(works)
            for work in works:
                with pytest.raises(aiodist.MismatchError, match="does not fit"):
                    await work
        await called(ranks, OPERATIONS["broadcast in place"], np.ones(3))
        nothing_is_left(ranks)


async def test_different_calls_are_told(groups):
    async with groups(2) as ranks:
        for src in (0, 1):
            await learn(ranks, lambda g, x, src=src: g.broadcast(x, src), np.ones(2))
        for first in (0, 1):
            works = [ranks[rank].broadcast(np.ones(2), rank) for rank in (first, 1 - first)]
            await asyncio.wait(works)
            for work in works:
                with pytest.raises(aiodist.MismatchError, match=r"(?s)src=0.*src=1"):
                    await work
        await called(ranks, OPERATIONS["barrier"], None)
        nothing_is_left(ranks)


async def test_a_word_right_behind_the_contribution_counts(groups):
    """Both have come when the late rank calls: it fails, though it could have completed, and
    nothing is written."""
    async with groups(2) as ranks:
        operation = OPERATIONS["broadcast in place"]
        await learn(ranks, operation, np.ones(3))
        ranks[0].broadcast(np.ones(3), 0).cancel()
        into = np.zeros(3)
        with pytest.raises(aiodist.CollectiveAbortedError):
            await ranks[1].broadcast(into, 0)
        assert not into.any()
        await called(ranks, operation, np.ones(3))
        nothing_is_left(ranks)


async def test_one_that_waits_is_cancelled_or_late(groups):
    async with groups(3) as ranks:
        operation = OPERATIONS["all_gather"]
        await learn(ranks, operation, np.ones(3))
        works = [operation(ranks[rank], np.ones(3)) for rank in (0, 1)]
        works[0].cancel()
        with pytest.raises(aiodist.CollectiveAbortedError):
            await works[1]
        with pytest.raises(aiodist.CollectiveAbortedError):
            await operation(ranks[2], np.ones(3))
        with pytest.raises(aiodist.CollectiveTimeoutError) as caught:
            await ranks[0].all_gather(np.ones(3), timeout=0.05)
        assert set(caught.value.missing) == {1, 2}
        for group in ranks[1:]:
            with pytest.raises(aiodist.CollectiveTimeoutError):
                await operation(group, np.ones(3))
        await called(ranks, operation, np.ones(3))
        nothing_is_left(ranks)


async def test_a_peer_leaves_while_it_waits(groups):
    async with groups(2) as ranks:
        await learn(ranks, OPERATIONS["gather"], np.ones(3))
        work = OPERATIONS["gather"](ranks[0], np.ones(3))
        ranks[1].abort("enough")
        with pytest.raises(aiodist.AiodistError, match=r"enough|lost"):
            await work


async def test_kinds_that_were_not_called_for_long_are_forgotten(groups, monkeypatch):
    monkeypatch.setattr(link_express, "KEPT_KINDS", 2)
    async with groups(3) as ranks:
        for dst in (2, 1, 0, 1):
            await called(ranks, lambda g, x, dst=dst: g.gather(x, dst), WIDE)
        for group in ranks:
            express = group._context.express
            assert isinstance(express, LinkExpress)
            kinds = [*express._known]
            assert kinds == [b"gather(dst=0)", b"gather(dst=1)"]


async def test_ever_new_lengths_take_no_more_memory(groups, monkeypatch):
    for module in (link_express, link_frames):
        monkeypatch.setattr(module, "KEPT_LENGTHS", 3)
    async with groups(3) as ranks:
        for length in range(1, 20):
            await called(ranks, lambda g, x: g.all_gather([x * g.rank, *WIDE]), np.ones(length))
        for group in ranks:
            (known,) = group._context.express._known.values()
            assert len(known.frames._stencils) <= 3
            assert len(known.lengths) <= 3


async def test_what_recipes_keep_is_counted(groups, monkeypatch):
    length = 50_000
    async with groups(3) as ranks:
        values = {"a": np.ones(3), "short": "x"}, {"a": np.ones(3), "long": "x" * length}
        for value in values:
            await learn(ranks, lambda g, x: g.all_gather(x), value)
        for group in ranks:
            kept = group._context.express
            none, few, many = (express._weight(*one) for one in kept._recipes.items())
            assert kept._weight == none + few + many
            assert many > few + 3 * length  # it is known what each rank shows
            # Nothing else keeps what was shown.
            blobs = [recipe.phase.memory.blobs for recipe in [*kept._recipes.values()][1:]]
            assert blobs == [[b""] * 3] * 2
        monkeypatch.setattr(express, "KEPT", many)
        await learn(ranks, lambda g, x: g.all_gather(x), np.ones(3))
        for group in ranks:
            kept = group._context.express
            assert kept._weight == sum(express._weight(*one) for one in kept._recipes.items())
            assert kept._weight <= many


async def test_a_program_is_started_once(groups, monkeypatch):
    """Also where the ranks are not joined yet, and the ordinary way has it: what a program has
    taken hold of is let go when it ends."""
    made = collectives.values.all_gather
    begun = []

    def counted(place, x, out):
        call = made(place, x, out)

        def start(on_lane):
            begun.append(place.rank)
            return call.start(on_lane)

        return call._replace(start=start)

    monkeypatch.setattr(collectives.values, "all_gather", counted)
    async with groups(3) as ranks:
        for number in range(1, 5):
            await called(ranks, lambda g, x: g.all_gather(x), WIDE)
            assert sorted(begun) == sorted([0, 1, 2] * number)


def refused(*_):
    raise AssertionError("it is known, and made nevertheless")


@pytest.mark.parametrize("size", [2, 3, 8])
async def test_what_is_known_is_not_made_again(groups, monkeypatch, size):
    """Neither within the call nor where it has to wait."""
    async with groups(size) as ranks:
        x = np.arange(4.0)
        for name in ("broadcast in place", "gather", "barrier"):
            expected = await learn(ranks, OPERATIONS[name], x)
            for group in ranks:
                for recipe in group._context.express._recipes.values():
                    monkeypatch.setattr(recipe, "_make", refused)
            for last in range(size):
                order = [*range(last + 1, size), *range(last + 1)]
                same(await called(ranks, OPERATIONS[name], x, order), expected)


async def test_frames_of_the_same_length_say_something_else(groups):
    """Dtype and shape are other ones, all lengths are the same."""
    async with groups(3) as ranks:
        one, other = np.arange(4, dtype=np.uint16), np.arange(2, dtype=np.uint32)
        for x in (one, one, one, other, one, other, other):
            for order in ((0, 1, 2), (2, 1, 0)):
                same(await called(ranks, OPERATIONS["broadcast"], x, order), [x, x, x])
        nothing_is_left(ranks)


async def test_out_takes_what_fits_on_all_ranks(groups):
    """One of another dtype, or of another shape, is nobody's result, though the calls are known."""
    async with groups(3) as ranks:
        x = np.arange(4.0)

        def gathered(group, out):
            return group.all_gather(x + group.rank, out=out)

        expected = [x, x + 1, x + 2]
        for _ in range(4):
            for shape in ((3, 4), (12,)):
                outs = [np.zeros(shape) for _ in ranks]
                works = [gathered(ranks[rank], outs[rank]) for rank in (1, 0, 2)]
                results = [await work for work in works]
                assert all(
                    result is outs[rank] for result, rank in zip(results, (1, 0, 2), strict=True)
                )
                for out in outs:
                    same([*out.reshape(3, 4)], expected)
        for wrong in (np.zeros((3, 5)), np.zeros((3, 4), np.int64)):
            outs = [np.zeros((3, 4)), wrong, np.zeros((3, 4))]
            works = [gathered(ranks[rank], outs[rank]) for rank in range(3)]
            await asyncio.wait(works)
            for work, out in zip(works, outs, strict=True):
                with pytest.raises(aiodist.MismatchError):
                    await work
                assert not out.any()
        same(await called(ranks, OPERATIONS["all_gather"], x), [expected] * 3)
        nothing_is_left(ranks)


@pytest.mark.parametrize("name", ["broadcast", "broadcast in place", "all_gather with out"])
async def test_what_all_ranks_get_travels_with_the_first_words(groups, name):
    """Up to 64 KiB: nobody is asked for memory, and the last one is done within its call."""
    async with groups(2) as ranks:
        x = np.arange(8192.0)
        expected = await learn(ranks, OPERATIONS[name], x)
        first, second = (OPERATIONS[name](group, x) for group in ranks)
        assert second.done()
        same([await first, await second], expected)
        nothing_is_left(ranks)


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("kind", [np.array, torch.tensor])
async def test_large_values_are_known_as_well(groups, monkeypatch, size, kind):
    """Their data travels apart, to where it is wanted; nothing else is made anew."""
    async with groups(size) as ranks:
        plain = [np.arange(10_000.0) * (rank + 1) for rank in range(size)]
        src = size - 1

        async def both(number, order):
            xs = [kind(x + number) for x in plain]
            outs = [kind(np.zeros((size, 10_000))) for _ in ranks]
            works = [ranks[rank].all_gather(xs[rank], out=outs[rank]) for rank in order]
            for work, rank in zip(works, order, strict=True):
                assert await work is outs[rank]
                same([*np.asarray(outs[rank])], [x + number for x in plain])
            works = [ranks[rank].broadcast(xs[rank], src) for rank in order]
            for work, rank in zip(works, order, strict=True):
                assert await work is xs[rank]
                same(np.asarray(xs[rank]), plain[src] + number)

        for number in range(2):
            await both(number, range(size))
        for group in ranks:
            for recipe in group._context.express._recipes.values():
                monkeypatch.setattr(recipe, "_make", refused)
        for last in range(size):
            await both(last, [*range(last + 1, size), *range(last + 1)])
        nothing_is_left(ranks)


async def test_large_values_that_are_not_what_they_were(groups):
    """Another shape at the root, an array that does not fit, a place that nobody has named, a small
    value of the same call: each goes the ordinary way, and then they are known again."""
    async with groups(3) as ranks:
        x = np.arange(20_000.0)

        def start(shown, places):
            return [
                ranks[0].broadcast(shown, 0),
                *[ranks[rank].broadcast(places[rank - 1], 0) for rank in (1, 2)],
            ]

        for shown in (x, x, x[:15_000], x, x[:9], x[:9], x, x):
            here = np.zeros_like(shown)
            works = start(shown, [here, None])
            same([await work for work in works], [shown] * 3)
            same(here, shown)
            outs = [np.zeros_like(shown) for _ in range(2)]
            await asyncio.gather(*start(shown, outs))
            same(outs, [shown] * 2)
        for wrong in (x[1:], x.astype(np.int64)):
            outs = [np.zeros_like(x), np.zeros_like(wrong)]
            works = start(x, outs)
            await asyncio.wait(works)
            for work in works:
                with pytest.raises(aiodist.MismatchError):
                    await work
            assert not any(out.any() for out in outs)
        outs = [np.zeros_like(x), np.zeros_like(x)]
        await asyncio.gather(*start(x, outs))
        same(outs, [x, x])
        nothing_is_left(ranks)


async def test_a_large_value_is_given_up(groups):
    """By a cancel, before the others have come and while they wait."""
    async with groups(3) as ranks:
        x = np.arange(20_000.0)
        await learn(ranks, OPERATIONS["broadcast in place"], x)
        for late in range(3):
            order = [rank for rank in range(3) if rank != late]
            works = [ranks[rank].broadcast(x.copy(), 0) for rank in order]
            works[0].cancel()
            works.append(ranks[late].broadcast(x.copy(), 0))
            await asyncio.wait(works)
            assert works[0].cancelled()
            for work in works[1:]:
                with pytest.raises(aiodist.CollectiveAbortedError):
                    await work
        expected = await called(ranks, OPERATIONS["broadcast in place"], x)
        same(expected, [x] * 3)
        nothing_is_left(ranks)
