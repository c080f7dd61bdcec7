"""Who has which seat: found by connection, by id and by rank."""

from __future__ import annotations

from typing import NamedTuple

from aiodist.membership.seats import Seats


class One(NamedTuple):
    id: str
    rank: int | None


def test_each_is_found_by_id_and_by_rank() -> None:
    seats = Seats({1: One("a", 5), 2: One("b", None)})
    assert (seats.of_id("a"), seats.of_id("b"), seats.of_id("c")) == (1, 2, None)
    assert (seats.of_rank(5), seats.of_rank(0)) == (1, None)
    assert list(seats) == [1, 2]
    assert list(seats.items()) == [(1, One("a", 5)), (2, One("b", None))]


def test_who_is_gone_is_not_found_any_more() -> None:
    seats = Seats({1: One("a", 0), 2: One("b", None)})
    assert seats.pop(1) == One("a", 0)
    del seats[2]
    assert (seats.of_id("a"), seats.of_rank(0), seats.of_id("b")) == (None, None, None)
    assert not seats
    assert 1 not in seats


def test_a_seat_that_is_taken_anew_is_the_newcomers_alone() -> None:
    seats = Seats({1: One("a", 0)})
    seats[1] = One("b", 1)
    assert (seats.of_id("a"), seats.of_rank(0)) == (None, None)
    assert (seats.of_id("b"), seats.of_rank(1)) == (1, 1)
    assert len(seats) == 1
