"""Calls that the compiled part knows by their form: what comes of them, and which they are."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from seeds import seeds
from sharing import everyone, sharing

from aiodist import CollectiveAbortedError, Group, GroupClosedError, ReduceOp, compiled
from aiodist.prepared import express

pytestmark = pytest.mark.usefixtures("no_turn_is_due")

Call = Callable[["Tagged"], Any]
"""Starts a call on one rank."""
Expected = Callable[[int, Any], None]
"""Checks the result of one rank."""
ROOT = 1
DTYPES = {
    "numpy": ("f4", "f8", "i8", "c8", "?", "M8[s]"),
    "torch": ("float32", "bfloat16", "int64", "complex64", "bool"),
}


class Tagged:
    """Starts the collectives of a group with a tag."""

    def __init__(self, group: Group, tag: str | None) -> None:
        self._group, self._tag, self.rank = group, tag, group.rank

    def __getattr__(self, op: str) -> Callable[..., Any]:
        return partial(getattr(self._group, op), tag=self._tag)


class Kind:
    """Calls that differ in their data only."""

    def __init__(self, numbers: random.Random, size: int) -> None:
        self.size, self.op = size, numbers.choice(OPS)
        self.library = numbers.choice(["numpy", "numpy", "torch"])
        reduces = self.op.startswith(("all_reduce", "reduce"))
        dtypes = DTYPES[self.library]
        self.dtype = numbers.choice(dtypes[:3] if reduces else dtypes)
        self.shape = numbers.choice([(), (1,), (3,), (2, 3), (1, 2, 1, 2, 1), (5000,)])
        self.out = numbers.choice(["none", "list", "rows"])
        # Whether values lie in places. (A row of one dimension is no array, but a number.)
        self.aliased = numbers.random() < 0.3 and not (self.out == "rows" and not self.shape)

    def value(self, numbers: random.Random, *before: int) -> Any:
        """An array of random numbers."""
        shape = (*before, *self.shape)
        drawn = np.random.default_rng(numbers.getrandbits(32)).integers(0, 2, shape)
        if self.library == "numpy":
            return np.array(drawn).astype(self.dtype)
        return torch.from_numpy(np.array(drawn)).to(getattr(torch, self.dtype))

    def place(self, *before: int) -> Any:
        """An array that the result goes to."""
        if self.library == "numpy":
            return np.zeros((*before, *self.shape), self.dtype)
        return torch.zeros((*before, *self.shape), dtype=getattr(torch, self.dtype))

    def places(self) -> Any:
        """A place for a value of each rank."""
        if self.out == "list":
            return [self.place() for _ in range(self.size)]
        return self.place(self.size) if self.out == "rows" else None


def same(found: Any, expected: Any) -> bool:
    """Whether both are the same arrays of one library, or lists of them."""
    if isinstance(expected, (list, tuple)):
        return len(found) == len(expected) and all(map(same, found, expected))
    if isinstance(expected, torch.Tensor):
        return found.dtype == expected.dtype and torch.equal(found, expected)
    if isinstance(expected, np.ndarray):
        return found.dtype == expected.dtype and np.array_equal(found, expected)
    return type(found) is type(expected) and bool(found == expected)


def copied(x: Any) -> Any:
    return x.clone() if isinstance(x, torch.Tensor) else x.copy()


def drawn(kind: Kind, numbers: random.Random) -> tuple[Call, Expected]:
    """A call of that kind with new data, and what has to come of it."""
    size, op = kind.size, kind.op
    xs = [kind.value(numbers) for _ in range(size)]
    slots = [[kind.value(numbers) for _ in range(size)] for _ in range(size)]
    outs = [kind.places() for _ in range(size)]
    one = [None if kind.out == "none" else kind.place() for _ in range(size)]
    due: Any
    match op:
        case "broadcast":
            return lambda g: g.broadcast(xs[ROOT] if g.rank == ROOT else None, ROOT), (
                lambda rank, found: check(found, xs[ROOT])
            )
        case "broadcast in place":
            due = copied(xs[ROOT])
            return lambda g: g.broadcast(xs[g.rank], ROOT), (
                lambda rank, found: (check(found, due), is_it(found, xs[rank]))[0]
            )
        case "tree":
            tree = {"a": xs[ROOT], "b": [xs[0], 3], "c": "text"}
            return lambda g: g.broadcast(tree if g.rank == ROOT else None, ROOT), (
                lambda rank, found: (
                    check(found["a"], xs[ROOT]),
                    check(found["b"], [xs[0], 3]),
                    check(found["c"], "text"),
                )[0]
            )
        case "metrics":
            each = [tree_of(numbers, xs[rank]) for rank in range(size)]
            return lambda g: g.all_gather(each[g.rank]), (
                lambda rank, found: check_trees(found, each)
            )
        case "state":
            tree = tree_of(numbers, xs[ROOT])
            return lambda g: g.broadcast(tree if g.rank == ROOT else None, ROOT), (
                lambda rank, found: check_trees([found], [tree])
            )
        case "state in place" | "shares in place":
            each = [tree_of(numbers, xs[rank]) for rank in range(size)]
            held = [tree_of(numbers, kind.place()) for _ in range(size)]
            scatters = op == "shares in place"
            for tree in held:
                tree["more"] = (0.0, [kind.place(), 0], {"lr": 0.0})

            def start(g: Tagged) -> Any:
                if scatters:
                    return g.scatter(each if g.rank == ROOT else None, ROOT, out=held[g.rank])
                return g.broadcast(each[ROOT] if g.rank == ROOT else held[g.rank], ROOT)

            def placed(rank: int, found: Any) -> None:
                check_trees([found], [each[rank if scatters else ROOT]])
                if scatters or rank != ROOT:
                    assert found["x"] is held[rank]["x"]
                    assert found["more"][1][0] is held[rank]["more"][1][0]

            return start, placed
        case "shares":
            each = [tree_of(numbers, xs[rank]) for rank in range(size)]
            return lambda g: g.scatter(each if g.rank == ROOT else None, ROOT), (
                lambda rank, found: check_trees([found], [each[rank]])
            )
        case "orders":
            table = [[drawn_int(numbers) for _ in range(size)] for _ in range(size)]
            return lambda g: g.all_to_all(table[g.rank]), (
                lambda rank, found: check(found, [row[rank] for row in table])
            )
        case "all_gather" | "gather":
            due = [copied(x) for x in xs]
            if kind.aliased and kind.out != "none":
                for rank, x in enumerate(xs):
                    outs[rank][rank][...] = x  # from its own place
                    xs[rank] = outs[rank][rank]
            if op == "all_gather":
                return lambda g: g.all_gather(xs[g.rank], out=outs[g.rank]), (
                    lambda rank, found: check_list(kind, found, due, outs[rank])
                )
            return (
                lambda g: g.gather(xs[g.rank], ROOT, out=outs[ROOT] if g.rank == ROOT else None),
                lambda rank, found: (
                    check_list(kind, found, due, outs[rank]) if rank == ROOT else check(found, None)
                ),
            )
        case "scatter":
            due = [copied(x) for x in xs]
            if kind.aliased:
                one[ROOT] = xs[0]
            return lambda g: g.scatter(
                xs if g.rank == ROOT else None, ROOT, out=one[g.rank]
            ), lambda rank, found: (check(found, due[rank]), is_it(found, one[rank]))[0]
        case "all_to_all":
            due = [[copied(row[rank]) for row in slots] for rank in range(size)]
            if kind.aliased and kind.out != "none":
                outs[0] = slots[0]
            return lambda g: g.all_to_all(slots[g.rank], out=outs[g.rank]), (
                lambda rank, found: check_list(kind, found, due[rank], outs[rank])
            )
        case "all_reduce" | "reduce":
            due = sum_of(xs)
            if op == "all_reduce":
                return lambda g: g.all_reduce(xs[g.rank], out=one[g.rank]), (
                    lambda rank, found: (
                        check(found, due),
                        is_it(found, xs[rank] if one[rank] is None else one[rank]),
                    )[0]
                )
            return lambda g: g.reduce(
                xs[g.rank], ROOT, out=one[ROOT] if g.rank == ROOT else None
            ), lambda rank, found: check(found, due if rank == ROOT else None)
        case "all_reduce list":
            pairs = [[kind.value(numbers), kind.value(numbers, 2)] for _ in range(size)]
            due = [sum_of([pair[which] for pair in pairs]) for which in range(2)]
            into = [[kind.place(), kind.place(2)] if kind.out == "list" else None for _ in pairs]
            return lambda g: g.all_reduce(pairs[g.rank], out=into[g.rank]), (
                lambda rank, found: (
                    check(found, due),
                    is_it(found, into[rank] or pairs[rank]),
                )[0]
            )
        case "reduce_scatter":
            whole = [kind.value(numbers, size) for _ in range(size)]
            due = sum_of(whole)
            parts = [None if kind.out == "none" else kind.place(1) for _ in range(size)]
            return lambda g: g.reduce_scatter(whole[g.rank], out=parts[g.rank]), (
                lambda rank, found: (
                    check(found, due[rank : rank + 1]),
                    is_it(found, parts[rank]),
                )[0]
            )
        case "a number":
            values = [numbers.choice([1.5, -2.0, 1e300]) for _ in range(size)]
            return lambda g: g.all_reduce(values[g.rank], ReduceOp.MAX), (
                lambda rank, found: check(found, max(values))
            )
        case "an int":
            ints = [numbers.randrange(-(2**62), 2**62) // size for _ in range(size)]
            return lambda g: g.reduce(ints[g.rank], ROOT), (
                lambda rank, found: check(found, sum(ints) if rank == ROOT else None)
            )
        case "a bool":
            bools = [numbers.random() < 0.5 for _ in range(size)]
            return lambda g: g.all_reduce(bools[g.rank], ReduceOp.LOR), (
                lambda rank, found: check(found, any(bools))
            )
        case _:
            return lambda g: g.barrier(), lambda rank, found: check(found, None)


OPS = [
    "metrics", "state", "shares", "state in place", "shares in place", "orders", "broadcast",
    "broadcast in place", "tree", "all_gather",
    "gather", "scatter", "all_to_all", "all_reduce", "all_reduce list", "reduce", "reduce_scatter",
    "a number", "an int", "a bool", "barrier",
]  # fmt: skip


def drawn_int(numbers: random.Random) -> int:
    ends = (-(2**63), 2**63 - 1, -1, 0, 127, 128, 2**32)
    return numbers.choice(ends) if numbers.random() < 0.5 else numbers.getrandbits(63)


def tree_of(numbers: random.Random, x: Any) -> Any:
    """A value with numbers that change each time, and other words that change now and then."""
    loss = numbers.choice([0.0, -0.0, 1e-300, float("inf"), numbers.random()])
    rare = numbers.random() < 0.1
    return {
        "step": drawn_int(numbers),
        "x": x,
        "more": (loss, [x, drawn_int(numbers)], {"lr": -loss}),
        "done": rare,
        "name": "other" if rare else "name",
        "wide": 2**70 if rare else 3,
    }


def check_trees(found: list[Any], expected: list[Any]) -> None:
    for one, due in zip(found, expected, strict=True):
        assert list(one) == list(due)
        check(one["x"], due["x"])
        (loss, (x, number), rest), (loss_due, (x_due, number_due), rest_due) = (
            one["more"],
            due["more"],
        )
        check(x, x_due)
        check([number, rest == rest_due], [number_due, True])
        assert str([loss, *rest.values()]) == str([loss_due, *rest_due.values()])
        for name in ("step", "done", "name", "wide"):
            check(one[name], due[name])


def sum_of(xs: list[Any]) -> Any:
    """The sum in the order of ranks. (A sum of bools is their number, which is 1 at most here.)"""
    total = copied(xs[0])
    for x in xs[1:]:
        total += x
    return total


def check(found: Any, expected: Any) -> None:
    assert same(found, expected), (found, expected)


def is_it(found: Any, place: Any) -> None:
    assert place is None or found is place


def check_list(kind: Kind, found: Any, expected: list[Any], out: Any) -> None:
    is_it(found, out)
    assert len(found) == len(expected)
    for one, due in zip(found, expected, strict=True):
        check(one, due)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("seed", seeds(6, 40))
async def test_random_calls_of_few_kinds(size: int, seed: int) -> None:
    """Calls of each kind come again and again, in any order. Ranks call early or late."""
    numbers = random.Random(seed)
    async with sharing(size) as ranks:
        kinds = [Kind(numbers, size) for _ in range(5)]
        for _ in range(60):
            call, expected = drawn(numbers.choice(kinds), numbers)
            tag = numbers.choice([None, "a", "b"])
            order = numbers.sample(range(size), size)
            works = {}
            for rank in order:
                works[rank] = call(Tagged(ranks[rank], tag))
                if numbers.random() < 0.2:
                    await asyncio.sleep(0)
            for rank in order:
                expected(rank, await works[rank])


KNOWN: dict[str, Callable[[Group, Any], Any]] = {
    "broadcast": lambda g, x: g.broadcast(x if g.rank == ROOT else None, ROOT),
    "broadcast in place": lambda g, x: g.broadcast(x, ROOT),
    "a tree": lambda g, x: g.broadcast({"a": x, "b": 3} if g.rank == ROOT else None, ROOT),
    "all_gather": lambda g, x: g.all_gather(x),
    "all_gather into rows": lambda g, x: g.all_gather(x, out=like(x, 2)),
    "all_gather into a list": lambda g, x: g.all_gather(x, out=[like(x), like(x)]),
    "gather": lambda g, x: g.gather(x, ROOT),
    "scatter": lambda g, x: g.scatter([x, x] if g.rank == ROOT else None, ROOT),
    "scatter into": lambda g, x: g.scatter([x, x] if g.rank == ROOT else None, ROOT, out=like(x)),
    "all_to_all": lambda g, x: g.all_to_all([x, x]),
    "all_to_all into a list": lambda g, x: g.all_to_all([x, x], out=[like(x), like(x)]),
    "all_reduce": lambda g, x: g.all_reduce(x),
    "all_reduce into": lambda g, x: g.all_reduce(x, out=like(x)),
    "reduce": lambda g, x: g.reduce(x, ROOT),
    "reduce_scatter into": lambda g, x: g.reduce_scatter(x, out=like(x[:2])),
    "a number": lambda g, x: g.all_reduce(float(g.rank)),
    "numbers that change": lambda g, x: g.all_gather(random.random()),
    "trees that change": lambda g, x: g.gather({"step": random.getrandbits(63), "x": x}, ROOT),
    "barrier": lambda g, x: g.barrier(),
}


def like(x: Any, *before: int) -> Any:
    make = torch.empty if isinstance(x, torch.Tensor) else np.empty
    return make((*before, *x.shape), dtype=x.dtype)  # type: ignore[operator]


@pytest.mark.skipif(compiled.core is None, reason=compiled.reason)
@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("call", KNOWN)
async def test_the_compiled_part_finds_them(
    monkeypatch: pytest.MonkeyPatch, call: str, library: str
) -> None:
    """If a kind of call has come a few times, no Python code looks for its recipe any more."""
    looked: list[str] = []
    for name in ("start", "all_reduce"):
        real = getattr(express.Express, name)

        def counted(self: Any, *args: Any, real: Any = real, name: str = name) -> Any:
            looked.append(name)
            return real(self, *args)

        monkeypatch.setattr(express.Express, name, counted)
    async with sharing(2) as ranks:
        for turn in range(express.PLAIN_BEFORE + 8):
            if turn == express.PLAIN_BEFORE + 6:
                looked.clear()
            x: Any = np.arange(4.0) if library == "numpy" else torch.arange(4.0)
            await everyone(ranks, lambda g, x=x: KNOWN[call](g, copied(x)))
        assert not looked


@pytest.mark.skipif(compiled.core is None, reason=compiled.reason)
@pytest.mark.parametrize("name", ["is_neg", "untyped_storage", "dtype"])
async def test_an_interrupt_while_a_tensor_is_looked_at_ends_the_group(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """It is not lost, though the compiled part leaves tensors that it cannot read to Python."""
    async with sharing(2) as ranks:
        x = torch.arange(4, dtype=torch.int8)
        for _ in range(express.PLAIN_BEFORE + 6):
            await everyone(ranks, lambda g: g.broadcast(x, ROOT))
        with monkeypatch.context() as patch:

            def interrupt(_: Any) -> None:
                patch.undo()
                raise KeyboardInterrupt

            patch.setattr(torch.Tensor, name, property(interrupt) if name == "dtype" else interrupt)
            with pytest.raises(KeyboardInterrupt):
                ranks[0].broadcast(x, ROOT)
        with pytest.raises(GroupClosedError, match="KeyboardInterrupt broke a call off"):
            ranks[0].broadcast(x, ROOT)


async def test_places_that_share_memory_are_refused_as_ever() -> None:
    async with sharing(2) as ranks:
        x = np.ones(4)
        for _ in range(6):
            await everyone(ranks, lambda g: g.all_gather(x, out=[np.empty(4), np.empty(4)]))
            await everyone(ranks, lambda g: g.all_reduce(x.copy(), out=np.empty(4)))
        for group in ranks:
            both = np.empty(6)
            with pytest.raises(ValueError, match="share memory"):
                await group.all_gather(x, out=[both[:4], both[2:]])
        found = await everyone(ranks, shifted)
        assert all((each == 2).all() for each in found)


async def test_trees_whose_arrays_share_memory() -> None:
    """The same array twice, as tied weights are, gets its value. Parts of arrays are refused."""
    async with sharing(2) as ranks:
        tree = {"a": np.ones(4), "b": np.ones(4), "n": 1}

        def call(group: Group, place: Any) -> Any:
            return group.broadcast(tree if group.rank == ROOT else place, ROOT)

        for _ in range(6):
            place: Any = {"a": np.empty(4), "b": np.empty(4), "n": 2}
            found = await everyone(ranks, lambda g, place=place: call(g, place))
            assert found[0]["a"] is place["a"]
            assert (found[0]["n"], found[0]["b"].tolist()) == (1, [1] * 4)
        tied = np.empty(4)
        found = await everyone(ranks, lambda g: call(g, {"a": tied, "b": tied, "n": 2}))
        assert found[0]["b"] is tied
        assert (tied == 1).all()
        both = np.empty(6)
        work = call(ranks[ROOT], None)
        with pytest.raises(ValueError, match="share a part of their memory"):
            call(ranks[0], {"a": both[:4], "b": both[2:], "n": 2})
        with pytest.raises(CollectiveAbortedError):
            await work


async def shifted(group: Group) -> Any:
    """An all_reduce whose result goes over a part of its input."""
    memory = np.ones(5)
    return await group.all_reduce(memory[:4], out=memory[1:])


async def test_a_call_is_not_known_by_words_that_have_changed() -> None:
    """Trees of the same arrays with other numbers and strings, by turns."""
    async with sharing(2) as ranks:
        for turn in range(30):
            tree = {"a": np.ones(2), "b": turn // 5 % 3, "c": "xyz"[turn // 7 % 3]}
            found = await everyone(
                ranks, lambda g, x=tree: g.broadcast(x if g.rank == ROOT else None, ROOT)
            )
            assert [(each["b"], each["c"]) for each in found] == [(tree["b"], tree["c"])] * 2


async def test_lists_that_change_their_length() -> None:
    async with sharing(2) as ranks:
        xs = [np.ones(2), np.ones(2)]
        for _ in range(6):
            await everyone(ranks, lambda g: g.all_to_all(xs))
        for group in ranks:
            with pytest.raises(ValueError, match="takes 2 values"):
                await group.all_to_all([*xs, np.ones(2)])
        assert len((await everyone(ranks, lambda g: g.all_to_all(xs)))[0]) == 2
