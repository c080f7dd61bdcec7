"""Many prepared collectives at once: each waits for its turn on the lane, and is done within it."""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter

import numpy as np
import pytest
from sharing import everyone, sharing

from aiodist import CollectiveAbortedError, CollectiveTimeoutError, MismatchError
from aiodist.engine import waiting_calls
from aiodist.errors import GroupClosedError
from aiodist.prepared import lane_express
from aiodist.prepared.lane_express import LaneExpress
from aiodist.rank import doings
from aiodist.types import SUM


@pytest.fixture
def turns(monkeypatch):
    """How often a call that was queued was done within its turn ("done"), or not ("begun"), or
    went on as an operation before that ("before")."""
    seen: Counter[str] = Counter()
    at_turn, to_operation = LaneExpress.at_turn, LaneExpress.to_operation

    def taking(self, call):
        waited = call.key in self._calls.waiting.by_key
        at_turn(self, call)
        if waited and call.key not in self._calls.waiting.by_key:
            seen["done" if call.key not in self._calls.ops else "begun"] += 1

    def going_on(self, call):
        seen["before"] += 1
        return to_operation(self, call)

    monkeypatch.setattr(LaneExpress, "at_turn", taking)
    monkeypatch.setattr(LaneExpress, "to_operation", going_on)
    return seen


def some_calls(lanes, chance, size, *, cancels):
    kinds = ["express", *chance.sample(lanes.PREPARED, 2)]
    calls = []
    for number in range(24):
        canceller = chance.randrange(size) if cancels and chance.random() < 0.15 else None
        kind = chance.choice(kinds) if chance.random() < 0.9 else "list"
        # The same root each time, so that all kinds are known soon.
        calls.append(lanes.Call(number * size, kind, chance.choice([3, 3, 3000]), canceller))
    return calls


@pytest.mark.parametrize("polls", [False, True])
@pytest.mark.parametrize("cancels", [False, True])
def test_any_interleaving(lanes, turns, polls, cancels):
    for seed in range(30):
        chance = random.Random(f"queued {seed}")
        size = chance.choice([2, 2, 3, 4])
        world = lanes.World(size, lanes.Chance(seed), polls=polls)
        users = lanes.Users(world, some_calls(lanes, chance, size, cancels=cancels))
        users.run()
        users.check()
        assert not any(context.calls.waiting.by_key for context in world.contexts)
        assert not any(context.calls.tags._pending for context in world.contexts)
    assert turns["done"] > 50
    assert turns["begun"] > 20
    assert (turns["before"] > 10) == cancels


def test_a_rank_that_dies(lanes, turns):
    failed = 0
    for seed in range(40):
        chance = random.Random(f"queued {seed}")
        size = chance.choice([2, 3, 4])
        world = lanes.World(size, lanes.Chance(seed), polls=chance.random() < 0.5)
        users = lanes.Users(world, some_calls(lanes, chance, size, cancels=False))
        dead = chance.randrange(size)
        users.go(chance.randrange(20, 120))
        world.kill(dead)
        world.tell_of(dead)
        users.run()
        failed += users.check_without(dead)
    assert failed > 40
    assert turns["before"] > 40


def test_the_group_ends(lanes):
    world = lanes.World(2, lanes.Chance(0))
    calls = [lanes.Call(2 * number, "express", 3) for number in range(6)]
    for call in calls:
        call.start(world.contexts[0])
    context = world.contexts[0]
    assert context.pending == [call.works[0] for call in calls]
    context.close(GroupClosedError("over"))
    for call in calls:
        assert isinstance(call.works[0].exception(), GroupClosedError)
    assert not context.pending


def test_ranks_that_call_something_else_in_the_midst(run):
    """All ranks say who called what; what is behind it is done."""

    async def main():
        async with sharing(3) as ranks:
            await everyone(ranks, lambda g: g.all_reduce(np.ones(2)))
            await everyone(ranks, lambda g: g.all_reduce(np.ones(3)))

            async def many(group):
                lengths = [2, 2, 2 + (group.rank == 1), 2, 2]
                works = [group.all_reduce(np.full(n, 2.0)) for n in lengths]
                return await asyncio.gather(*works, return_exceptions=True)

            for results in await everyone(ranks, many):
                error = results.pop(2)
                assert isinstance(error, (MismatchError, CollectiveAbortedError))
                assert all((x == 6).all() for x in results)

    run(main())


@pytest.fixture
def no_patience(monkeypatch):
    monkeypatch.setattr(waiting_calls, "LONG", 0.0)


@pytest.mark.usefixtures("no_patience")
def test_deadlines_name_who_is_missing(run):
    async def main():
        async with sharing(2) as ranks:
            await everyone(ranks, lambda g: g.all_reduce(np.ones(2)))
            works = [ranks[0].all_reduce(np.ones(2), timeout=0.3) for _ in range(3)]
            for seq, work in enumerate(works, works[0].seq):
                with pytest.raises(CollectiveTimeoutError, match=r"within 0\.3 s") as caught:
                    await work
                assert caught.value.missing == (1,)
                assert caught.value.seq == seq

    run(main())


def test_what_waits_is_seen(run):
    """By the coordinator, which is told who is missing; and among the pending Works."""

    async def main():
        async with sharing(2) as ranks:
            await everyone(ranks, lambda g: g.all_reduce(np.ones(2)))
            works = [ranks[0].all_reduce(np.ones(2)) for _ in range(3)]
            context = ranks[0]._context
            assert len(context.calls.waiting.by_key) == 2
            assert context.pending == works
            context.calls.waiting.settle()  # as RankDoings.now does first
            assert [found.work for found in doings.pending_in(context)] == works
            works += [ranks[1].all_reduce(np.ones(2)) for _ in range(3)]
            assert all((x == 2).all() for x in await asyncio.gather(*works))

    run(main())


def test_a_list_that_changes_after_the_call(run):
    """What counts is what it was called with, as where it goes the ordinary way from the start."""

    async def main():
        async with sharing(2) as ranks:
            for _ in range(3):
                await everyone(ranks, lambda g: g.all_to_all([np.ones(2), np.ones(2)]))
            works = []
            for group in ranks:
                slots = [np.full(2, 1.0 + group.rank), np.full(2, 3.0 + group.rank)]
                works += [group.all_to_all(slots) for _ in range(3)]
                slots[:] = ["not", "these"]
            ranks[0]._context.calls.waiting.settle()
            found = [[x.tolist() for x in each] for each in await asyncio.gather(*works)]
            assert found == [[[1, 1], [2, 2]]] * 3 + [[[3, 3], [4, 4]]] * 3

    run(main())


def test_what_is_called_when_the_loop_is_due_is_done_if_the_others_come(lanes, monkeypatch):
    """It would take as long to have it wait, and the loop has its turn before anybody goes on."""
    monkeypatch.setattr(lane_express, "tape_of", lambda *_, **__: None)
    world = lanes.World(2, lanes.Path([]), polls=True)
    first, second = world.contexts
    arrays = [np.full(2, 1.0), np.full(2, 2.0)]
    works = []
    first.endpoint.progress.is_due = lambda: True
    first.endpoint.progress.polls = True  # though its loop has a clock of its own
    met = first.lane.board.met

    def comes(peers, stamp):
        if len(works) == 0:
            works.append(second.express.all_reduce(arrays[1], SUM, math.inf))
        return met(peers, stamp)

    first.lane.board.met = comes
    works.append(first.express.all_reduce(arrays[0], SUM, math.inf))
    assert not first.calls.ops
    assert not works[1].done()
    world.settle()
    assert [work.result().tolist() for work in works] == [[3.0, 3.0]] * 2
