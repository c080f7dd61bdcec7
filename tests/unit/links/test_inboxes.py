"""Frames for groups that are not made yet: kept in their order, and not for ever."""

from __future__ import annotations

from typing import Any, cast

from aiodist.links.inboxes import MOST_GROUPS, Inboxes, Stray
from aiodist.links.peer import MAX_EARLY_BYTES, STRAY_COST


def stray(rank: int, what: int = 0) -> Stray:
    return Stray(cast(Any, None), rank, [what], memoryview(b""), STRAY_COST)


def test_they_are_given_out_once_in_the_order_in_which_they_came() -> None:
    strays = Inboxes()
    first, second, other = stray(1, 1), stray(2, 2), stray(1, 3)
    for context, one in ((b"a", first), (b"b", other), (b"a", second)):
        assert strays.keep(context, one) == []
    assert strays.take(b"a") == [first, second]
    assert strays.take(b"a") == []
    assert strays.take(b"b") == [other]


def test_of_too_many_groups_the_one_that_has_waited_longest_is_given_up() -> None:
    strays = Inboxes()
    oldest = [stray(1), stray(2)]
    for one in oldest:
        strays.keep(b"oldest", one)
    for number in range(MOST_GROUPS - 1):
        assert strays.keep(b"%d" % number, stray(1)) == []
    strays.keep(b"0", stray(1))  # of one that is there: nobody is dropped
    assert strays.keep(b"one more", stray(1)) == oldest
    assert strays.take(b"oldest") == []
    assert len(strays.take(b"0")) == 2


def test_that_is_before_a_peer_has_sent_too_much() -> None:
    assert MOST_GROUPS * 4 * (STRAY_COST + 512) <= MAX_EARLY_BYTES


def test_nothing_is_left_of_who_is_forgotten() -> None:
    strays = Inboxes()
    mine = stray(2)
    strays.keep(b"both", stray(1))
    strays.keep(b"both", mine)
    strays.keep(b"theirs", stray(1))
    strays.forget(1)
    assert strays.take(b"both") == [mine]
    assert not strays._strays
