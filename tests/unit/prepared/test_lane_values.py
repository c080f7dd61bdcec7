"""Prepared broadcast, all_gather and the like give what the ordinary way gives."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from sharing import everyone, sharing

import aiodist
from aiodist import CollectiveAbortedError, MismatchError
from aiodist.engine.executor import ALL
from aiodist.prepared import express, lane_values
from aiodist.prepared.express import PLAIN_BEFORE

torch = pytest.importorskip("torch")


pytestmark = pytest.mark.usefixtures("no_turn_is_due")


@pytest.fixture
def inline(monkeypatch):
    """How each prepared call ended: `ALL`, or the number of done steps."""
    seen = []
    real = lane_values.ValueRecipe._bound

    def bound(self, *args):
        run = real(self, *args)
        return lambda given: seen.append(run(given)) or seen[-1]

    monkeypatch.setattr(lane_values.ValueRecipe, "_bound", bound)
    return seen


KINDS = {
    "float64": lambda x: x,
    "float16": lambda x: x.astype(np.float16),
    "big endian": lambda x: x.astype(">f4"),
    "bool": lambda x: x > 0,
    "text": lambda x: x.astype(str),
    "times": lambda x: x.astype("M8[s]"),
    "no dimensions": lambda x: x[:1].reshape(()),
    "two dimensions": lambda x: x.reshape(2, -1),
    "empty": lambda x: x[:0],
    "read only": lambda x: np.frombuffer(x.tobytes()),
    "strided": lambda x: np.stack([x, x], axis=1)[:, 0],
    "torch float32": lambda x: torch.tensor(x, dtype=torch.float32),
    "torch bfloat16": lambda x: torch.tensor(x, dtype=torch.bfloat16),
    "torch bool": lambda x: torch.tensor(x > 0),
    "torch leaf": lambda x: torch.tensor(x, requires_grad=True),
    "torch transposed": lambda x: torch.tensor(np.stack([x, x])).T,
    "number": lambda x: float(x[0]),
    "tree": lambda x: {"a": [x, 3], "b": None},
}
CALLS = {
    "broadcast": lambda g, x, tag: g.broadcast(x if g.rank == 1 else None, 1, tag=tag),
    "all_gather": lambda g, x, tag: g.all_gather(x, tag=tag),
    "gather": lambda g, x, tag: g.gather(x, 1, tag=tag),
    "scatter": lambda g, x, tag: g.scatter([x] * g.size if g.rank == 1 else None, 1, tag=tag),
    "all_to_all": lambda g, x, tag: g.all_to_all([x] * g.size, tag=tag),
}


def shown(value):
    """Return what tells one value from another."""
    if isinstance(value, (list, tuple)):
        return type(value), [shown(each) for each in value]
    if isinstance(value, dict):
        return {key: shown(each) for key, each in value.items()}
    if isinstance(value, torch.Tensor):
        bits = value.detach().contiguous().view(torch.uint8) if value.ndim else value.detach()
        return "tensor", str(value.dtype), value.shape, bits.numpy().tobytes()
    if isinstance(value, np.ndarray):
        flags = value.flags.writeable, value.flags.aligned, value.flags.c_contiguous
        return "array", value.dtype, value.shape, value.tobytes(), flags
    return value


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("op", CALLS)
@pytest.mark.sample(6)
def test_the_same_as_the_ordinary_way(run, inline, op, size):
    start = CALLS[op]

    async def main():
        async with sharing(size) as ranks:
            for name, make in KINDS.items():
                for number in range(5):
                    numbers = np.random.default_rng(number).uniform(-3, 3, (size, 6))
                    values = [make(row) for row in numbers]
                    due = await everyone(ranks, lambda g, v=values: start(g, v[g.rank], "tag"))
                    found = await everyone(ranks, lambda g, v=values: start(g, v[g.rank], None))
                    assert [*map(shown, found)] == [*map(shown, due)], name

    run(main())
    assert inline.count(ALL) > 20


@pytest.mark.parametrize("size", [2, 3])
def test_a_broadcast_into_arrays(run, inline, size):
    async def main():
        async with sharing(size) as ranks:
            for number in range(12):
                make = (np.asarray, torch.tensor)[number % 2]
                arrays = [make(np.full((2, 3), g.rank + 10.0 * number)) for g in ranks]
                versions = [getattr(x, "_version", 0) for x in arrays]
                results = await everyone(ranks, lambda g, a=arrays: g.broadcast(a[g.rank], 1))
                assert all(a is b for a, b in zip(results, arrays, strict=True))
                assert all((np.asarray(x) == 1 + 10.0 * number).all() for x in arrays)
                for x, before in zip(arrays, versions, strict=True):
                    if isinstance(x, torch.Tensor) and x is not arrays[1]:
                        assert x._version > before

    run(main())
    assert ALL in inline


def test_what_is_received_is_ones_own(run, inline):
    """A result shares memory with nothing: no segment, no argument, and no earlier result."""

    async def main():
        async with sharing(2) as ranks:
            kept = []
            for number in range(8):
                x = np.full(3, float(number))
                found = await everyone(ranks, lambda g, x=x: g.all_gather(x))
                kept += [(number, values) for values in found]
                x[:] = -1
            for number, values in kept:
                for value in values:
                    assert (value == number).all()
                    value[:] = -2

    run(main())
    assert ALL in inline


def test_a_receiver_need_not_know_the_shape(run, inline):
    """All known shapes arrive within the call, in any order."""

    async def main():
        async with sharing(2) as ranks:
            shapes = [(3,), (3, 1), (7,)]
            for number in range(24):
                x = np.full(shapes[number % 3], float(number))
                _, result = await everyone(
                    ranks, lambda g, x=x: g.broadcast(None if g.rank else x, 0)
                )
                assert result.shape == x.shape
                assert (result == number).all()

    run(main())
    assert inline.count(ALL) >= 12


@pytest.mark.parametrize("size", [2, 3])
def test_what_does_not_fit_is_found_as_ever(run, inline, size):
    """If the root has an unexpected array, no rank's array is written."""

    async def main():
        async with sharing(size) as ranks:
            targets = [np.zeros(3) for _ in ranks]
            for _ in range(4):
                await everyone(ranks, lambda g: g.broadcast(targets[g.rank], 0))
            done = inline.count(ALL)
            for wrong in (np.ones(4), np.ones(3, np.float32), np.ones((3, 1)), {"a": np.ones(3)}):
                works = [g.broadcast(targets[g.rank] if g.rank else wrong, 0) for g in ranks]
                for result in await asyncio.gather(*works, return_exceptions=True):
                    assert isinstance(result, MismatchError)
                assert not any(target.any() for target in targets[1:])
            # One rank wants an array that the others do not.
            works = [
                g.broadcast(np.zeros(5) if g.rank == size - 1 else targets[g.rank], 0)
                for g in ranks
            ]
            for result in await asyncio.gather(*works, return_exceptions=True):
                assert isinstance(result, MismatchError)
            assert inline.count(ALL) == done
            targets[0][:] = 5
            await everyone(ranks, lambda g: g.broadcast(targets[g.rank], 0))
            assert all((target == 5).all() for target in targets)

    run(main())
    assert ALL in inline


@pytest.mark.parametrize("size", [2, 4])
def test_other_calls_cancels_and_refusals(run, inline, size):
    async def main():
        async with sharing(size) as ranks:
            x = np.ones(2)
            for _ in range(4):
                await everyone(ranks, lambda g: g.all_gather(x))
            # Another rank calls something else.
            works = [g.all_gather(x) if g.rank else g.gather(x, 0) for g in ranks]
            for result in await asyncio.gather(*works, return_exceptions=True):
                assert isinstance(result, MismatchError)
                assert 0 in result.calls
            # One rank gives up.
            works = [g.all_gather(x) for g in ranks[1:]]
            works[0].cancel()
            works.insert(0, ranks[0].all_gather(x))
            for rank, result in enumerate(await asyncio.gather(*works, return_exceptions=True)):
                kind = asyncio.CancelledError if rank == 1 else CollectiveAbortedError
                assert isinstance(result, kind)
            # The call of one rank is refused.
            works = [g.all_gather(x) for g in ranks[1:]]
            with pytest.raises(TypeError):
                ranks[0].all_gather(object())
            for result in await asyncio.gather(*works, return_exceptions=True):
                assert isinstance(result, CollectiveAbortedError)
                assert result.rank == 0
            with pytest.raises(TypeError):
                ranks[0].broadcast(x, True)
            works = [g.broadcast(x, 1) for g in ranks[1:]]
            for result in await asyncio.gather(*works, return_exceptions=True):
                assert isinstance(result, CollectiveAbortedError)
            for values in await everyone(ranks, lambda g: g.all_gather(x)):
                assert len(values) == size

    run(main())
    assert ALL in inline


def test_deadlines(run, inline):
    async def main():
        async with sharing(2) as ranks:
            for _ in range(4):
                await everyone(ranks, lambda g: g.barrier())
            late = ranks[0].barrier(timeout=0.05)
            with pytest.raises(aiodist.CollectiveTimeoutError) as caught:
                await late
            assert [*caught.value.missing] == [1]
            with pytest.raises(aiodist.CollectiveTimeoutError, match="rank 0 gave up"):
                await ranks[1].barrier()
            await everyone(ranks, lambda g: g.barrier(timeout=20))
            for wrong in (0, -1, "soon"):
                with pytest.raises((TypeError, ValueError)):
                    ranks[0].barrier(timeout=wrong)
                with pytest.raises(CollectiveAbortedError):
                    await ranks[1].barrier()

    run(main())
    assert ALL in inline


def test_of_who_sends_something_else_each_time_little_is_learnt(run, inline):
    async def main():
        async with sharing(2) as ranks:

            async def send(x):
                return (await everyone(ranks, lambda g: g.broadcast(None if g.rank else x, 0)))[1]

            for number in range(lane_values.KNOWN + 1):
                assert await send(str(number)) == str(number)
            known = ranks[1]._context.express._recipes["broadcast", None, 0]._known
            (before, _) = map(list, known)
            for number in range(lane_values.LATER):
                assert await send([str(number)]) == [str(number)]
                assert known[0] == before
                assert inline[-1] == ALL  # it is read as it is
            for _ in range(3):
                assert (await send(np.ones(3)) == 1).all()
            assert inline[-1] == ALL

    run(main())


def test_numbers_are_no_kinds(run):
    """Otherwise there would be a recipe for each number."""

    async def main():
        async with sharing(2) as ranks:
            express = ranks[0]._context.express
            before = len(express._recipes)
            for number in range(20):
                await everyone(ranks, lambda g, n=number: g.all_gather(n))
                await everyone(ranks, lambda g, n=number: g.all_to_all([n, n]))
                await everyone(ranks, lambda g, n=number: g.broadcast(n, 0))
            assert len(express._recipes) == before + 2 * 3  # for plain values, and for these

    run(main())


def test_few_kinds_that_came_once_are_kept_and_nothing_of_them(run, monkeypatch):
    """Each call may look different, and keys of dicts may be long."""
    monkeypatch.setattr(express, "SEEN", 4)

    async def main():
        async with sharing(2) as ranks:
            ways = ranks[0]._context.express
            recipes = len(ways._recipes)
            for number in range(10):
                tree = {f"{number}": np.full(2, number)}
                for found in await everyone(ranks, lambda g, x=tree: g.all_gather(x)):
                    assert all((each[f"{number}"] == number).all() for each in found)
            assert [*map(type, ways._seen)] == [int] * 4
            assert len(ways._recipes) == recipes + 1  # for all plain values
            await everyone(ranks, lambda g: g.all_gather(tree))
            assert len(ways._recipes) == recipes + 2
        assert not ways._seen

    run(main())


TREES = [{"a": np.ones(2), "b": 3}, {"a": np.ones(2), "b": 4.5}, [1, None, "text", (True, 2.0)]]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("op", CALLS)
def test_trees(run, inline, op, size):
    """Words in them may change at any time, for one call or for good."""

    async def main():
        async with sharing(size) as ranks:

            async def check(x):
                due = await everyone(ranks, lambda g: CALLS[op](g, x, "tag"))
                found = await everyone(ranks, lambda g: CALLS[op](g, x, None))
                assert [*map(shown, found)] == [*map(shown, due)]

            for tree in TREES:
                for _ in range(PLAIN_BEFORE + 4):
                    await check(tree)
                assert inline[-1] == ALL, tree
            for number in range(6):
                await check({"a": np.full(2, number), "b": -number})
                await check({"a": np.full(2, number), "b": float(-number)})
            for _ in range(40):
                await check({"a": np.ones(2), "b": -0.0})
            assert inline[-1] == ALL

    run(main())


def test_trees_that_wait_their_turn(run, inline):
    """Each has its value at the time of the call, whatever was called meanwhile."""

    async def main():
        async with sharing(2) as ranks:
            for number in (0, 1, 1):
                await everyone(ranks, lambda g, n=number: g.all_gather({"a": np.ones(1), "b": n}))
            trees = [{"a": np.full(1, k), "b": k // 3} for k in range(12)]
            works = [[g.all_gather(tree) for tree in trees] for g in ranks]
            trees[5]["b"] = "changed"
            for row in works:
                for k, work in enumerate(row):
                    for tree in await work:
                        assert tree["a"] == k
                        assert tree["b"] == k // 3

    run(main())


NUMBERS = {
    "float": [1.5, -0.0, float("inf"), 1e308],
    "int": [0, -7, 2**62, -(2**63)],
    "bool": [True, False],
    "complex": [1 + 2j, -0.5j],
}
OPS = {
    "float": ["SUM", "PRODUCT", "MIN", "AVG", "LXOR"],
    "int": ["SUM", "PRODUCT", "MAX", "AVG", "BOR"],
    "bool": ["BOR", "LXOR"],
    "complex": ["SUM", "PRODUCT", "AVG"],
}


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("kind", NUMBERS)
def test_numbers(run, inline, kind, size):
    """They give the result of the ordinary way, or its error on all ranks."""
    values = NUMBERS[kind]

    async def main():
        async with sharing(size) as ranks:

            async def call(op, number, tag):
                at = [values[(number + rank) % len(values)] for rank in range(size)]
                starts = [
                    lambda g: g.all_reduce(at[g.rank], op, tag=tag),
                    lambda g: g.reduce(at[g.rank], 1, op, tag=tag),
                ]
                return [
                    repr(each)
                    for start in starts
                    for each in await asyncio.gather(*map(start, ranks), return_exceptions=True)
                ]

            for op in map(aiodist.ReduceOp, OPS[kind]):
                for number in range(5):
                    due = await call(op, number, f"{op} {number}")
                    assert await call(op, number, None) == due

    run(main())
    assert inline.count(ALL) > 10


def test_numbers_that_are_too_large(run, inline):
    async def main():
        async with sharing(2) as ranks:
            for _ in range(4):
                assert await everyone(ranks, lambda g: g.all_reduce(2**61)) == [2**62] * 2
            works = [g.all_reduce(2**62) for g in ranks]
            for result in await asyncio.gather(*works, return_exceptions=True):
                assert isinstance(result, OverflowError)
            works = [ranks[0].all_reduce(1)]
            with pytest.raises(OverflowError):
                ranks[1].all_reduce(2**63)
            with pytest.raises(CollectiveAbortedError):
                await works[0]
            works = [g.all_reduce(1 if g.rank else 1.0) for g in ranks]
            for result in await asyncio.gather(*works, return_exceptions=True):
                assert isinstance(result, MismatchError)
            assert await everyone(ranks, lambda g: g.all_reduce(-1)) == [-2, -2]

    run(main())
    assert ALL in inline


OUTS = {
    "all_gather": lambda g, x, out: g.all_gather(x, out=out),
    "gather": lambda g, x, out: g.gather(x, 1, out=out if g.rank == 1 else None),
    "scatter": lambda g, x, out: g.scatter([x] * g.size if g.rank == 1 else None, 1, out=out[0]),
    "all_to_all": lambda g, x, out: g.all_to_all([x] * g.size, out=out),
}


@pytest.mark.parametrize("make", [np.asarray, torch.tensor], ids=["numpy", "torch"])
@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("op", OUTS)
def test_into_arrays(run, inline, op, listed, make):
    """They are written, and are the result. If one rank's array does not fit, none is written."""

    start = OUTS[op]

    async def main():
        async with sharing(3) as ranks:
            outs = [make(np.zeros((3, 2))) for _ in ranks]
            for number in range(1, 6):
                xs = [make(np.full(2, 10.0 * number + g.rank)) for g in ranks]
                given = [[*out] if listed else out for out in outs]
                found = await everyone(
                    ranks, lambda g, xs=xs, given=given: start(g, xs[g.rank], given[g.rank])
                )
                due = [10.0 * number + rank for rank in range(3)]
                for rank, (result, out) in enumerate(zip(found, outs, strict=True)):
                    if op == "scatter":
                        assert (np.asarray(out[0]) == due[1]).all()
                    elif op != "gather" or rank == 1:
                        assert result is given[rank]
                        assert [float(row[1]) for row in out] == due
            assert inline[-1] == ALL
            before = [np.array(out.tolist()) for out in outs]
            wrong = make(np.zeros(3))
            works = [start(g, make(np.ones(2)) if g.rank != 1 else wrong, given[g.rank])
                     for g in ranks]  # fmt: skip
            for result in await asyncio.gather(*works, return_exceptions=True):
                assert isinstance(result, MismatchError)
            for out, due in zip(outs, before, strict=True):
                assert np.array_equal(np.asarray(out), due)

    run(main())


def test_what_a_rank_has_for_itself_is_not_shown(run, inline):
    """In an all_to_all into given places, a rank's own array goes straight to its place.

    It goes first, because it may lie in the place of another one.
    """
    length = 500

    async def main():
        async with sharing(3) as ranks:
            for number in range(6):
                rows = [np.full((3, length), 100.0 * number + 10 * g.rank) for g in ranks]
                for mine in rows:
                    mine += np.arange(3.0)[:, None]
                places = [np.zeros((3, length)) for _ in ranks]
                for g in ranks:
                    # It lies in the place of the next rank's array.
                    places[g.rank][(g.rank + 1) % 3] = rows[g.rank][g.rank]
                xs = [[*row] for row in rows]
                for g in ranks:
                    xs[g.rank][g.rank] = places[g.rank][(g.rank + 1) % 3]
                await everyone(ranks, lambda g, xs=xs, outs=places: g.all_to_all(
                    xs[g.rank], out=[*outs[g.rank]]))  # fmt: skip
                for rank, place in enumerate(places):
                    due = [100.0 * number + 10 * src + rank for src in range(3)]
                    assert (place == np.array(due)[:, None]).all()
            assert inline[-1] == ALL
            for g in ranks:
                lane = g._context.lane
                areas = [bytes(lane.board.area(g.rank, area)) for area in (0, 1)]
                for dst, row in enumerate(rows[g.rank]):
                    assert any(row.tobytes() in area for area in areas) == (dst != g.rank)

    run(main())


def test_what_is_given_is_the_result_of_calls_that_wait_their_turn(run, inline):
    async def main():
        async with sharing(2) as ranks:
            trees = [{"a": np.full(2, float(k))} for k in range(6)]
            outs = [[[np.zeros(2) for _ in ranks] for _ in trees] for _ in ranks]
            for _ in range(3):
                await everyone(ranks, lambda g: g.broadcast(None if g.rank else trees[0]))
                await everyone(ranks, lambda g: g.all_gather(np.ones(2), out=outs[g.rank][0]))
            for _ in range(2):
                rows = [
                    [
                        (g.broadcast(None if g.rank else tree), g.all_gather(tree["a"], out=out))
                        for tree, out in zip(trees, outs[g.rank], strict=True)
                    ]
                    for g in ranks
                ]
                for rank, row in enumerate(rows):
                    for (one, two), tree, out in zip(row, trees, outs[rank], strict=True):
                        assert (await one is tree) == (rank == 0)
                        assert await two is out
                        assert all((place == tree["a"]).all() for place in out)

    run(main())
    assert ALL in inline


def test_who_waits_need_not_make_the_call_anew(run, inline, monkeypatch):
    """A waiting call takes known values from shared memory, as soon as they are there."""
    made = []
    real = lane_values.ValueRecipe.remade
    monkeypatch.setattr(
        lane_values.ValueRecipe, "remade", lambda *args: made.append(0) or real(*args)
    )

    async def main():
        async with sharing(2) as ranks:
            for _ in range(3):
                await everyone(ranks, lambda g: g.broadcast(None if g.rank else np.ones(2)))
            made.clear()
            inline.clear()
            for number in range(3):
                early = ranks[1].broadcast(None)
                await asyncio.sleep(0)
                await ranks[0].broadcast(np.full(2, float(number)))
                assert (await early == number).all()
            assert inline[0] == lane_values.BEGUN
            assert not made
            early = ranks[1].broadcast(None)
            await asyncio.sleep(0)
            await ranks[0].broadcast([np.ones(3), "something else"])
            assert (await early)[1] == "something else"
            assert made

    run(main())


def test_an_array_and_a_tree_that_begins_with_one_do_not_fit_alike(run):
    async def main():
        async with sharing(2) as ranks:
            x, outs = np.ones(2), [np.zeros((2, 2)) for _ in ranks]
            for _ in range(4):
                await everyone(ranks, lambda g: g.all_gather(x, out=outs[g.rank]))
            for _ in range(4):
                works = [
                    ranks[0].all_gather(x, out=outs[0]),
                    ranks[1].all_gather([x]),
                ]
                for result in await asyncio.gather(*works, return_exceptions=True):
                    assert isinstance(result, MismatchError)

    run(main())


@pytest.mark.parametrize("count", [1, 3])
def test_how_many_kinds_are_known_of_one_rank(run, monkeypatch, count):
    monkeypatch.setattr(lane_values, "KNOWN", count)

    async def main():
        async with sharing(2) as ranks:
            for length in range(1, 6):
                x = np.ones(length)
                await everyone(ranks, lambda g, x=x: g.broadcast(None if g.rank else x, 0))
            recipe = ranks[1]._context.express._recipes["broadcast", None, 0]
            assert len(recipe._known[0]) == count

    run(main())


@pytest.mark.parametrize("op", ["broadcast", "all_gather", "gather"])
@pytest.mark.parametrize(("size", "most"), [(2, 3136), (8, 784)])
def test_what_is_shown_at_once(run, inline, op, size, most):
    """One rank may show `most` KiB, less the description.

    If all ranks show something, all of them together may show as much as two ranks may.
    """
    most = 3136 if op == "broadcast" else most

    async def calls(ranks, kib):
        x = np.arange(kib * 128.0)
        for _ in range(3):
            found = await everyone(ranks, lambda g: CALLS[op](g, x, None))
            values = found[1] if isinstance(found[1], list) else [found[1]]
            assert all((value == x).all() for value in values)

    async def main():
        async with sharing(size) as ranks:
            await calls(ranks, most - 1)
            assert ALL in inline
            inline.clear()
            await calls(ranks, most)
            assert ALL not in inline

    run(main())
