"""Collectives with a tag that are done within the call, over links, while ranks forget tags."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import numpy as np
import pytest
from over_links import nothing_is_left, ordinary

from aiodist import Group
from aiodist.engine import deadlines, tags
from aiodist.engine.arrivals import Arrivals
from aiodist.engine.calls import Calls
from aiodist.prepared import lane_setup
from aiodist.prepared.link_express import LinkExpress
from aiodist.prepared.link_frames import Frames
from aiodist.transports import polling

pytestmark = pytest.mark.usefixtures("no_turn_is_due")

CALLS = {
    "all_reduce": lambda g, x, tag: g.all_reduce(x + g.rank, tag=tag),
    "all_gather": lambda g, x, tag: g.all_gather({"at": int(x[0]), "of": g.rank}, tag=tag),
    "broadcast": lambda g, x, tag: g.broadcast(x if g.rank == 1 else np.empty_like(x), 1, tag=tag),
}


def expected(name: str, x: Any, size: int) -> Any:
    if name == "all_reduce":
        return size * x + sum(range(size))
    return x if name == "broadcast" else [{"at": int(x[0]), "of": rank} for rank in range(size)]


async def called(ranks: list[Group], order: list[int], name: str, x: Any, tag: Any) -> None:
    works = [CALLS[name](ranks[rank], x, tag) for rank in order]
    for result in await asyncio.gather(*works):
        np.testing.assert_equal(result, expected(name, x, len(ranks)))


@pytest.mark.parametrize("layout", ["ab", "abc", "aab", "aabb"])
@pytest.mark.parametrize("name", CALLS)
async def test_no_operation_begins_between_hosts(
    on_hosts: Any, monkeypatch: pytest.MonkeyPatch, layout: str, name: str
) -> None:
    async with on_hosts(layout) as ranks:
        for number in range(3):
            await called(ranks, [*range(len(ranks))], name, np.full(3, number), "learnt")
        monkeypatch.setattr(Calls, "launch", None)
        for number in range(3):
            await called(ranks, [*range(len(ranks))][::-1], name, np.full(3, number), f"{number}")
        nothing_is_left(ranks)


@pytest.mark.parametrize("transport", ["tcp"])
@pytest.mark.parametrize("name", CALLS)
async def test_a_tag_that_is_used_is_not_forgotten(
    groups: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Rank 0 proposes to forget it. Rank 1 hears of that only within its next call."""
    monkeypatch.setattr(polling, "UNREAD", 3600.0)  # it reads nothing before that call
    async with groups(2) as ranks:
        for number in range(3):
            await called(ranks, [0, 1], name, np.full(3, number), "a")
        monkeypatch.setattr(tags, "MANY", 0)
        ranks[0]._context.calls.forget_tags()
        for number in range(3):
            await called(ranks, [1, 0], name, np.full(3, number), "a")
        nothing_is_left(ranks)


@pytest.mark.parametrize("transport", ["tcp"])
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("tag", [None, "a"])
async def test_who_is_asked_within_its_call_has_entered(
    groups: Any, monkeypatch: pytest.MonkeyPatch, name: str, tag: Any
) -> None:
    """Else the loss of a rank that has completed it and left would fail it for the others."""
    monkeypatch.setattr(polling, "UNREAD", 3600.0)
    answers: list[bool] = []
    answer = Arrivals._answer

    def noted(self: Arrivals, src: int, key: Any, *, entered: bool) -> None:
        answers.append(entered)
        answer(self, src, key, entered=entered)

    monkeypatch.setattr(Arrivals, "_answer", noted)
    async with groups(2) as ranks:
        for number in range(3):
            await called(ranks, [0, 1], name, np.full(3, number), tag)
        first = CALLS[name](ranks[0], x := np.full(3, 7), tag)
        calls = ranks[0]._context.calls
        deadlines.ask_whether_entered(calls, calls.find((tag, first.seq)))
        second = CALLS[name](ranks[1], x, tag)
        for result in await asyncio.gather(first, second):
            np.testing.assert_equal(result, expected(name, x, 2))
        assert answers == [True]
        nothing_is_left(ranks)


@pytest.mark.parametrize("transport", ["tcp"])
@pytest.mark.parametrize("tag", [None, "a"])
@pytest.mark.parametrize("lost", [3, 5])
async def test_a_rank_that_leaves_within_the_call_may_have_completed_it(
    groups: Any, monkeypatch: pytest.MonkeyPatch, tag: Any, lost: int
) -> None:
    """Of 8 ranks, rank 0 exchanges nothing with ranks 3 and 5."""
    async with groups(8) as ranks:
        for number in range(3):
            await called(ranks, [*range(8)], "all_gather", np.full(3, number), tag)
        context, look = ranks[0]._context, Frames.has_come

        def leaves(self: Frames, *args: Any) -> bool:
            if self._context is context:
                context.rank_lost(context.ranks[lost], "it left")
            return look(self, *args)

        monkeypatch.setattr(Frames, "has_come", leaves)
        await called(ranks, [*range(1, 8), 0], "all_gather", np.full(3, 7), tag)
        assert context.lost()


@pytest.mark.parametrize("tag", [None, "a"])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("transport", ["shm"])
async def test_ranks_that_could_not_share_memory(
    groups: Any, monkeypatch: pytest.MonkeyPatch, size: int, tag: Any
) -> None:
    monkeypatch.setattr(lane_setup, "_offer", lambda loop: (None, "refused"))

    async def program(group: Group, length: int) -> None:
        for number in range(20):
            x = np.full(length, number)
            place = x if group.rank == number % size else np.empty_like(x)
            await group.broadcast(place, number % size, tag=tag)
            assert (place == number).all()
        for number in range(20):
            x = np.full(length, number)
            found = await group.all_gather(x, out=np.empty((size, length), int), tag=tag)
            assert (found == number).all()

    async with groups(size) as ranks:
        for length in (25_000, 125_000, 5):
            await asyncio.gather(*[program(group, length) for group in ranks])
        assert all(type(group._context.tagged_express) is LinkExpress for group in ranks)
        nothing_is_left(ranks)


@pytest.mark.parametrize("layout", ["ab", "abc", "aabb"])
@pytest.mark.parametrize("seed", range(3))
async def test_it_gives_what_the_ordinary_way_gives(
    on_hosts: Any, monkeypatch: pytest.MonkeyPatch, layout: str, seed: int
) -> None:
    """Tags come, are forgotten and come again. Ranks call in any order, several at a time, and some
    take the ordinary way."""
    monkeypatch.setattr(tags, "MANY", 2)
    random = np.random.default_rng(seed)
    async with on_hosts(layout) as ranks:

        async def one(tag: Any) -> None:
            for number in range(20):
                name = random.choice([*CALLS])
                order = random.permutation(len(ranks)).tolist()
                with contextlib.ExitStack() as stack:
                    for rank in range(len(ranks)) if random.random() < 0.3 else ():
                        if random.random() < 0.3:
                            stack.enter_context(ordinary(ranks[rank]))
                    await called(ranks, order, str(name), np.full(5, number), tag)

        for number in range(6):
            await one(number)
        await asyncio.gather(*[one(f"tag {number}") for number in range(6)])
        assert any(group._context.calls.tags._forgotten for group in ranks)
        nothing_is_left(ranks)
