"""What a member has been told, and says to a coordinator that comes back."""

from __future__ import annotations

import pytest

from aiodist.control.dial import ForeignServiceError
from aiodist.control.standing import Standing, check_successor
from aiodist.errors import ProtocolError
from aiodist.wire.limits import MAX_MEMBERS
from aiodist.wire.messages import EpochView, JoinRequest, MemberInfo, Welcome
from aiodist.wire.recovery import BallotResult, Cause, Purpose, Void, Vote, Waiting
from aiodist.wire.returning import MAX_HEARD

ASK = JoinRequest(group="g", id="me", size=3)


def view(*ids: str, epoch: int = 1) -> EpochView:
    members = [
        MemberInfo(rank, one, "host", 1, one, {}, 0.0, "", ()) for rank, one in enumerate(ids)
    ]
    return EpochView("g", epoch, tuple(members))


def vote(number: int) -> Vote:
    return Vote(b"context!", number, Purpose.SHRINK)


def verdict(*members: str) -> BallotResult:
    return BallotResult(True, members, 2)


@pytest.fixture
def standing() -> Standing:
    return Standing(ASK, view("a", "me", "c"))


def test_its_rank_is_that_of_the_newest_view(standing: Standing) -> None:
    assert standing.rank == 1
    standing.take(view("me", "c", epoch=2))
    assert (standing.rank, standing.view.epoch) == (0, 2)


def test_a_view_of_others_is_refused() -> None:
    with pytest.raises(ProtocolError, match="a view without this member"):
        Standing(ASK, view("a", "b"))


def test_a_loss_is_news_once(standing: Standing) -> None:
    assert standing.news(1, (2, 0), lost=True) == (0, 2)
    assert standing.news(1, (2,), lost=True) == ()
    assert standing.news(1, (2,), lost=False) == ()
    assert standing.claim(with_view=False).lost == (0, 2)


def test_who_has_left_is_told_apart_from_who_is_lost(standing: Standing) -> None:
    assert standing.news(1, (2,), lost=False) == (2,)
    assert standing.news(1, (0, 2), lost=True) == (0,)
    claim = standing.claim(with_view=False)
    assert (claim.lost, claim.left) == ((0,), (2,))


def test_the_news_of_another_epoch_are_not_those_of_this(standing: Standing) -> None:
    assert standing.news(2, (2, 2), lost=True) == (2, 2)
    assert standing.claim(with_view=False).lost == ()


def test_a_new_view_begins_anew(standing: Standing) -> None:
    standing.news(1, (2,), lost=True)
    standing.news(1, (0,), lost=False)
    standing.take(view("me", "x", "y", epoch=2))
    claim = standing.claim(with_view=False)
    assert (claim.rank, claim.epoch, claim.lost, claim.left) == (0, 2, (), ())
    assert claim.digest == standing.view.digest


def test_the_view_is_said_only_where_it_is_wanted(standing: Standing) -> None:
    assert standing.claim(with_view=False).view is None
    assert standing.claim(with_view=True).view is standing.view
    assert standing.claim(with_view=True).ask is ASK


def test_outcomes_of_votes_are_told_the_oldest_first(standing: Standing) -> None:
    void = Void(Cause.TIMEOUT, "why", "a", {"c": ""})
    standing.hears(vote(1), verdict("a"))
    standing.hears(vote(2), void)
    standing.hears(None, verdict())
    standing.hears(vote(3), Waiting(1))
    heard = standing.claim(with_view=False).heard
    assert [(one.number, one.outcome) for one in heard] == [(1, verdict("a")), (2, void)]


def test_no_more_outcomes_are_remembered_than_may_be_told(standing: Standing) -> None:
    for number in range(MAX_HEARD + 2):
        standing.hears(vote(number), verdict())
    heard = standing.claim(with_view=False).heard
    assert [one.number for one in heard] == list(range(2, MAX_HEARD + 2))


@pytest.mark.parametrize("void", [False, True])
def test_the_newest_outcomes_are_told_of_as_many_ids_as_there_can_be(
    standing: Standing, void: bool
) -> None:
    ids = [f"{one}" for one in range(MAX_MEMBERS - 1)]
    for number, some in enumerate([["old"], ["one"], ids]):
        outcome = Void(Cause.TIMEOUT, "", "a", dict.fromkeys(some, "")) if void else verdict(*some)
        standing.hears(vote(number), outcome)
    assert [one.number for one in standing.claim(with_view=False).heard] == [1, 2]


def welcome(coordinator: str, incarnation: int) -> Welcome:
    return Welcome("host", b"", coordinator, incarnation, True)


@pytest.mark.parametrize("incarnation", [3, 4])
def test_the_same_coordinator_has_what_was_written_down(incarnation: int) -> None:
    assert check_successor("tcp://a:1", welcome("x", 3), welcome("x", incarnation))


def test_one_that_starts_from_nothing_has_not() -> None:
    assert not check_successor("tcp://a:1", welcome("x", 3), welcome("y", 1))


@pytest.mark.parametrize(
    ("found", "text"),
    [(("x", 2), "a stale one, its start 2 of 3"), (("y", 2), "a foreign one, with a state file")],
)
def test_one_that_cannot_have_taken_its_place(found: tuple[str, int], text: str) -> None:
    with pytest.raises(ForeignServiceError, match=text):
        check_successor("tcp://a:1", welcome("x", 3), welcome(*found))
