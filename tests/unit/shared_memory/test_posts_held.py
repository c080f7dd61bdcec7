"""Large posts that a call waits for: they stay where they lie, as long as nothing behind them is to
be read."""

from __future__ import annotations

import math

import numpy as np
import pytest

from aiodist.collectives import values


def held(world, rank):
    """By other rank: whether what it has posted for the one call that waits is held in its ring."""
    context = world.contexts[rank]
    (call,) = context.calls.waiting.by_key.values()
    rings = {each.rank: each.ring for each in context.post_express._posts.readers}
    rings[rank] = context.post_express._posts.ring
    return {
        src: type(value) is memoryview and value.obj is rings[src].obj
        for src, value in enumerate(call.values)
        if value is not None
    }


def nothing_is_kept(world):
    for context in world.contexts:
        assert not context.calls.waiting.by_key
        assert not context.calls.arrivals.early
        assert not context.post_express._bytes
        assert context.post_express._in_ring is None
        assert not any(reader.held for reader in context.post_express._posts.readers)


class Gathered:
    """An all_gather of 16,000 bytes of three ranks, which is posted."""

    def __init__(self, number, tag):
        self.number = number
        self.tag = tag
        self.works = {}

    def start(self, context):
        x = np.full(2000, 10.0 * self.number + context.rank)
        args = (x, None)
        work = context.post_express.start("all_gather", values.all_gather, args, math.inf, self.tag)
        if work is None:
            call = values.all_gather(context, *args)
            work = context.post_express.begin(call, args, math.inf, self.tag)
        self.works[context.rank] = work

    def is_right(self, rank):
        due = [10.0 * self.number + src for src in range(3)]
        return [{*each} for each in self.works[rank].result()] == [{each} for each in due]


@pytest.fixture
def three(lanes):
    """Three ranks to whom such calls are known."""
    world = lanes.World(3, lanes.Chance(0), polls=True)
    for context in world.contexts:
        context.may_post = True
    for number in range(3):
        known = Gathered(number, "a")
        for context in world.contexts:
            known.start(context)
        world.settle()
        assert all(map(known.is_right, range(3)))
    return world


def test_large_values_of_a_call_that_waits_stay_where_they_lie(three):
    one, two, other = three.contexts
    waits, later = Gathered(3, "a"), Gathered(4, "b")
    waits.start(two)
    waits.start(one)
    assert held(three, 0) == {0: True, 1: True}
    # Somebody posts more, and so does this rank: then they are kept elsewhere.
    later.start(two)
    three.settle()
    assert held(three, 0) == {0: True, 1: False}
    later.start(one)
    values = one.calls.waiting.by_key["a", 3].values
    assert [type(value) for value in values] == [bytes, bytes, type(None)]
    waits.start(other)
    later.start(other)
    three.settle()
    assert all(map(waits.is_right, range(3)))
    assert all(map(later.is_right, range(3)))
    nothing_is_kept(three)


def test_a_call_that_is_cancelled_holds_nothing(three):
    one, two, other = three.contexts
    cancelled, again = Gathered(3, "a"), Gathered(4, "b")
    cancelled.start(two)
    cancelled.start(one)
    assert held(three, 0) == {0: True, 1: True}
    assert cancelled.works[0].cancel()
    assert not any(reader.held for reader in one.post_express._posts.readers)
    three.settle()
    cancelled.start(other)
    three.settle()
    for context in three.contexts:
        again.start(context)
    three.settle()
    assert all(map(again.is_right, range(3)))
    nothing_is_kept(three)


def test_what_is_for_a_later_call_is_left_to_it(three):
    """A rank that has to be woken finds posts of the next call, too: they stay where they are."""
    one, two, other = three.contexts
    waits, last = Gathered(3, "a"), Gathered(4, "a")
    waits.start(two)
    waits.start(one)
    waits.start(other)
    two.post_express.kicked()
    assert waits.works[1].done()
    last.start(two)
    last.start(other)
    assert not waits.works[0].done()
    one.post_express.kicked()
    assert waits.is_right(0)
    assert not one.calls.arrivals.early
    last.start(one)
    assert last.works[0].done()
    three.settle()
    assert all(map(last.is_right, range(3)))
    nothing_is_kept(three)
