"""What ranks of random programs contribute."""

from __future__ import annotations

import itertools

from aiodist.testing.steps import data


def test_no_two_contributions_look_alike() -> None:
    """A result made of another epoch, rank or step differs in its first element."""
    firsts = [
        int(data(*where, 3)[0]) for where in itertools.product((1, 2, 3), range(7), range(60))
    ]
    assert len(set(firsts)) == len(firsts)


def test_elements_differ_from_their_neighbours() -> None:
    x = data(1, 0, 5, 40)
    assert all(a != b for a, b in itertools.pairwise(x))
