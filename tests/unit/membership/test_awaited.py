"""What members wait for at the coordinator, votes and keys, as `aiodist status` tells it."""

from __future__ import annotations

from typing import Any

import pytest

from aiodist.membership.culprits import LEAST, Doing, Finding, Held, PendingOperation, find
from aiodist.wire.activity import Activity, Seen, SeenRequest, Wait, packed
from aiodist.wire.messages import StatusRequest, StoreCancel, StoreSet, StoreWait, StoreWatch
from aiodist.wire.recovery import Cause, GiveUpVote, Purpose, Vote

ASK = StatusRequest(ask_members=True)
STRANGER = 99
CONTEXT = b"context1"
CONNS = (1, 2, 3)


@pytest.fixture
def three(world: Any) -> Any:
    for conn in CONNS:
        world.join(conn, rank=conn - 1, size=3, lease=1000.0)
    world.mail.clear()
    return world


def ids(*ranks: int) -> tuple[str, ...]:
    return tuple([f"id-{rank + 1}" for rank in ranks])


def status_of(world: Any, **activities: Activity) -> dict[str, Any]:
    """The group, once all members have answered: with nothing, unless `c1=` or so says more."""
    world.say(STRANGER, ASK)
    for conn in CONNS:
        world.say(conn, activities.get(f"c{conn}", Activity()), request=0)
    [group] = world.read(STRANGER).status["groups"]
    found: dict[str, Any] = group
    return found


def waits(group: dict[str, Any], rank: int) -> list[tuple[str, float, str, str]]:
    return [
        (wait["what"], wait["seconds"], wait["missing"], wait["lacking"])
        for wait in group["members"][rank]["doing"]["waits"]
    ]


def root_vote(world: Any, purpose: Purpose, number: int = 0, **fields: Any) -> Vote:
    view = world.machine._groups["g", ""].view
    return Vote(view.context, number, purpose, **fields)


def test_who_has_not_voted_holds_up_who_has(three: Any) -> None:
    vote = root_vote(three, Purpose.AGREE, 4)
    three.say(1, vote, request=7)
    three.pass_time(2.0)
    three.say(3, vote, request=7)
    three.pass_time(3.0)
    group = status_of(three, c2=Activity(places=("t.py:5 in main",)))
    assert waits(group, 0) == [("agree #4", 5.0, "rank 1", "")]
    assert waits(group, 2) == [("agree #4", 3.0, "rank 1", "")]
    assert waits(group, 1) == []
    [finding] = group["findings"]
    assert finding["culprits"] == (1,)
    assert finding["held"] == ({"what": "agree #4", "ranks": (0, 2), "seconds": 5.0},)


def test_a_vote_and_a_collective_that_wait_for_each_other_are_a_deadlock(three: Any) -> None:
    three.say(1, Vote(CONTEXT, 0, Purpose.AGREE, members=ids(0, 1)))
    three.pass_time(5.0)
    reduces = Wait(b"another1", "g", 1, "all_reduce", "None", 3, 5.0, packed([0]))
    group = status_of(three, c2=Activity(waits=(reduces,)))
    [finding] = group["findings"]
    assert finding["deadlock"]
    assert finding["culprits"] == (0, 1)


def test_votes_among_some_concern_no_others(three: Any) -> None:
    three.say(1, Vote(CONTEXT, 0, Purpose.SHRINK, members=ids(0, 2)))
    three.pass_time(5.0)
    group = status_of(three)
    assert waits(group, 0) == [("shrink #0", 5.0, "rank 2", "")]
    assert [finding["culprits"] for finding in group["findings"]] == [(2,)]


def test_a_vote_that_is_over_is_not_waited_in(three: Any) -> None:
    vote = root_vote(three, Purpose.AGREE)
    three.say(1, vote)
    three.say(1, GiveUpVote(vote.context, 0, Cause.CANCELLED))
    three.pass_time(5.0)
    assert waits(status_of(three), 0) == []


def test_a_rendezvous_waits_for_votes_and_then_for_joiners(three: Any) -> None:
    vote = root_vote(three, Purpose.RENDEZVOUS, least=5, most=8)
    three.say(1, vote)
    three.say(2, vote)
    three.pass_time(5.0)
    assert waits(status_of(three), 0) == [("rendezvous #0", 5.0, "rank 2", "")]
    three.say(3, vote)
    group = status_of(three)
    assert waits(group, 1) == [("rendezvous #0", 5.0, "", "2 more have to join")]
    [finding] = group["findings"]
    assert (finding["culprits"], finding["lacking"]) == ((), "2 more have to join")
    assert finding["held"] == ({"what": "rendezvous #0", "ranks": (0, 1), "seconds": 5.0},)


def test_the_join_window_is_nothing_that_is_lacking(world: Any) -> None:
    for conn in CONNS:
        world.join(conn, min_size=3, max_size=8, join_window=0.1, lease=1000.0)
    world.pass_time(0.2)
    world.mail.clear()
    vote = root_vote(world, Purpose.RENDEZVOUS, least=4, most=8)
    for conn in CONNS:
        world.say(conn, vote)
    assert waits(status_of(world), 0) == [("rendezvous #0", 0.0, "", "1 more has to join")]
    world.join(4, min_size=3, max_size=8)
    assert waits(status_of(world), 0) == [("rendezvous #0", 0.0, "", "")]


def test_a_key_that_nobody_has_set_is_named(three: Any) -> None:
    three.say(1, StoreWait(("a", "weights")), request=7)
    three.say(2, StoreWait(("weights",)), request=7)
    three.say(3, StoreWatch("weights"), request=7)  # may be for ever: no wait
    three.say(3, StoreSet("a", b""), request=8)
    three.pass_time(5.0)
    group = status_of(three)
    assert waits(group, 0) == [("store.wait", 5.0, "", "key 'weights' is not set")]
    assert waits(group, 2) == []
    [finding] = group["findings"]
    assert finding == {
        "culprits": (),
        "held": ({"what": "store.wait", "ranks": (0, 1), "seconds": 5.0},),
        "deadlock": False,
        "lacking": "key 'weights' is not set",
    }
    three.say(1, StoreCancel(7), request=0)
    assert waits(status_of(three), 0) == []


def test_who_waits_for_a_key_may_hold_up_others(three: Any) -> None:
    three.say(1, StoreWait(("k",)), request=7)
    three.pass_time(5.0)
    waiting = Wait(CONTEXT, "g", 1, "all_reduce", "None", 3, 5.0, packed([0]))
    group = status_of(three, c2=Activity(waits=(waiting,)))
    assert [(one["culprits"], one["lacking"]) for one in group["findings"]] == [
        ((0,), ""),
        ((), "key 'k' is not set"),
    ]


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        (("b", "a"), "keys 'a', 'b' are not set"),
        (tuple("edcba"), "keys 'a', 'b', 'c' and 2 more are not set"),
        (("x" * 1000,), f"key '{'x' * 64}...' is not set"),
    ],
)
def test_many_keys_and_long_ones_are_cut(three: Any, keys: tuple[str, ...], text: str) -> None:
    three.say(1, StoreWait(keys), request=7)
    [(_, _, _, lacking)] = waits(status_of(three), 0)
    assert lacking == text


def test_others_are_told_in_words(three: Any) -> None:
    three.say(2, StoreWait(("k",)), request=7)
    three.pass_time(1.5)
    three.say(1, SeenRequest((1,)))
    three.say(2, Activity(places=("t.py:7 in f",)), request=0)
    assert three.read(1) == Seen(
        (1,), ("in store.wait for 1.5 s (key 'k' is not set) at t.py:7 in f",)
    )


def test_short_waits_do_not_count() -> None:
    def waiting(seconds: float, text: str = "key 'k' is not set") -> Doing:
        return Doing((PendingOperation((b"", "store.wait", None), "store.wait", seconds, 0, text),))

    assert find({0: waiting(LEAST / 2), 1: Doing()}) == []
    assert find({0: waiting(2.0, "b"), 1: waiting(3.0, "a"), 2: waiting(4.0, "b")}) == [
        Finding((), (Held("store.wait", (0, 2), 4.0),), lacking="b"),
        Finding((), (Held("store.wait", (1,), 3.0),), lacking="a"),
    ]
