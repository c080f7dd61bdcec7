"""How much a publisher gives of a version, and to whom more than that."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from aiodist.channels.ration import SIZES, Ration

SHAPE = (5, 6)
BOXES = st.tuples(
    *[st.lists(st.integers(0, n), min_size=2, max_size=2).map(sorted).map(tuple) for n in SHAPE]
)


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def spends(ration, nbytes):
    """Whether it may be given so much; it is, if it may."""
    if not ration.has(nbytes):
        return False
    with ration.giving(nbytes, lambda: nbytes):
        return True


@given(st.lists(st.tuples(st.sampled_from("ab"), BOXES), max_size=6))
def test_what_is_wanted_counts_once_whoever_wants_it(wanted):
    size = 4 * int(np.prod(SHAPE))
    ration = Ration(2 * size, Clock(), 2.0)
    masks = {key: np.zeros(SHAPE, bool) for key in "ab"}
    for key, box in wanted:
        ration.want([(key, box, 4)])
        masks[key][tuple(itertools.starmap(slice, box))] = True
    union = 4 * sum(int(mask.sum()) for mask in masks.values())
    assert spends(ration, SIZES * union)
    assert not spends(ration, 1)
    ration.want()  # somebody wants all of it
    assert spends(ration, SIZES * (2 * size - union))
    assert not spends(ration, 1)


def test_what_was_not_sent_in_the_end_is_not_counted():
    ration = Ration(100, Clock(), 2.0)
    ration.want()
    with ration.giving(100, lambda: 30):
        assert ration.has(100)
        assert not ration.has(101)
    assert ration.has(170)


def test_who_insists_gets_more_one_at_a_time():
    """When it has been refused for long enough, and nobody was given any of it meanwhile."""
    clock = Clock()
    ration = Ration(100, clock, 2.0)
    ration.want()
    assert spends(ration, 200)
    assert not ration.insists("a")
    clock.now += 1.9
    assert not ration.insists("a")
    assert not ration.insists("b")
    clock.now += 0.2
    assert ration.insists("a")
    assert not ration.insists("b")
    with ration.giving(50, lambda: 50):
        clock.now += 10
        assert not ration.insists("b")
    assert not ration.insists("b")
    clock.now += 2
    assert ration.insists("b")
