"""Ballots by themselves: when they are decided, and who hears what of them."""

from __future__ import annotations

from aiodist.membership.ballots import Answer, Ballots
from aiodist.membership.seats import Seats
from aiodist.wire.messages import Failed, MemberInfo
from aiodist.wire.recovery import MAX_BALLOTS, BallotResult, Cause, Purpose, Void, Vote

KEY = (b"context!", 0)
YES = BallotResult(True, (), 1)


def seats(*ids: str) -> Seats[MemberInfo]:
    return Seats(
        {
            10 + rank: MemberInfo(rank, one, "", 1, "", {}, 0.0, "", ())
            for rank, one in enumerate(ids)
        }
    )


MEMBERS = seats("a", "b", "c")
NOBODY: Seats[MemberInfo] = Seats()


def vote(*members: str, flag: bool = True, purpose: Purpose = Purpose.AGREE) -> Vote:
    return Vote(*KEY, purpose, flag, members)


def decided(ballots: Ballots, absent: Seats[MemberInfo] = NOBODY) -> list[bool]:
    return [one.flag for one in ballots.decided(MEMBERS, absent)]


def test_it_is_decided_by_the_last_vote_and_is_the_and_of_all() -> None:
    ballots = Ballots()
    for conn, flag in ((10, True), (11, False)):
        assert ballots.cast(MEMBERS, conn, 1, vote(flag=flag)) == []
        assert decided(ballots) == []
    ballots.cast(MEMBERS, 12, 1, vote())
    assert decided(ballots) == [False]


def test_of_some_only_these_are_waited_for() -> None:
    ballots = Ballots()
    ballots.cast(MEMBERS, 12, 1, vote("c", "a"))
    assert decided(ballots) == []
    assert ballots.missing(MEMBERS, KEY) == [10]
    ballots.cast(MEMBERS, 10, 1, vote("c", "a"))
    assert decided(ballots) == [True]


def test_who_may_come_back_is_waited_for() -> None:
    ballots = Ballots()
    for conn in MEMBERS:
        ballots.cast(MEMBERS, conn, 1, vote("a", "b", "c", "d"))
    absent = Seats({3: MemberInfo(3, "d", "", 1, "", {}, 0.0, "", ())})
    assert decided(ballots, absent) == []
    assert decided(ballots) == [True]


def test_who_votes_again_hears_what_came_of_it() -> None:
    ballots = Ballots()
    for conn in MEMBERS:
        ballots.cast(MEMBERS, conn, conn, vote())
    [ballot] = ballots.decided(MEMBERS, NOBODY)
    told = ballots.close(ballot, YES)
    assert told == [Answer(conn, conn, YES) for conn in MEMBERS]
    assert ballots.cast(MEMBERS, 11, 99, vote()) == [Answer(11, 99, YES)]
    [other] = ballots.cast(MEMBERS, 11, 100, vote("a", "b"))  # it was decided among others
    assert isinstance(other.reply, Void)
    assert other.reply.cause is Cause.MISMATCH


def test_what_a_member_has_heard_is_heard_by_all() -> None:
    ballots = Ballots()
    ballots.cast(MEMBERS, 10, 1, vote())
    assert ballots.learn(KEY, YES) == [Answer(10, 1, YES)]
    assert ballots.cast(MEMBERS, 11, 2, vote()) == [Answer(11, 2, YES)]


def test_votes_on_different_things_are_void_for_all() -> None:
    ballots = Ballots()
    ballots.cast(MEMBERS, 10, 1, vote())
    told = ballots.cast(MEMBERS, 11, 2, vote(purpose=Purpose.SHRINK))
    assert [one.conn for one in told] == [10, 11]
    assert isinstance(told[0].reply, Void)
    assert told[0].reply.details == {"a": "agree()", "b": "shrink()"}


def test_a_refusal_makes_it_void_for_all_also_as_the_last_vote() -> None:
    ballots = Ballots()
    refusal = Vote(*KEY, Purpose.RENDEZVOUS, refusal="min_size is wrong")
    void = Void(Cause.CANCELLED, "min_size is wrong", "c")
    sized = Vote(*KEY, Purpose.RENDEZVOUS, least=2)
    for conn in (10, 11):
        assert ballots.cast(MEMBERS, conn, 1, sized) == []
    told = ballots.cast(MEMBERS, 12, 1, refusal)
    assert told == [Answer(conn, 1, void) for conn in MEMBERS]
    assert ballots.cast(MEMBERS, 10, 2, sized) == [Answer(10, 2, void)]


def test_a_refusal_of_another_call_says_what_each_has_called() -> None:
    ballots = Ballots()
    ballots.cast(MEMBERS, 10, 1, vote())
    refusal = Vote(*KEY, Purpose.SHRINK, refusal="timeout is wrong")
    told = ballots.cast(MEMBERS, 11, 2, refusal)
    assert isinstance(told[0].reply, Void)
    assert told[0].reply.details == {"a": "agree()", "b": "shrink()"}


def test_who_gives_up_says_who_was_missing() -> None:
    ballots = Ballots()
    ballots.cast(MEMBERS, 10, 1, vote())
    assert ballots.give_up(MEMBERS, NOBODY, 11, KEY, Cause.TIMEOUT, "late") == []
    seen = {"b": "computing"}
    [told] = ballots.give_up(MEMBERS, NOBODY, 10, KEY, Cause.TIMEOUT, "late", seen)
    assert told.reply == Void(Cause.TIMEOUT, "late", "a", {"b": "computing", "c": ""})


def test_a_vote_goes_with_its_connection() -> None:
    ballots = Ballots()
    ballots.cast(MEMBERS, 10, 1, vote("a", "b"))
    ballots.cast(MEMBERS, 11, 1, vote("a", "b"))
    assert decided(ballots) == [True]
    ballots.gone(10)
    assert decided(ballots) == []
    assert ballots.missing(MEMBERS, KEY) == [10]


def test_nobody_has_too_many_under_way() -> None:
    ballots = Ballots()
    for number in range(MAX_BALLOTS):
        assert not ballots.cast(MEMBERS, 10, 1, Vote(b"context!", number, Purpose.AGREE))
    [refused] = ballots.cast(MEMBERS, 10, 1, Vote(b"context!", MAX_BALLOTS, Purpose.AGREE))
    assert isinstance(refused.reply, Failed)
    assert len(ballots.of(10)) == MAX_BALLOTS
    # A member may still change what it has said.
    assert not ballots.cast(MEMBERS, 10, 2, Vote(b"context!", 0, Purpose.AGREE, False))
