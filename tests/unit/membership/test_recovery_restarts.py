"""Ballots and epochs over restarts of the coordinator: nobody is left behind, one verdict."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from aiodist.membership.effects import Received
from aiodist.membership.machine import Membership
from aiodist.membership.records import decode_records
from aiodist.wire.messages import (
    EpochView,
    Evicted,
    JoinRequest,
    MemberLost,
    Result,
    StoreGet,
    StoreSet,
)
from aiodist.wire.recovery import (
    BallotResult,
    Cause,
    GiveUpVote,
    Heard,
    Purpose,
    Unreachable,
    Void,
    Vote,
)
from aiodist.wire.returning import Rejoin, Rejoined

LEASE = 4.0


class Member:
    """What a member remembers."""

    def __init__(self, ask: JoinRequest, view: EpochView) -> None:
        self.ask = ask
        self.view = view

    def claim(self, view: EpochView | None = None, **changes: Any) -> Rejoin:
        """That it is of `view`, or of its first one; it brings the view along."""
        of = view or self.view
        rank = of.ranks[self.ask.id]
        return replace(Rejoin(self.ask, rank, of.epoch, of.digest, (), (), of), **changes)

    def vote(self, purpose: Purpose = Purpose.SHRINK, number: int = 0, **fields: Any) -> Vote:
        return Vote(self.view.context, number, purpose, **fields)


def ask_of(number: int, **fields: Any) -> JoinRequest:
    return JoinRequest(**{"group": "g", "id": f"m{number}", "size": 3, "lease": LEASE, **fields})


def form(world: Any, size: int = 3) -> list[Member]:
    """A group of connections 1 to `size`."""
    world.machine = Membership(wall_offset=1000.0, keep=True)
    world.kept = b""
    asks = [ask_of(rank + 1, rank=rank, size=size) for rank in range(size)]
    for rank, ask in enumerate(asks):
        world.step(Received(rank + 1, 1, ask))
    view = world.read(1)
    world.mail.clear()
    return [Member(ask, view) for ask in asks]


def restart(world: Any, *, state: bool) -> None:
    """Another machine, with what was written down or without."""
    records = decode_records(world.kept)
    world.machine = Membership(wall_offset=1000.0, keep=True)
    world.kept = b""
    if state:
        world.machine.restore(records, world.now)
    world.mail.clear()
    world.closed.clear()


def shrink(world: Any, members: list[Member]) -> EpochView:
    """Members 1 and 2 go on without 3, and member 2 does not hear of it."""
    world.cut(3)
    world.mail.clear()
    world.say(2, members[1].vote())
    view = world.say(1, members[0].vote())
    assert isinstance(view, EpochView)
    return view


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("state", [True, False])
def test_who_missed_the_view_is_told(world: Any, state: bool, first: int) -> None:
    one, two, three = members = form(world)
    view = shrink(world, members)
    restart(world, state=state)

    def heard_it() -> None:
        assert world.say(11, one.claim(view)) == Rejoined((), ())

    def missed_it() -> None:
        world.say(12, two.claim(lost=(2,)))
        assert not world.closed

    steps = [heard_it, missed_it]
    steps[first]()
    if first == 1:
        answer = world.say(12, two.vote())
        assert answer == (view if state else [])
        steps[0]()
        if not state:
            assert world.read(12) == view
    else:
        steps[1]()
        assert world.say(12, two.vote()) == view
    found = world.group()
    assert (found["epoch"], [one["id"] for one in found["members"]]) == (2, ["m1", "m2"])
    refused = world.say(13, three.claim())
    assert isinstance(refused, Evicted)
    assert world.group()["epoch"] == 2


def test_a_view_outlives_all_who_were_told(world: Any) -> None:
    _, two, _ = members = form(world)
    view = shrink(world, members)
    restart(world, state=True)
    world.say(12, two.claim())
    world.pass_time(1.0)
    assert world.say(12, two.vote()) == view
    world.say(12, StoreGet("k"))
    world.pass_time(LEASE - 1)
    assert world.read(12) == MemberLost(2, (0,), "it did not come back to the coordinator for 4 s")


def test_losses_of_a_view_that_was_missed_come_behind_it(world: Any) -> None:
    one, two, _ = members = form(world)
    view = shrink(world, members)
    restart(world, state=True)
    world.say(11, one.claim(view))
    world.cut(11)
    assert world.say(12, two.claim()) == Rejoined((), ())
    found, lost = world.say(12, two.vote())
    assert (found, lost.epoch, lost.ranks) == (view, 2, (0,))


def test_a_newer_view_keeps_the_store_of_those_who_stay(world: Any) -> None:
    one, two, three = members = form(world)
    view = shrink(world, members)
    restart(world, state=False)
    world.say(13, three.claim())
    world.say(12, two.claim())
    world.say(12, StoreSet("k", b"v", None))
    world.say(11, one.claim(view))
    assert isinstance(world.read(13), Evicted)
    assert world.say(12, StoreGet("k")).value == b"v"


def test_a_joiner_that_missed_that_it_was_let_in(world: Any) -> None:
    one, two, _ = form(world)
    world.cut(3)
    world.say(4, ask_of(4))
    world.mail.clear()
    world.say(1, one.vote(Purpose.RENDEZVOUS))
    view = world.say(2, two.vote(Purpose.RENDEZVOUS))
    assert [member.id for member in view.members] == ["m1", "m2", "m4"]
    restart(world, state=False)
    world.say(12, two.claim(lost=(2,)))
    world.mail.clear()
    assert world.say(14, ask_of(4), 7) == []
    world.say(11, one.claim(view))
    assert world.mail[14] == [(7, view)]
    assert world.group()["waiting"] == []


def test_a_verdict_is_told_again(world: Any) -> None:
    one, two, three = form(world)
    votes = [member.vote(Purpose.AGREE, flag=member is not two) for member in (one, two, three)]
    for conn, vote in enumerate(votes, 1):
        world.say(conn, vote)
    verdict = world.read(1)
    assert verdict == BallotResult(False, (), 1)
    restart(world, state=True)
    world.say(12, two.claim())
    assert world.say(12, votes[1]) == []  # the others may have heard, or not
    world.say(13, three.claim())
    assert world.say(13, votes[2]) == []
    world.say(11, one.claim(heard=(Heard(one.view.context, 0, verdict),)))
    assert world.read(12) == world.read(13) == verdict


def test_a_verdict_that_a_member_brings_along_is_told_to_who_votes_then(world: Any) -> None:
    one, two, _ = form(world)
    verdict = BallotResult(False, (), 1)
    restart(world, state=True)
    nothing = Heard(one.view.context, 1)
    world.say(11, one.claim(heard=(nothing, Heard(one.view.context, 0, verdict))))
    world.say(12, two.claim())
    assert world.say(12, two.vote(Purpose.AGREE)) == verdict
    assert world.say(12, two.vote(Purpose.AGREE, 1)) == []


@pytest.mark.parametrize("states", [[True], [False], [False, True]])
def test_epochs_of_a_part_of_the_group_grow(world: Any, states: list[bool]) -> None:
    one, two, _ = members = form(world)
    ids = {"members": ("m1", "m2")}
    world.say(1, one.vote(**ids))
    first = world.say(2, two.vote(**ids))
    assert first == BallotResult(True, ("m1", "m2"), 2)
    for state in states:
        restart(world, state=state)
        # From the log, or of a member.
        heard = () if state else (Heard(one.view.context, 0, first),)
        for conn, member in enumerate(members, 11):
            world.say(conn, member.claim(heard=heard))
    world.say(11, one.vote(number=1, **ids))
    assert world.say(12, two.vote(number=1, **ids)).epoch == 3


def test_a_vote_that_nobody_heard_of_is_counted_anew(world: Any) -> None:
    one, two, _ = form(world)
    restart(world, state=True)
    world.say(11, one.claim())
    world.say(12, two.claim())
    for conn, member in ((11, one), (12, two)):
        assert world.say(conn, member.vote(Purpose.AGREE)) == []
    world.say(11, StoreGet("k"))
    world.say(12, StoreGet("k"))
    world.pass_time(3.9)
    for conn in (11, 12):
        world.say(conn, StoreGet("k"))
    world.pass_time(0.2)  # the third has not come back
    lost, verdict = world.read(11)
    assert (lost.ranks, verdict) == ((2,), BallotResult(True, (), 1))


def test_votes_wait_for_those_who_may_come_back(world: Any) -> None:
    one, two, three = form(world)
    restart(world, state=True)
    for conn, member in ((11, one), (12, two)):
        world.say(conn, member.claim())
        world.say(conn, member.vote())
    assert world.read(11) == []
    void = world.say(11, GiveUpVote(one.view.context, 0, Cause.TIMEOUT, "too late"))
    assert void == Void(Cause.TIMEOUT, "too late", "m1", {"m3": ""})
    world.say(13, three.claim())
    assert world.say(13, three.vote()) == void
    for conn, member in ((11, one), (12, two), (13, three)):
        world.say(conn, member.vote(number=1))
    assert len(world.read(11).members) == 3


def test_some_do_not_wait_for_others(world: Any) -> None:
    one, two, _ = form(world)
    restart(world, state=True)
    both = ("m1", "m2")
    world.say(11, one.claim())
    assert world.say(11, one.vote(Purpose.AGREE, members=both)) == []
    world.say(12, two.claim())
    assert world.say(12, two.vote(Purpose.AGREE, members=both)) == BallotResult(True, (), 1)


def test_an_agreement_of_the_epoch_before_waits_for_who_may_know(world: Any) -> None:
    one, two, _ = members = form(world)
    view = shrink(world, members)
    restart(world, state=True)
    world.say(12, two.claim())
    assert world.say(12, two.vote(number=1)) == view
    assert world.say(12, two.vote(Purpose.AGREE, 0)) == []
    world.say(11, one.claim(view))
    void = world.read(12)
    assert isinstance(void, Void)
    assert "went on" in void.text


def test_reports_of_links_wait_for_those_who_may_come_back(world: Any) -> None:
    one, two, three = form(world)
    restart(world, state=True)
    world.say(11, one.claim())
    world.say(12, two.claim())
    world.say(11, Unreachable("m3", "reset"))
    world.pass_time(0.9)
    assert world.closed == {}
    world.say(13, three.claim())
    world.pass_time(1.0)
    assert sorted(world.closed) == [13]
    assert world.read(11).ranks == (2,)


def test_a_report_about_one_that_never_comes_back_holds_nothing_up(world: Any) -> None:
    one, two, _ = form(world)
    restart(world, state=True)
    for conn, member in ((11, one), (12, two)):
        world.say(conn, member.claim())
        world.say(conn, Unreachable("m3", "reset"))
        assert world.say(conn, member.vote()) == []
    world.pass_time(0.9)
    assert world.read(11) == []
    world.pass_time(0.2)
    assert len(world.read(11)[-1].members) == 2
    assert world.closed == {}


def test_one_that_never_comes_back_is_waited_for_while_its_lease_lasts(world: Any) -> None:
    one, two, _ = form(world)
    restart(world, state=True)
    for conn, member in ((11, one), (12, two)):
        world.say(conn, member.claim())
        assert world.say(conn, member.vote()) == []
    world.pass_time(3.5)
    for conn in (11, 12):
        assert world.say(conn, StoreGet("k")) == Result(None)
    world.pass_time(1.0)
    assert len(world.read(11)[-1].members) == 2


def test_a_report_makes_no_lease_longer(world: Any) -> None:
    one, two, _ = form(world)
    restart(world, state=True)
    for conn, member in ((11, one), (12, two)):
        world.say(conn, member.claim())
        assert world.say(conn, member.vote()) == []
    world.pass_time(3.0)
    for conn in (11, 12):
        world.say(conn, Unreachable("m3", "reset"))
    world.pass_time(1.1)
    assert len(world.read(11)[-1].members) == 2


def test_a_process_that_ended_meanwhile_is_not_waited_for(world: Any) -> None:
    one, two, _ = form(world)
    restart(world, state=True)
    for conn, member in ((11, one), (12, two)):
        world.say(conn, member.claim())
        world.say(conn, Unreachable("m3", "its process has ended", True))
    assert world.say(11, one.vote()) == []
    assert len(world.say(12, two.vote()).members) == 2


def test_a_voter_that_comes_over_another_connection_votes_again(world: Any) -> None:
    one, two, three = form(world)
    meeting = {"purpose": Purpose.RENDEZVOUS, "least": 4, "most": 4}
    for conn, member in ((1, one), (2, two), (3, three)):
        assert world.say(conn, member.vote(**meeting)) == []
    world.say(12, two.claim())
    assert world.say(12, two.vote(**meeting)) == []
    world.cut(3)
    world.mail.clear()
    for number in (4, 5):
        world.say(number, ask_of(number))
    world.pass_time(0)
    assert [member.id for member in world.read(12).members] == ["m1", "m2", "m4", "m5"]
