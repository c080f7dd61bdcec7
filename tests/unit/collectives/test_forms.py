"""Calls like one before it are known by a look at type, dtype and shape; all others as ever."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
from sharing import everyone, sharing

from aiodist import CollectiveAbortedError, ReduceOp
from aiodist.prepared import express

pytestmark = pytest.mark.usefixtures("no_turn_is_due")

SUM = ReduceOp.SUM
CALLS = {
    "broadcast": lambda g, x, tag: g.broadcast(x if g.rank else None, 1, tag=tag),
    "broadcast in place": lambda g, x, tag: g.broadcast(x if g.rank else x.copy(), 1, tag=tag),
    "all_gather": lambda g, x, tag: g.all_gather(x, tag=tag),
    "gather": lambda g, x, tag: g.gather(x, 1, tag=tag),
    "scatter": lambda g, x, tag: g.scatter([x, x + 1] if g.rank else None, 1, tag=tag),
    "all_to_all": lambda g, x, tag: g.all_to_all([x, x * g.rank], tag=tag),
    "reduce": lambda g, x, tag: g.reduce(x.copy(), 1, tag=tag),
    "reduce_scatter": lambda g, x, tag: g.reduce_scatter(x, tag=tag),
    "into another": lambda g, x, tag: g.all_reduce(x, out=np.empty_like(x), tag=tag),
    "reduced into another": lambda g, x, tag: g.reduce(
        x, 1, out=np.empty_like(x) if g.rank else None, tag=tag
    ),
    "scattered into another": lambda g, x, tag: g.reduce_scatter(
        x, out=np.empty((len(x) // 2, *x.shape[1:]), x.dtype), tag=tag
    ),
    "tree": lambda g, x, tag: g.broadcast({"a": x, "b": (1.5,)} if g.rank else None, 1, tag=tag),
    "float": lambda g, x, tag: g.all_reduce(float(x.flat[0]), tag=tag),
    "int": lambda g, x, tag: g.reduce(int(x.flat[0]), 1, tag=tag),
}  # fmt: skip


class Mine(np.ndarray):
    """Of a type of its own."""


ARRAYS = {
    "another one": lambda x: x.copy(),
    "a strided one": lambda x: np.stack([x, x], axis=1)[:, 0],
    "a read-only one": lambda x: np.frombuffer(x.tobytes()),
    "another shape": lambda x: x.reshape(2, -1),
    "another length": lambda x: x[:2],
    "another dtype": lambda x: x.astype(np.float32),
    "another byte order": lambda x: x.astype(">f8"),
    "a subclass": lambda x: x.view(Mine),
}


@pytest.fixture
def described(monkeypatch):
    """The operations of the calls that were described."""
    seen = []
    real = express.kind_of

    def kind_of(op, *args):
        seen.append(op)
        return real(op, *args)

    monkeypatch.setattr(express, "kind_of", kind_of)
    return seen


def told(value):
    """A value, as far as one can tell it from another."""
    if isinstance(value, (list, tuple)):
        return type(value), [told(each) for each in value]
    if isinstance(value, dict):
        return [(type(key), key, told(each)) for key, each in value.items()]
    if isinstance(value, np.ndarray):
        return value.dtype, value.shape, value.tobytes()
    if isinstance(value, (float, complex)):  # the bits of a NaN, too
        return type(value), np.array(value).tobytes()
    return type(value), repr(value)


async def check(ranks, start, x):
    """`start` gives what it gives the ordinary way."""
    due = await everyone(ranks, lambda g: start(g, x, "tag"))
    found = await everyone(ranks, lambda g: start(g, x, None))
    assert [*map(told, found)] == [*map(told, due)]


@pytest.mark.parametrize("call", CALLS)
def test_what_was_seen_is_not_described_again(run, described, call):
    async def main():
        async with sharing(2) as ranks:
            for number in range(12):
                if number == 8:
                    described.clear()
                x = np.arange(4.0) + number
                await everyone(ranks, lambda g, x=x: CALLS[call](g, x, None))

    run(main())
    assert not described


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("kind", ARRAYS)
@pytest.mark.sample(45)
def test_arrays_that_come_after_others(run, call, kind):
    async def main():
        async with sharing(2) as ranks:
            for number in range(10):
                x = np.arange(4.0) + number
                if call in ("broadcast in place", "reduce") and kind != "another one":
                    x = x.copy()  # whatever it is, it is written to
                await check(ranks, CALLS[call], ARRAYS[kind](x) if number % 3 == 2 else x)

    run(main())


def test_places_that_come_after_others(run):
    """A place in the memory of the input, of another kind, or none at all."""

    def places(x):
        twice = np.concatenate([x, x])
        return [(twice[:4], twice[1:5]), (x, x), (x, None), (x, np.empty(4))]

    async def main():
        async with sharing(2) as ranks:
            for number in range(20):
                for start in ("all_reduce", "reduce"):

                    async def call(tag, start=start, number=number):
                        def one(g):
                            x, out = places(np.arange(4.0) + g.rank)[
                                number % 4 if number > 8 else 3
                            ]
                            if start == "reduce" and g.rank:  # it is for the root alone
                                out = None
                            return getattr(g, start)(x, out=out, tag=tag)

                        return [*map(told, await everyone(ranks, one))]

                    assert await call(None) == await call("tag")

    run(main())


NANS = np.arange(0x7FF8000000000001, 0x7FF8000000000005).view(np.float64).tolist()
"""NaNs of different bits, with equal texts."""

TREES = [
    {"a": np.ones(2), "b": 1}, {"a": np.ones(2), "b": True}, {"a": np.ones(2), "b": 1.0},
    {"a": np.ones(2), "b": 0.0}, {"a": np.ones(2), "b": -0.0}, {"b": 1, "a": np.ones(2)},
    {"a": np.ones(2)}, {"a": [np.ones(2)], "b": 1}, {"a": (np.ones(2),), "b": 1},
    {"".join(["a"]): np.ones(2), "b": 1}, {"a": np.ones(2), "b": None}, {"a": np.ones(2), "b": "1"},
    {"a": np.ones(2), "b": b"1"}, {"a": np.ones(2), "b": 1 + 0j}, {"a": np.ones(2), "c": 1},
    *[{"a": np.ones(2), "b": nan} for nan in NANS],
    *[{"a": np.ones(2), "b": complex(nan, 1.0)} for nan in NANS],
    *[{"a": np.ones(2), "b": complex(1.0, nan)} for nan in NANS],
    {"a": np.ones(2), "b": complex(0.0, -0.0)}, {"a": np.ones(2), "b": complex(-0.0, 0.0)},
]  # fmt: skip


def test_trees_that_come_after_others(run):
    """They differ in what is equal, or looks so."""

    async def main():
        async with sharing(2) as ranks:
            for tree in TREES:
                for x in (tree, tree, tree, TREES[0]):
                    await check(ranks, CALLS["broadcast"], x)

    run(main())


@pytest.mark.parametrize("start", ["broadcast", "all_gather", "gather", "scatter", "all_to_all"])
def test_each_nan_arrives_with_its_bits(run, start):
    """By itself and in a list, by every way: also the first calls of a kind, and with a tag."""

    def call(g, x, tag):
        if start == "scatter":
            x = None if g.rank else [x] * g.size
        return getattr(g, start)([x] * g.size if start == "all_to_all" else x, tag=tag)

    async def main():
        async with sharing(2) as ranks:
            for wrap in (lambda x: x, lambda x: [x], lambda x: {"a": complex(1.0, x)}):
                for nan in NANS * 2:
                    value = wrap(nan)
                    for tag in (None, "tag"):
                        found = await everyone(ranks, lambda g, x=value, t=tag: call(g, x, t))
                        due = value if start in ("broadcast", "scatter") else [value] * 2
                        for rank, one in enumerate(found):
                            if start != "gather" or rank == 0:
                                assert told(one) == told(due)

    run(main())


@pytest.mark.parametrize("wrong", [True, 1.0, np.int64(5), "1"])
def test_roots_are_told_apart_from_what_is_equal(run, wrong):
    async def main():
        async with sharing(2) as ranks:
            x = np.ones(2)
            for _ in range(4):
                await everyone(ranks, lambda g: g.broadcast(x, 1))
            work = ranks[1].broadcast(x, 1)
            with pytest.raises((TypeError, ValueError)):
                ranks[0].broadcast(x, wrong)
            with pytest.raises(CollectiveAbortedError):
                await work

    run(main())


def test_roots_by_numpy(run):
    """Of the same call as plain ones of the other rank, whichever way that goes by then."""

    async def main():
        async with sharing(2) as ranks:
            x, roots = np.ones(2), [np.int64(1), 1]
            for _ in range(4):
                await everyone(ranks, lambda g: g.broadcast(x, roots[g.rank]))
                found = await everyone(ranks, lambda g: g.gather(g.rank, roots[g.rank]))
                assert found == [None, [0, 1]]

    run(main())


def test_numbers_that_do_not_fit(run):
    async def main():
        async with sharing(2) as ranks:
            for _ in range(4):
                found = await everyone(ranks, lambda g: g.all_reduce(2**62 + g.rank - 2))
                assert found == [2**63 - 3] * 2
            work = ranks[1].all_reduce(1)
            with pytest.raises(OverflowError):
                ranks[0].all_reduce(2**63)
            with pytest.raises(CollectiveAbortedError):
                await work
            assert await everyone(ranks, lambda g: g.all_reduce(g.rank)) == [1, 1]

    run(main())


def test_nothing_of_the_user_is_kept(run):
    """An array goes when the program drops it, and another one at its address is another one."""

    async def main():
        async with sharing(2) as ranks:
            for name, start in CALLS.items():
                kept = []
                for number in range(6):
                    x = np.arange(4.0) + number
                    kept.append(weakref.ref(x))
                    await everyone(ranks, lambda g, s=start, x=x: s(g, x, None))
                del x
                gc.collect()
                # (The loop may have the last result, until it turns.)
                assert not any(each() is not None for each in kept[:-1]), name

    run(main())


def test_how_many_are_kept(run, described, monkeypatch):
    """What had to make room is known as shortly again, if it is called some more times."""
    monkeypatch.setattr(express, "AGAIN", 3)

    async def main():
        async with sharing(2) as ranks:

            async def gather(length, times):
                described.clear()
                for _ in range(times):
                    await everyone(ranks, lambda g: g.all_gather(np.ones(length)))

            for length in range(1, 4 * express.FORMS):
                await gather(length, 3)
            forms = ranks[0]._context.express._forms["all_gather"]
            assert len(forms) == express.FORMS
            await gather(1, 3)
            assert described
            await gather(1, 3)
            assert not described
            assert len(forms) == express.FORMS

    run(main())


def test_what_is_not_kept_has_no_form(run, described, monkeypatch):
    monkeypatch.setattr(express, "KEPT", 4 * express.A_RECIPE)

    async def main():
        async with sharing(2) as ranks:
            own = ranks[0]._context.express
            for number in range(40):
                x = np.ones(number % 10 + 1)
                for start in ("all_gather", "reduce_scatter"):
                    await everyone(ranks, lambda g, x=x, start=start: getattr(g, start)(x))
                known = [*own._recipes.values()]
                assert all(recipe in known for made in own._forms.values() for recipe, _ in made)
            described.clear()
            for _ in range(3):
                await everyone(ranks, lambda g: g.all_gather(x))
            assert len(described) <= 2 * len(ranks)

    run(main())
