"""Lanes of several ranks: any interleaving of calls, callbacks, frames and cancellations."""

from __future__ import annotations

import random

import pytest
from seeds import seeds

from aiodist.errors import CollectiveAbortedError, MismatchError
from aiodist.schedules.teams import Teams
from aiodist.shared_memory.board import digest_of


@pytest.mark.parametrize("polls", [False, True])
@pytest.mark.parametrize("seed", seeds(15, 60))
def test_any_interleaving(lanes, seed, polls):
    chance = random.Random(seed)
    size = chance.choice([2, 2, 3, 4])
    world = lanes.World(size, lanes.Chance(seed), polls=polls)
    users = lanes.Users(world, lanes.random_calls(chance, size, 12))
    users.run()
    users.check()


TEAMS: list[Teams] = [((0, 1), (2, 3)), ((0, 2), (1,)), ((0,), (1, 2, 3)), ((0, 1), (2, 3), (4,))]


@pytest.mark.parametrize("polls", [False, True])
@pytest.mark.parametrize("seed", seeds(15, 60))
def test_any_interleaving_over_hosts(lanes, seed, polls):
    chance = random.Random(seed)
    teams = chance.choice(TEAMS)
    size = sum(map(len, teams))
    world = lanes.World(size, lanes.Chance(seed), polls=polls, teams=teams)
    users = lanes.Users(
        world, lanes.random_calls(chance, size, 8, more=["reduce", "reduce_scatter"])
    )
    users.run()
    users.check()


def test_what_a_cancelled_rank_overwrites_does_not_cross(lanes):
    """Rank 3 reads of rank 2 what that one wrote for the next operation, and must notice before it
    sends: rank 1 could not."""
    world = lanes.World(4, lanes.Path([]), teams=((0, 1), (2, 3)))
    calls = [lanes.Call(number, "reduce_scatter", 9000) for number in range(2)]

    def deliver(*pairs: tuple[int, int]) -> None:
        for pair in pairs:
            while world.wires[pair]:
                world.do(("wire", *pair))

    for rank in (0, 1, 3):
        calls[0].start(world.contexts[rank])
    deliver((0, 1), (1, 0), (0, 3), (1, 3))
    calls[0].start(world.contexts[2])
    calls[0].cancel(2)
    calls[1].start(world.contexts[2])
    world.do(("wire", 2, 3))  # rank 3 hears that it can go on, not yet that rank 2 gave up
    deliver((3, 1), (0, 1), (1, 0))
    assert not calls[0].works[1].done()
    for rank in (0, 1, 3):
        calls[1].start(world.contexts[rank])
    world.settle()
    for rank in (0, 1, 3):
        assert isinstance(calls[0].works[rank].exception(), CollectiveAbortedError)
    for rank in world.ranks:
        assert calls[1].is_right(rank, 4)


@pytest.mark.parametrize("polls", [False, True])
@pytest.mark.parametrize("canceller", [None, 0, 1])
def test_every_interleaving_of_one_operation_and_the_next(lanes, canceller, polls):
    def make(path):
        calls = [lanes.Call(0, "express", 2, canceller), lanes.Call(1, "express", 2)]
        return lanes.Users(lanes.World(2, path, polls=polls), calls)

    assert lanes.every_path(make) >= 20


@pytest.mark.parametrize("kinds", [("list", "bar"), ("bar", "list")])
def test_every_interleaving_with_two_phases(lanes, kinds):
    def make(path):
        calls = [lanes.Call(number, kind, 2) for number, kind in enumerate(kinds)]
        return lanes.Users(lanes.World(2, path), calls)

    assert lanes.every_path(make) >= 20


def test_both_cancel(lanes):
    def make(path):
        calls = [lanes.Call(0, "express", 2, 0), lanes.Call(1, "express", 2, 1)]
        return lanes.Users(lanes.World(2, path), calls)

    assert lanes.every_path(make) >= 20


@pytest.mark.parametrize("kind", ["express", "all_reduce", "bar"])
@pytest.mark.parametrize("first", [0, 1, 3, 6])
def test_numbers_before_the_first_go_over_links(lanes, first, kind):
    world = lanes.World(2, lanes.Chance(first), first=first)
    users = lanes.Users(world, [lanes.Call(number, kind, 3) for number in range(6)])
    for number in range(6):
        users.do(("call", 0))
        assert (world.contexts[0].lane.board.own[0] > 0) == (number >= first)
    users.run()
    users.check()
    for context in world.contexts:
        assert context.lane.board.own[0] >> 24 == (6 if first < 6 else 0)


# -- calls that differ ----------------------------------------------------------------------------


@pytest.mark.parametrize("seed", seeds(10, 40))
def test_calls_that_differ_fail_everywhere_and_the_next_ones_work(lanes, seed):
    chance = random.Random(f"differ {seed}")
    size = chance.choice([2, 3])
    world = lanes.World(size, lanes.Chance(seed), polls=chance.random() < 0.5)
    before = lanes.Users(
        world, [lanes.Call(number, "express", 3) for number in range(chance.randrange(4))]
    )
    before.run()
    before.check()
    odd = chance.randrange(size)
    kinds = chance.sample([("express", 3), ("express", 4), ("bar", 0), ("max", 3), ("list", 3)], 2)
    works = []
    for rank in chance.sample(range(size), size):
        kind, length = kinds[rank == odd]
        call = lanes.Call(7, kind, length)
        call.start(world.contexts[rank])
        works.append(call.works[rank])
        for _ in range(chance.randrange(5)):
            if events := world.events():
                world.do(world.chooser.pick(events))
    world.settle()
    for work in works:
        error = work.exception()
        assert isinstance(error, MismatchError), error
        assert odd in error.calls
        assert len(set(error.calls.values())) == 2
    after = lanes.Users(world, [lanes.Call(number, "express", 3) for number in range(4)])
    after.run()
    after.check()


@pytest.mark.parametrize("between", [1, 2, 3])
def test_no_false_mismatch_with_what_a_rank_called_before_it_passed_over(lanes, between):
    """Rank 0 gives an operation up before its turn: its digest is that of two operations before."""
    world = lanes.World(3, lanes.Chance(between))
    earlier = lanes.Users(world, [lanes.Call(number, "bar", 0) for number in range(between)])
    earlier.run()
    calls = [lanes.Call(0, "express", 3), lanes.Call(1, "max", 5, 0), lanes.Call(2, "express", 3)]
    for call in calls:
        call.start(world.contexts[0])
    calls[1].cancel(0)
    for rank in (1, 2):
        for call in calls:
            call.start(world.contexts[rank])
    world.settle()
    for rank in range(3):
        assert calls[0].is_right(rank, 3)
        assert calls[2].is_right(rank, 3)
    for rank in (1, 2):
        assert isinstance(calls[1].works[rank].exception(), CollectiveAbortedError)


def test_a_phase_of_calls_that_differ_does_not_end_however_often_it_is_asked(lanes):
    """A rank that waits for nobody finds out at the end, and is asked again when it is woken."""
    world = lanes.World(2, lanes.Path([]))
    first, second = (context.lane for context in world.contexts)
    for lane, call in ((first, b"barrier()"), (second, b"all_gather()")):
        assert lane.try_enter(0, 0, digest_of(call), call, 0)
        lane.publish()
    for lane in (first, second, first, second):
        assert not lane.end(0)
