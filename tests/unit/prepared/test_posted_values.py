"""Values that are posted, by ranks with the compiled part and by others."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from sharing import everyone, sharing, unmapping_all

from aiodist import Group, PeerLostError
from aiodist.collectives import templates
from aiodist.compiled import core
from aiodist.phases.base import MAX_RANKS_POSTING
from aiodist.prepared import post_express, posted_values
from aiodist.prepared.lane_values import KNOWN
from aiodist.shared_memory.posts import SIZE

Value = Callable[[int], Any]
"""Makes the value of a rank."""

VALUES: list[Value] = [
    lambda rank: rank,
    lambda rank: (1 << 62) + rank,
    lambda rank: (1 << 70) + rank,
    lambda rank: rank / 2,
    lambda rank: f"rank {rank}",
    lambda rank: np.full(3, rank),
    lambda rank: np.full((2, 5), rank, np.float32),
    lambda rank: np.full(40_000, float(rank)),
    lambda rank: torch.full((rank + 1,), rank),
    lambda rank: torch.full((4, 2), float(rank), dtype=torch.bfloat16),
    lambda rank: {"a": rank, "b": [np.full(rank + 1, 7), None, True]},
    lambda rank: {"b": np.full(2, rank), "a": (rank, "x")},
    lambda rank: [np.full(2, each) for each in range(33)],
    *(lambda rank, k=k: {"prompt": "x" * (k + rank), "n": [7] * k} for k in range(20)),
]


def same(one: Any, other: Any) -> bool:
    """Whether two values are equal, and of the same types."""
    if type(one) is not type(other):
        return False
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and same([*one.values()], [*other.values()])
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    return bool(one == other)


def gathered(value: Value, size: int) -> tuple[Callable[..., Any], Callable[[int], Any]]:
    return lambda g, **k: g.all_gather(value(g.rank), **k), lambda _: [*map(value, range(size))]


def sent(value: Value, size: int) -> tuple[Callable[..., Any], Callable[[int], Any]]:
    # The last rank mostly finds all posts, and does not know which value comes next.
    return (
        lambda g, **k: g.broadcast(None if g.rank else value(0), 0, **k),
        lambda _: value(0),
    )


def placed(value: Value, size: int) -> tuple[Callable[..., Any], Callable[[int], Any]]:
    return lambda g, **k: g.broadcast(np.full(6, g.rank), 0, **k), lambda _: np.full(6, 0)


def exchanged(value: Value, size: int) -> tuple[Callable[..., Any], Callable[[int], Any]]:
    return (
        lambda g, **k: g.all_to_all([value(g.rank)] * size, **k),
        lambda _: [*map(value, range(size))],
    )


def collected(value: Value, size: int) -> tuple[Callable[..., Any], Callable[[int], Any]]:
    return (
        lambda g, **k: g.gather(value(g.rank), 0, **k),
        lambda rank: None if rank else [*map(value, range(size))],
    )


def summed(value: Value, size: int) -> tuple[Callable[..., Any], Callable[[int], Any]]:
    return lambda g, **k: g.all_reduce(g.rank + 1, **k), lambda _: size * (size + 1) // 2


def met(value: Value, size: int) -> tuple[Callable[..., Any], Callable[[int], Any]]:
    return lambda g, **k: g.barrier(**k), lambda _: None


MAKERS = [gathered, gathered, sent, placed, exchanged, collected, summed, met]


@pytest.mark.parametrize("compiled", [{0, 1, 2}, {0, 2}, {1}, set()], ids=str)
@pytest.mark.sample(12)
@pytest.mark.parametrize("seed", range(12))
def test_random_programs(run, monkeypatch, compiled, seed):
    """Each tag has calls of its own, in an order of its own on each rank, and waits at will."""
    real = post_express.tape_of_posts
    monkeypatch.setattr(
        post_express,
        "tape_of_posts",
        lambda what, posts, *a, **k: real(what, posts, *a, **k) if posts.rank in compiled else None,
    )
    chance, size = random.Random(seed), 3

    async def calls(group: Group, tag: str, program: list[Any], own: random.Random) -> None:
        pending: list[Any] = []
        for start, due in program:
            pending.append((start(group, tag=tag), due(group.rank)))
            while pending and own.random() < 0.7:
                work, value = pending.pop(0)
                assert same(await work, value)
        for work, value in pending:
            assert same(await work, value)

    async def main():
        async with sharing(size) as ranks:
            programs = {
                tag: [
                    chance.choice(MAKERS)(value, size)
                    for value in chance.choices(VALUES, k=3)
                    for _ in range(chance.choice([1, 6]))
                ]
                * 4
                for tag in "abc"
            }
            await asyncio.gather(
                *(
                    calls(group, tag, program, random.Random(f"{seed} {group.rank} {tag}"))
                    for group in ranks
                    for tag, program in programs.items()
                )
            )

    run(main())


@pytest.mark.parametrize("shapes", [(3, 5), (3, 5, 4, 6), (3, 5, 4, 6, 2)], ids=str)
def test_others_show_something_else_each_time(run, monkeypatch, shapes):
    """Of a few known forms, each is found within the call, even if another one was expected."""
    fell_back: list[object] = []
    real = post_express.PostExpress._unfinished
    monkeypatch.setattr(
        post_express.PostExpress,
        "_unfinished",
        lambda self, *args: fell_back.append(self) or real(self, *args),
    )

    async def main():
        async with sharing(2) as ranks:
            for number in range(80):
                value = np.arange(float(shapes[number % len(shapes)])) + number
                first = ranks[0].broadcast(value, 0, tag="a")
                if number == 60:
                    fell_back.clear()
                last = ranks[1].broadcast(None, 0, tag="a")
                if len(shapes) <= KNOWN:
                    assert last.done()
                assert same(await last, value) and same(await first, value)
            late = [each for each in fell_back if each is ranks[1]._context.post_express]
            assert bool(late) is (len(shapes) > KNOWN)

    run(main())


@pytest.mark.skipif(core is None, reason="without the compiled part there is no tape")
def test_what_a_tape_refuses(run):
    """Pieces that are not within a post, and windows of other ranks."""

    async def main():
        async with sharing(2) as ranks:
            for _ in range(20):
                await asyncio.gather(*(g.all_gather(np.ones(4), tag="a") for g in ranks))
            recipes = ranks[1]._context.post_express._recipes.values()
            (recipe,) = (r for r in recipes if type(r) is posted_values.PostedValues)
            tape, windows = recipe.tapes[0], tuple(recipe._found)
            for place in ((2, 0, 8), (-1, 0, 8), (0, -1, 8), (0, 0, -8)):
                with pytest.raises(ValueError, match="no such place"):
                    tape.expects([], [(place, 0, 0)], (), True, windows)
            with pytest.raises(ValueError):
                tape.expects([], [], (), True, windows[:1])
            with pytest.raises(ValueError):
                tape.expects([], [], (), True)
            tape.shows(recipe._own, [((0, SIZE, 8), 0)])  # far behind the end of the post
            tape.expects([], [], (), True, windows)
            works = [g.all_gather(np.ones(4), tag="a") for g in ranks]
            with pytest.raises(ValueError, match="the posts have other lengths"):
                await works[1]
            await asyncio.gather(*works, return_exceptions=True)

    run(main())


def scribble(group: Group) -> None:
    """Write over what describes the array that this rank has posted last."""
    posts = group._context.post_express._posts
    at = posts.last_at(32)
    posts.ring[at - 64 : at] = b"\xff" * 64


@pytest.mark.parametrize("warmed", [0, 20])
def test_a_post_that_makes_no_sense(run, warmed):
    """Who posted it is lost. The call does not raise."""

    async def main():
        async with sharing(2) as ranks:
            for _ in range(warmed):
                await everyone(ranks, lambda g: g.all_gather(np.ones(4), tag="a"))
            first = ranks[0].all_gather(np.ones(4), tag="a")
            scribble(ranks[0])
            with pytest.raises(PeerLostError):
                await ranks[1].all_gather(np.ones(4), tag="a")
            assert (await asyncio.gather(first, return_exceptions=True))[0] is not None

    run(main())


def test_a_call_within_the_making_of_a_result(run, monkeypatch):
    """It may read the posts from which the result is made. They are not passed by twice."""
    real, inner = templates._Shifting.copy, []

    async def main():
        async with sharing(2) as ranks:

            def copy(data):
                if armed.pop() if armed else False:
                    inner.append(ranks[1].all_gather(np.ones(2), tag="b"))
                return real(data)

            armed: list[bool] = []
            monkeypatch.setattr(templates._Shifting, "copy", copy)
            for number in range(40):
                first = ranks[0].all_gather(np.full(3, number), tag="a")
                if number % 10 == 9:
                    armed.append(True)
                last = ranks[1].all_gather(np.full(3, -number), tag="a")
                due = [np.full(3, number), np.full(3, -number)]
                assert same(await first, due) and same(await last, due)
                if number % 10 == 9:
                    other = ranks[0].all_gather(np.zeros(2), tag="b")
                    assert same(await other, [np.zeros(2), np.ones(2)])
                    assert same(await inner.pop(), [np.zeros(2), np.ones(2)])

    run(main())


def test_a_call_that_comes_before_another_one_posts(run, monkeypatch):
    """It may teach the recipe other values."""
    real = posted_values.PostedValues._heads

    async def main():
        async with sharing(2) as ranks:

            def heads(recipe, tag):
                found = real(recipe, tag)
                if tag == "b":
                    recipe._learnt()
                return found

            monkeypatch.setattr(posted_values.PostedValues, "_heads", heads)
            for tag in "aabbab":
                for number in range(20):
                    first = ranks[0].all_gather(np.full(3, number), tag=tag)
                    last = ranks[1].all_gather(np.full(3, -number), tag=tag)
                    due = [np.full(3, number), np.full(3, -number)]
                    assert same(await first, due) and same(await last, due)

    run(main())


def test_values_of_other_words_keep_no_memory_mapped(run):
    async def main():
        async with sharing(2) as ranks:
            for number in range(60):
                value = {"k": f"w{number // 6}", "a": np.arange(4.0)}
                await everyone(ranks, lambda g, value=value: g.all_gather(value, tag="a"))

    with unmapping_all():
        run(main())


async def test_more_ranks_than_can_post():
    size = MAX_RANKS_POSTING + 1
    async with sharing(size) as ranks:
        for number in range(12):
            prompt = {"prompt": "x" * number}
            found = await everyone(
                ranks, lambda g, p=prompt: g.broadcast(None if g.rank else p, 0, tag="a")
            )
            assert found == [prompt] * size
            found = await everyone(ranks, lambda g: g.all_gather(np.full(2, g.rank), tag="b"))
            assert same(found[-1], [np.full(2, rank) for rank in range(size)])
            assert await everyone(ranks, lambda g: g.all_reduce(g.rank, tag="c")) == [136] * size
