"""Averagers whose members were lost: what the coordinator remembers of them."""

from __future__ import annotations

import pytest
from averager_members import LEASE, Members, back, restarted

from aiodist.membership import averaging
from aiodist.membership.histories import RETURN_WINDOW
from aiodist.wire import averaging as a
from aiodist.wire.messages import Evicted


def all_lost(members: Members) -> a.Outcome:
    """Two members have a round, and are lost."""
    members.enter(1, 2)
    members.hold(members.close(1, 2), 1, 2)
    [done] = members.told(1)
    assert isinstance(done, a.AverageDone)
    for number in 1, 2:
        members.world.cut(number)
    return done.outcome


def test_rounds_go_on_after_all_members_were_lost(members: Members) -> None:
    first = all_lost(members)
    assert members.world.machine.status()["averagers"] == []
    members.enter(3)
    assert members.offer(3, after=0) == []  # those that have the result may come back
    members.enter(4, outcomes=(first,))
    [fetch] = members.told(3)
    assert isinstance(fetch, a.AverageFetch)
    assert (fetch.outcome, fetch.source.id) == (first, "id4")
    for number in 3, 4:
        members.say(number, members.offered(2, 1))
    members.world.pass_time(RETURN_WINDOW)
    decision = members.told(3)[-1]
    assert isinstance(decision, a.AverageDecision)
    assert decision.round == 2
    members.hold(decision, 3, 4)
    [second] = members.told(3)
    assert isinstance(second, a.AverageDone)
    assert second.outcome.parent == first.digest


def test_others_begin_anew_if_all_members_were_lost_and_do_not_come_back(members: Members) -> None:
    old = all_lost(members)
    members.enter(3, 4)
    for number in 3, 4:
        members.say(number, members.offered(1, None))
    assert members.told(3) == []
    members.world.pass_time(RETURN_WINDOW)
    [decision] = members.told(3)
    assert isinstance(decision, a.AverageDecision)
    members.hold(decision, 3, 4)
    [done] = members.told(3)
    assert isinstance(done, a.AverageDone)
    assert done.outcome.round == 1
    # One of those that were lost comes back after all. Its result is none of these.
    members.enter(5, outcomes=(old,), reached=(old.reached,), state=(old.reached,))
    [refused] = members.told(5, a.AverageOffer("", 1, old.reached, 1.0, b"f", "float32[3]"))
    assert isinstance(refused, a.AverageRefused)
    assert refused.stale == 1
    assert "decided again without" in refused.text
    assert members.told(5, a.AverageWantState()) == []  # it is not the one that has the state


@pytest.mark.parametrize("restart", [False, True])
def test_members_that_all_fell_silent_are_lost_if_one_of_them_comes_back(
    members: Members, restart: bool
) -> None:
    """If all fall silent at one moment, the coordinator may be cut off. If it hears one of them, it
    is not, and the others get their lease to come back."""
    members.enter(1, 2)
    if restart:
        restarted(members, file=True)
    members.world.pass_time(LEASE)
    assert members.world.machine.status()["averagers"][0]["members"][1]["name"] == "m2"
    members.world.pass_time(30.0)
    back(members, 1)
    members.world.pass_time(LEASE / 2)
    members.say(1, members.offered(1, None))
    assert members.told(1) == []
    members.world.pass_time(LEASE / 2)
    assert members.told(1) == [a.AverageGone(("id2",))]


def test_so_many_lost_averagers_are_remembered(
    members: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(averaging, "REMEMBERED", 0)
    all_lost(members)
    members.enter(3, 4)
    assert members.close(3, 4).round == 1


@pytest.mark.parametrize("first", [True, False])
def test_a_member_that_others_know_is_gone_joins_again(members: Members, first: bool) -> None:
    """They have ended their links to it. A coordinator without memory does not know that."""
    members.enter(1, 2, 3)
    members.world.cut(3)
    assert members.told(1) == [a.AverageGone(("id3",))]
    restarted(members, file=False)
    if first:
        back(members, 3)
    back(members, 1, gone=("id3",))
    told = members.told(3) if first else back(members, 3)
    assert any(isinstance(one, Evicted) and "was told" in one.reason for one in told)
    [averager] = members.world.machine.status()["averagers"]
    assert [one["name"] for one in averager["members"]] == ["m1"]


def test_so_many_members_that_are_gone_are_remembered(
    members: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(averaging, "REMEMBERED", 1)
    members.enter(1, gone=("id2", "id3"))
    members.enter(2)
    assert [type(one) for one in members.told(2)] == []
