"""How members go, and what becomes of the group."""

from __future__ import annotations

from typing import Any

from aiodist.membership.effects import Drain
from aiodist.membership.silence import RETURN_SECONDS
from aiodist.wire.messages import (
    Abort,
    Draining,
    EpochView,
    Evicted,
    Failure,
    Leave,
    Left,
    MemberLeft,
    MemberLost,
    Renew,
    Result,
    StoreGet,
    StoreSet,
    StoreWatch,
    Withdraw,
)


def form(world: Any, size: int = 3, **fields: Any) -> None:
    for conn in range(1, size + 1):
        world.join(conn, size=size, rank=conn - 1, **fields)
    world.mail.clear()


def test_the_others_are_told_who_left(world: Any) -> None:
    form(world)
    assert world.say(2, Leave()) == Left()
    assert world.read(1) == MemberLeft(1, (1,))
    assert world.read(3) == MemberLeft(1, (1,))
    assert world.group()["left"] == [1]
    world.cut(2)
    assert world.mail == {}


def test_a_broken_connection_is_a_lost_member_at_once(world: Any) -> None:
    form(world)
    world.cut(2, "reset")
    assert world.read(1) == MemberLost(1, (1,), "reset")
    assert world.read(3) == MemberLost(1, (1,), "reset")
    assert world.read(2) == []
    assert world.group()["lost"] == {"1": "reset"}


def test_who_aborts_is_lost_for_the_reason_that_it_gives(world: Any) -> None:
    form(world)
    assert world.say(2, Abort("ValueError: no")) == Left()
    assert world.read(1) == MemberLost(1, (1,), "it aborted: ValueError: no")
    assert world.read(3) == MemberLost(1, (1,), "it aborted: ValueError: no")
    assert world.group()["lost"] == {"1": "it aborted: ValueError: no"}
    assert world.notes[-1] == "aborted"
    assert world.say(2, Abort("twice")) == Left()
    world.cut(2, "it disconnected")
    assert world.mail == {}
    assert "lost" not in world.notes


def test_who_aborts_while_it_waits_waits_no_more(world: Any) -> None:
    world.join(1, size=2)
    assert world.say(1, Abort("enough")) == Left()
    assert world.machine.is_empty
    assert world.notes == ["waiting", "withdrawn", "deleted"]


def test_silence_longer_than_the_lease_is_a_loss(world: Any) -> None:
    form(world, lease=3.0)
    world.pass_time(2.0)
    assert world.say(1, Renew()) == []
    world.say(3, StoreGet("any message is a sign of life"))
    world.pass_time(1.0)
    assert world.read(2) == Evicted("no sign of life for 3 s")
    assert world.closed == {2: "no sign of life for 3 s"}
    assert world.read(1) == MemberLost(1, (1,), "no sign of life for 3 s")
    assert world.read(3) == MemberLost(1, (1,), "no sign of life for 3 s")
    world.cut(2)
    assert world.mail == {}


def test_those_silent_together_are_lost_together(world: Any) -> None:
    world.join(1, size=3, rank=0, lease=2.0)
    world.join(2, size=3, rank=1, lease=2.0)
    world.join(3, size=3, rank=2, lease=9.0)
    world.mail.clear()
    world.pass_time(2.0)
    assert world.read(3) == MemberLost(1, (0, 1), "no sign of life for 2 s")
    assert world.read(1) == Evicted("no sign of life for 2 s")


def test_a_silent_joiner_and_a_silent_member_go_together(world: Any) -> None:
    form(world, size=2, lease=2.0)
    world.cut(1)
    world.join(3, size=2, rank=0, lease=2.0)
    world.join(4, size=2, rank=None, lease=50.0)
    world.mail.clear()
    world.pass_time(2.0)
    assert world.read(3) == Evicted("no sign of life for 2 s")
    assert world.read(2) == Evicted("no sign of life for 2 s")
    assert world.group()["waiting"][0]["id"] == "id-4"
    assert world.group()["epoch"] is None


def test_the_last_one_to_go_deletes_the_group_and_its_store(world: Any) -> None:
    form(world, size=2, lease=100.0)
    world.say(1, StoreSet("k", b"v", 50.0))
    world.say(1, StoreWatch("k"), request=7)
    world.say(1, Leave())
    assert world.say(2, StoreSet("k", b"w")) == [MemberLeft(1, (0,)), Result(None)]
    assert world.mail == {}
    world.cut(2)
    assert world.machine.is_empty
    assert world.machine.deadline() is None
    form(world, size=2, lease=100.0)
    assert world.say(1, StoreGet("k")) == Result(None)


def test_a_ttl_dies_with_its_group(world: Any) -> None:
    form(world, size=1, lease=3.0)
    world.say(1, StoreSet("k", b"v", 3.0 + RETURN_SECONDS))
    world.pass_time(3.0)
    assert world.closed == {1: "all of its group fell silent"}
    world.pass_time(RETURN_SECONDS)
    assert world.machine.is_empty


def test_epochs_go_on_after_a_group_was_deleted(world: Any) -> None:
    for epoch in (1, 2, 3):
        view = world.join(10 * epoch, size=1)
        assert view.epoch == epoch
        world.cut(10 * epoch)


def test_a_group_that_lost_someone_lets_joiners_wait(world: Any) -> None:
    form(world)
    world.cut(2, "reset")
    world.mail.clear()
    assert world.join(4, size=3, rank=1) == []
    taken = world.join(5, size=3, rank=0)
    assert taken.kind is Failure.RANK_TAKEN
    assert "held by member (pid 1 on an unknown host); epoch 1 has 2 of 3 members" in taken.text
    text = world.say(4, Withdraw()).text
    assert "runs in epoch 1 (rank 1 is lost (reset)) and takes waiting joiners at" in text


def test_one_that_someone_left_does_too(world: Any) -> None:
    form(world)
    world.say(1, Leave())
    world.say(2, Leave())
    assert world.join(4, size=3, rank=1) == []
    assert "(ranks 0-1 left)" in world.say(4, Withdraw()).text


def test_those_who_waited_form_the_group_anew_when_the_last_is_gone(world: Any) -> None:
    form(world, size=2)
    world.say(1, Leave())
    assert world.join(11, size=2, rank=0) == []
    assert world.join(12, size=2) == []
    assert world.join(13, size=2) == []
    world.mail.clear()
    world.say(2, Leave())
    view = world.read(11)
    assert isinstance(view, EpochView)
    assert (view.epoch, view.ranks["id-11"], view.ranks["id-12"]) == (2, 0, 1)
    assert world.read(12) == view
    assert world.read(13).kind is Failure.COMPLETE


def test_those_who_waited_may_still_be_too_few(world: Any) -> None:
    form(world, size=2)
    world.cut(1)
    world.join(11, size=2)
    world.cut(2)
    assert world.group()["epoch"] is None
    assert world.join(12, size=2).epoch == 2


def test_draining_turns_joiners_away_and_waits_for_members(world: Any) -> None:
    form(world, size=2)
    world.join(5, group="h", size=2)
    world.drain()
    assert world.read(1) == Draining()
    assert world.read(2) == Draining()
    assert world.read(5).kind is Failure.DRAINING
    assert world.join(6).kind is Failure.DRAINING
    assert not world.machine.is_empty
    assert world.machine.status()["draining"] is True
    assert world.say(1, StoreSet("k", b"")) == Result(None)
    world.say(1, Leave())
    world.say(2, Leave())
    assert world.machine.is_empty


def test_joiners_hear_how_far_their_group_had_come_if_the_coordinator_gives_up(world: Any) -> None:
    world.join(1, size=3, rank=0)
    world.join(2, size=3, rank=1)
    world.join(3, group="h", size=2, rank=1)
    world.say(1, Withdraw())
    world.step(Drain(gave_up=True))
    assert world.read(2).missing == (2,)
    assert world.read(3).missing == (0,)
    assert world.machine.is_empty


def test_a_reason_is_kept_short(world: Any) -> None:
    form(world, size=2)
    world.cut(1, "x" * 9999)
    assert world.read(2).reason == "x" * 512
