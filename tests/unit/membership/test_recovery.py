"""Ballots, the next epoch and broken links, as the coordinator sees them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from aiodist.membership import ballots
from aiodist.wire.activity import Activity, Inquire
from aiodist.wire.codec import encode_message
from aiodist.wire.limits import MAX_TEXT
from aiodist.wire.messages import (
    EpochView,
    Evicted,
    Failed,
    Failure,
    Leave,
    MemberLost,
    StoreCancel,
    Withdraw,
    Withdrawn,
)
from aiodist.wire.recovery import (
    MAX_BALLOTS,
    BallotResult,
    Cause,
    GiveUpVote,
    Purpose,
    Unreachable,
    Void,
    Vote,
    Waiting,
    WatchWaiting,
)

CONTEXT = b"context!"


def vote(purpose: Purpose = Purpose.SHRINK, number: int = 0, **fields: Any) -> Vote:
    return Vote(CONTEXT, number, purpose, **fields)


@pytest.fixture
def world(world: Any) -> Any:
    """Votes of CONTEXT without voters are of the first view of the group."""
    say, first = world.say, [b""]

    def say_in_context(conn: int, message: Any, request: int = 1) -> Any:
        if isinstance(message, (Vote, GiveUpVote)) and not getattr(message, "members", ()):
            group = world.machine._groups.get(("g", ""))
            if not first[0] and group is not None and group.view is not None:
                first[0] = group.view.context
            message = replace(message, context=first[0] or CONTEXT)
        return say(conn, message, request)

    world.say = say_in_context
    return world


def form(world: Any, size: int = 3, **fields: Any) -> list[int]:
    """A group of connections 1 to `size`, which are ranks 0 to size - 1."""
    for conn in range(1, size + 1):
        world.join(conn, rank=conn - 1, size=size, **{"lease": 1000.0, **fields})
    world.mail.clear()
    return list(range(1, size + 1))


def test_shrink_renumbers_the_survivors(world: Any) -> None:
    form(world, 4)
    world.cut(2)
    world.mail.clear()
    assert world.say(4, vote()) == []
    assert world.say(1, vote()) == []
    view = world.say(3, vote())
    assert isinstance(view, EpochView)
    assert (view.epoch, [(member.id, member.rank) for member in view.members]) == (
        2, [("id-1", 0), ("id-3", 1), ("id-4", 2)],
    )  # fmt: skip
    assert world.read(1) == world.read(4) == view
    found = world.group()
    assert (found["epoch"], found["lost"], [one["rank"] for one in found["members"]]) == (
        2, {}, [0, 1, 2],
    )  # fmt: skip


def test_a_ballot_ends_when_the_last_that_it_waits_for_is_gone(world: Any) -> None:
    form(world)
    for conn in (1, 2):
        world.say(conn, vote(Purpose.AGREE, flag=conn == 1))
    world.cut(3)
    lost, verdict = world.read(1)
    assert isinstance(lost, MemberLost)
    assert verdict == BallotResult(False, (), 1)
    assert world.read(2)[1] == verdict


def test_a_voter_that_is_gone_has_no_say(world: Any) -> None:
    form(world)
    world.say(3, vote(Purpose.AGREE, flag=False))
    world.say(3, Leave())
    world.mail.clear()
    world.say(1, vote(Purpose.AGREE))
    assert world.say(2, vote(Purpose.AGREE)) == BallotResult(True, (), 1)


def test_what_is_void_stays_void(world: Any) -> None:
    form(world)
    world.say(1, vote())
    world.say(2, vote())
    assert world.say(1, GiveUpVote(CONTEXT, 0, Cause.TIMEOUT, "too late")) == []
    assert world.read(3) == Inquire()  # it is asked what it is doing instead
    world.say(3, Activity(places=("t.py:9 in f",), last="barrier #0 done"), request=0)
    details = {"id-3": "in no operation at t.py:9 in f (last: barrier #0 done)"}
    answer = world.read(1)
    assert answer == Void(Cause.TIMEOUT, "too late", "id-1", details)
    assert world.read(2) == answer
    assert world.say(3, vote()) == answer
    assert world.say(3, vote()) == answer


def test_to_give_up_a_ballot_that_there_is_not(world: Any) -> None:
    form(world)
    world.say(1, vote())
    assert world.say(1, GiveUpVote(CONTEXT, 7, Cause.TIMEOUT, "too late")) == []
    assert world.mail == {}  # nobody is asked
    world.say(2, vote())
    assert isinstance(world.say(3, vote()), EpochView)


@pytest.mark.parametrize("leaves", [True, False])
def test_who_gives_up_and_is_gone_before_the_others_have_answered(world: Any, leaves: bool) -> None:
    form(world)
    for conn in (1, 2):
        world.say(conn, vote(Purpose.AGREE))
    world.say(1, GiveUpVote(CONTEXT, 0, Cause.TIMEOUT, "too late"))
    assert world.read(3) == Inquire()
    if leaves:
        world.say(1, Leave())
    else:
        world.cut(1)
    world.mail.clear()
    world.say(3, Activity(), request=0)
    world.pass_time(10.0)
    assert world.mail == {}  # the ballot of the others goes on
    assert world.say(3, vote(Purpose.AGREE)) == BallotResult(True, (), 1)


def test_who_votes_while_it_is_asked_saves_the_ballot(world: Any) -> None:
    form(world)
    world.say(1, vote(Purpose.AGREE))
    world.say(2, vote(Purpose.AGREE))
    world.say(1, GiveUpVote(CONTEXT, 0, Cause.TIMEOUT, "too late"))
    world.read(3)
    verdict = world.say(3, vote(Purpose.AGREE))
    assert isinstance(verdict, BallotResult)
    assert world.read(1) == verdict
    world.pass_time(10.0)
    assert world.read(1) == []


def test_a_missing_voter_that_dies_while_it_is_asked_decides_the_ballot(world: Any) -> None:
    form(world)
    world.say(1, vote(Purpose.AGREE))
    world.say(2, vote(Purpose.AGREE))
    world.say(1, GiveUpVote(CONTEXT, 0, Cause.TIMEOUT, "too late"))
    world.cut(3)
    world.pass_time(0.0)
    assert [type(message) for message in world.read(1)] == [MemberLost, BallotResult]


def test_giving_up_what_is_not_under_way_does_nothing(world: Any) -> None:
    form(world)
    assert world.say(1, GiveUpVote(CONTEXT, 0, Cause.CANCELLED)) == []
    world.say(2, vote())
    assert world.say(1, GiveUpVote(CONTEXT, 0, Cause.CANCELLED)) == []
    world.say(2, GiveUpVote(CONTEXT, 0, Cause.CANCELLED))
    assert world.say(2, GiveUpVote(CONTEXT, 0, Cause.CANCELLED)) == []


def test_what_is_remembered_is_bounded(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ballots, "REMEMBERED", 2)
    form(world)
    for number in range(3):
        world.say(1, vote(Purpose.AGREE, number))
        world.say(1, GiveUpVote(CONTEXT, number, Cause.CANCELLED))
    assert isinstance(world.say(2, vote(Purpose.AGREE, 1)), Void)
    assert world.say(2, vote(Purpose.AGREE, 0)) == []  # this is another


def test_different_calls(world: Any) -> None:
    form(world)
    world.say(1, vote(Purpose.AGREE))
    void = world.say(2, vote(Purpose.RENDEZVOUS, least=2))
    assert isinstance(void, Void)
    assert (void.cause, void.details) == (
        Cause.MISMATCH, {"id-1": "agree()", "id-2": "rendezvous(min_size=2, max_size=None)"},
    )  # fmt: skip
    assert world.read(1) == world.say(3, vote()) == void


def test_voters_that_differ_in_who_they_are(world: Any) -> None:
    form(world)
    world.say(1, vote(Purpose.AGREE, members=("id-1", "id-2", "id-3")))
    void = world.say(2, vote(Purpose.AGREE, members=("id-1", "id-2")))
    assert (void.cause, void.by) == (Cause.MISMATCH, "id-2")
    assert world.read(1) == void


def test_the_only_voter_calls_something_else_over_another_connection(world: Any) -> None:
    form(world, 2)
    world.say(1, vote(Purpose.AGREE))
    world.say(1, vote(Purpose.SHRINK))
    assert len(world.say(2, vote(Purpose.SHRINK)).members) == 2


def test_votes_of_some_members(world: Any) -> None:
    form(world, 4)
    some = ("id-4", "id-2")
    world.say(2, vote(members=some))
    verdict = world.say(4, vote(members=some))
    assert verdict == BallotResult(True, some, 2)
    assert world.group()["epoch"] == 1  # that of the group; no number is used twice
    world.say(2, vote(Purpose.AGREE, 1, members=some))
    world.cut(4)
    assert world.read(2)[1] == BallotResult(True, (), 1)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (vote(members=("id-2",)), "not among the voters"),
        (vote(Purpose.RENDEZVOUS, members=("id-1",)), "of the whole group"),
    ],
)
def test_votes_that_make_no_sense(world: Any, wrong: Vote, text: str) -> None:
    form(world)
    failed = world.say(1, wrong)
    assert isinstance(failed, Failed)
    assert (failed.kind, text in failed.text) == (Failure.INVALID, True)


def test_a_ballot_that_some_have_decided_among_themselves_is_not_that_of_all(world: Any) -> None:
    form(world)
    root = world.machine._groups["g", ""].view.context
    forged = Vote(root, 0, Purpose.SHRINK, members=("id-3",))
    assert world.say(3, forged).members == ("id-3",)
    for conn in (1, 2):
        void = world.say(conn, vote())
        assert (void.cause, void.by) == (Cause.MISMATCH, f"id-{conn}")
    assert world.say(3, forged).members == ("id-3",)  # to those who decided it, it is


def test_votes_of_strangers_and_joiners(world: Any) -> None:
    world.join(1)
    for conn in (1, 9):
        failed = world.say(conn, vote())
        assert isinstance(failed, Failed)
        assert failed.kind is Failure.NOT_A_MEMBER


def test_the_number_of_votes_under_way_is_limited(world: Any) -> None:
    form(world)
    for number in range(MAX_BALLOTS):
        assert world.say(1, vote(Purpose.AGREE, number)) == []
    failed = world.say(1, vote(Purpose.AGREE, MAX_BALLOTS))
    assert isinstance(failed, Failed)
    assert "the limit" in failed.text


def test_votes_of_the_epoch_before_are_void(world: Any) -> None:
    form(world)
    world.say(1, vote(Purpose.AGREE, 7))
    for conn in (1, 2, 3):
        world.say(conn, vote())
    void, view = world.read(1)
    assert isinstance(void, Void)
    assert isinstance(view, EpochView)
    assert (void.cause, "epoch 1 is over" in void.text) == (Cause.CANCELLED, True)


def test_votes_of_some_members_outlive_the_epoch(world: Any) -> None:
    form(world)
    some = ("id-1", "id-2")
    world.say(1, vote(Purpose.AGREE, 7, members=some))
    for conn in (1, 2, 3):
        world.say(conn, vote())
    world.mail.clear()
    assert world.say(2, vote(Purpose.AGREE, 7, members=some)) == BallotResult(True, (), 2)


def test_who_votes_late_in_an_epoch_that_is_over(world: Any) -> None:
    form(world)
    for conn in (1, 2, 3):
        world.say(conn, vote())
    world.cut(1)
    world.mail.clear()
    view, lost = world.say(3, vote(number=1))
    assert isinstance(view, EpochView)
    assert (view.epoch, lost.epoch, lost.ranks) == (2, 2, (0,))
    void = world.say(3, vote(Purpose.AGREE, 2))
    assert isinstance(void, Void)
    assert (void.cause, "went on" in void.text) == (Cause.CANCELLED, True)


def test_two_ballots_that_one_loss_decides(world: Any) -> None:
    form(world)
    for conn in (1, 2):
        world.say(conn, vote(Purpose.SHRINK, 0))
        world.say(conn, vote(Purpose.AGREE, 1))
    world.cut(3)
    for conn in (1, 2):
        assert [type(one) for one in world.read(conn)] == [MemberLost, Void, EpochView]


def test_rendezvous_takes_in_who_waits(world: Any) -> None:
    form(world)
    world.cut(1)
    for conn in (11, 12):
        assert world.join(conn, size=3) == []
    world.mail.clear()
    world.say(2, vote(Purpose.RENDEZVOUS))
    view = world.say(3, vote(Purpose.RENDEZVOUS))
    assert [member.id for member in view.members] == ["id-2", "id-3", "id-11"]
    assert world.read(11) == view
    assert world.read(12) == []
    assert [one["id"] for one in world.group()["waiting"]] == ["id-12"]


def test_rendezvous_waits_for_the_fewest_and_then_for_the_window(world: Any) -> None:
    form(world, 2)
    meeting = vote(Purpose.RENDEZVOUS, least=3, most=5)
    world.say(1, meeting)
    assert world.say(2, meeting) == []
    world.cut(2)
    world.mail.clear()
    world.join(3, size=2, lease=1000.0)
    world.pass_time(100)
    assert world.read(1) == []
    world.join(4, size=2, lease=1000.0)
    world.pass_time(0)  # a fixed group has no window
    view = world.read(1)
    assert [member.id for member in view.members] == ["id-1", "id-3", "id-4"]


def test_a_survivor_dies_while_the_window_is_open(world: Any) -> None:
    elastic = {"min_size": 2, "max_size": 9, "join_window": 5.0, "lease": 1000.0}
    for conn in (1, 2):
        world.join(conn, **elastic)
    world.pass_time(5)
    for conn in (1, 2):
        world.say(conn, vote(Purpose.RENDEZVOUS, least=3))
    world.join(3, **elastic)
    world.cut(2)
    world.mail.clear()
    world.pass_time(10)
    assert world.read(1) == []
    world.join(4, **elastic)
    world.pass_time(5)
    assert len(world.read(1).members) == 3


def test_all_survivors_die_while_the_window_is_open(world: Any) -> None:
    """Who waits is of another group then, which is too small to form when that window is over."""
    elastic = {"min_size": 3, "max_size": 9, "join_window": 5.0, "lease": 1000.0}
    for conn in (1, 2, 3):
        world.join(conn, **elastic)
    world.pass_time(5)
    for conn in (1, 2, 3):
        world.say(conn, vote(Purpose.RENDEZVOUS, least=4))
    world.join(4, **elastic)
    for conn in (1, 2, 3):
        world.cut(conn)
    world.mail.clear()
    world.pass_time(10)
    assert world.read(4) == []
    assert world.group()["epoch"] is None
    for conn in (5, 6):
        world.join(conn, **elastic)
    world.pass_time(5)
    assert len(world.read(4).members) == 3


ELASTIC = {"min_size": 1, "max_size": 3, "join_window": 5.0, "lease": 1000.0}


def one_waits_for_one(world: Any) -> None:
    """The only member votes for a rendezvous of two, and another one joins."""
    world.join(1, **ELASTIC)
    world.pass_time(5)
    world.mail.clear()
    world.say(1, vote(Purpose.RENDEZVOUS, least=2))
    world.join(2, **ELASTIC)


def test_rendezvous_waits_no_longer_than_for_the_most(world: Any) -> None:
    one_waits_for_one(world)
    world.pass_time(4.9)
    assert world.read(1) == []
    world.join(3, **ELASTIC)
    assert len(world.read(1).members) == 3


def test_one_size_that_is_given_overrules_the_other_one_of_the_group(world: Any) -> None:
    form(world, 2)
    world.cut(2)
    world.mail.clear()
    world.say(1, vote(Purpose.RENDEZVOUS, least=4))
    for conn in (3, 4):
        world.join(conn, size=2, lease=1000.0)
    world.pass_time(10)
    assert world.read(1) == []
    world.join(5, size=2, lease=1000.0)
    assert len(world.read(1).members) == 4


def test_no_more_are_awaited_than_are_taken(world: Any) -> None:
    form(world, 3)
    world.cut(3)
    world.mail.clear()
    for conn in (1, 2):
        world.say(conn, vote(Purpose.RENDEZVOUS, most=2))
    assert len(world.read(1).members) == 2


def test_joiners_that_leave_again_are_not_counted(world: Any) -> None:
    one_waits_for_one(world)
    assert isinstance(world.say(2, Withdraw()), Withdrawn)
    world.pass_time(10)
    assert world.read(1) == []
    world.join(2, **ELASTIC)
    world.pass_time(5)
    assert len(world.read(1).members) == 2


def test_a_rendezvous_that_is_given_up(world: Any) -> None:
    form(world, 1)
    world.say(1, vote(Purpose.RENDEZVOUS, least=2, most=2))
    void = world.say(1, GiveUpVote(CONTEXT, 0, Cause.TIMEOUT, "too late"))
    text = "too late: 1 of at least 2 ranks are here; start more, or call rendezvous(min_size=1)"
    assert void == Void(Cause.TIMEOUT, f"{text} or shrink()", "id-1", {})
    world.cut(1)
    assert len(world.join(2, size=1).members) == 1


def test_a_rendezvous_that_is_given_up_while_the_window_is_open(world: Any) -> None:
    one_waits_for_one(world)
    void = world.say(1, GiveUpVote(CONTEXT, 0, Cause.TIMEOUT, "too late"))
    assert "too late: 2 of at least 2 ranks are here, and the join window is open" in void.text


def test_a_rendezvous_whose_voter_then_votes_for_something_else(world: Any) -> None:
    one_waits_for_one(world)
    assert world.say(1, vote(Purpose.AGREE)) == BallotResult(True, (), 1)
    assert world.join(3, **ELASTIC) == []
    world.pass_time(10)
    assert len(world.say(1, vote(Purpose.RENDEZVOUS, number=1)).members) == 3


def test_how_many_wait(world: Any) -> None:
    form(world)
    assert world.say(1, WatchWaiting(), 40) == Waiting(0)
    world.cut(3)
    world.mail.clear()
    world.join(11, size=3)
    assert world.mail.pop(1) == [(40, Waiting(1))]
    world.cut(11)
    assert world.read(1) == Waiting(0)
    world.join(12, size=3)
    world.read(1)
    world.say(1, vote(Purpose.RENDEZVOUS))
    world.say(2, vote(Purpose.RENDEZVOUS))
    assert [type(one) for one in world.read(1)] == [Waiting, EpochView]
    world.say(1, StoreCancel(40))
    world.cut(2)
    world.mail.clear()
    world.join(13, size=3)
    assert world.read(1) == []


def test_watches_are_limited(world: Any) -> None:
    form(world)
    for number in range(1, 200):
        world.say(1, WatchWaiting(), number)
    world.cut(3)
    world.mail.clear()
    world.join(11, size=3)
    assert len(world.mail.pop(1)) == 64


def test_a_broken_link_costs_the_higher_rank_its_place(world: Any) -> None:
    form(world, 4)
    world.say(1, Unreachable("id-3", "reset"))
    world.say(3, Unreachable("id-1", "reset"))
    world.pass_time(0.4)
    assert world.read(2) == []
    world.pass_time(0.1)
    assert world.read(2) == MemberLost(1, (2,), "no link between it and rank 0 (reset)")
    assert isinstance(world.read(3), Evicted)
    assert 3 in world.closed


def test_who_goes_is_told_why_however_long_that_is(world: Any) -> None:
    form(world)
    world.say(1, Unreachable("id-3", "x" * MAX_TEXT))
    world.pass_time(1.0)
    evicted = world.read(3)
    assert isinstance(evicted, Evicted)
    encode_message(evicted)  # raises for what is over a limit


def test_who_can_reach_nobody_goes(world: Any) -> None:
    form(world, 4)
    for other in (2, 3, 4):
        world.say(1, Unreachable(f"id-{other}", "no route"))
    world.pass_time(1)
    assert sorted(world.closed) == [1]


def test_reports_of_the_dead_and_of_strangers_change_nothing(world: Any) -> None:
    form(world, 3)
    world.say(1, Unreachable("id-2", "reset"))
    world.say(1, Unreachable("id-1", "myself"))
    world.say(1, Unreachable("nobody", "who?"))
    world.cut(2)
    world.pass_time(1)
    assert sorted(world.closed) == []
    assert list(world.group()["lost"]) == ["1"]


def test_a_process_that_has_ended_is_lost_at_once(world: Any) -> None:
    form(world, 2)  # with a link that merely broke, it would be the other one
    report = Unreachable("id-1", "its process has ended", True)
    assert world.say(2, report) == MemberLost(1, (0,), "its process has ended")
    assert isinstance(world.read(1), Evicted)
    assert sorted(world.closed) == [1]
    assert world.say(2, report) == []  # by now it is known
    assert world.say(2, replace(report, id="id-2")) == []  # it cannot be
    world.pass_time(1)
    assert sorted(world.closed) == [1]
    assert len(world.say(2, vote()).members) == 1


def test_all_leave_before_the_ruling(world: Any) -> None:
    form(world, 2)
    world.say(1, Unreachable("id-2", "reset"))
    for conn in (1, 2):
        world.say(conn, Leave())
    world.pass_time(1)
    assert world.machine.is_empty


def test_a_shrink_does_not_wait_for_the_ruling(world: Any) -> None:
    form(world, 3)
    world.say(1, Unreachable("id-2", "reset"))
    for conn in (1, 2):
        world.say(conn, vote())
    world.say(3, vote())
    lost, view = world.read(1)
    assert (lost.ranks, [member.id for member in view.members]) == ((1,), ["id-1", "id-3"])
    world.pass_time(1)
    assert sorted(world.closed) == [2]
