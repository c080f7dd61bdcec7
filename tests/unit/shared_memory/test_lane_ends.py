"""Lanes of several ranks: one dies, all close; and what a lane does by itself."""

from __future__ import annotations

import random

import pytest

from aiodist.errors import GroupClosedError, PeerLostError
from aiodist.shared_memory.turns import SkippedCall


@pytest.mark.parametrize("seed", range(40))
def test_a_rank_that_dies(lanes, seed):
    """What is under way completes with the right values or fails; what is called later fails."""
    chance = random.Random(f"dies {seed}")
    size = chance.choice([2, 3, 4])
    world = lanes.World(size, lanes.Chance(seed), polls=chance.random() < 0.5)
    calls = lanes.random_calls(chance, size, 10)
    for call in calls:
        call.canceller = None
    users = lanes.Users(world, calls)
    dead = chance.randrange(size)
    users.go(chance.randrange(60))
    world.kill(dead)
    users.go(chance.randrange(10))
    world.tell_of(dead)
    users.run()
    users.check_without(dead)
    alive = [rank for rank in range(size) if rank != dead]
    last = lanes.Call(99, "express", 3)
    for rank in alive:
        last.start(world.contexts[rank])
    world.settle()
    for rank in alive:
        assert isinstance(last.works[rank].exception(), PeerLostError)


@pytest.mark.parametrize("kind", ["express", "all_reduce", "bar", "list"])
def test_what_is_called_after_a_rank_was_lost_fails_at_once(lanes, kind):
    world = lanes.World(3, lanes.Chance(kind))
    before = lanes.Users(world, [lanes.Call(number, kind, 3) for number in range(3)])
    before.run()
    before.check()
    world.kill(2)
    world.tell_of(2)
    for number in range(3):
        call = lanes.Call(number, kind, 3)
        for rank in (0, 1):
            call.start(world.contexts[rank])
            error = call.works[rank].exception()
            assert isinstance(error, PeerLostError)
            assert error.ranks == (2,)
            assert error.op == call.works[rank].op


def test_what_a_dead_rank_left_is_taken(lanes):
    world = lanes.World(2, lanes.Chance(0))
    call = lanes.Call(0, "express", 3)
    call.start(world.contexts[1])
    world.kill(1)
    world.tell_of(1)
    call.start(world.contexts[0])
    assert call.is_right(0, 2)


def test_closing_with_operations_under_way_and_queued(lanes):
    world = lanes.World(2, lanes.Chance(0))
    done = lanes.Users(world, [lanes.Call(number, "express", 3) for number in range(3)])
    done.run()
    calls = [lanes.Call(number, "express", 3) for number in range(3)]
    for call in calls:
        call.start(world.contexts[0])
    calls[1].cancel(0)
    for context in world.contexts:
        context.close(GroupClosedError("over"))
    world.settle()
    for call in (calls[0], calls[2]):
        assert isinstance(call.works[0].exception(), GroupClosedError)
    # Nobody looks at the memory any more: it can be closed.
    for memory in world.memories:
        mapping = memory.obj
        memory.release()
        mapping.close()


# -- the lane alone -------------------------------------------------------------------------------


def test_skipped_calls_keep_the_order_of_numbers(lanes):
    world = lanes.World(2, lanes.Chance(0))
    lane = world.contexts[0].lane
    assert lane is not None
    stamps = []
    lane.board.reach = lambda stamp: stamps.append(stamp >> 24) or []
    for seq in range(2):
        lane.turns.add(SkippedCall(lane.pass_over, seq))
    # The first passes at once; the second has to wait for rank 1 to be as far.
    world.settle()
    assert stamps == [1]
    assert not lane.idle
