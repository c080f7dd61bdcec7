"""Members that come back: to a coordinator that was restarted, or over another connection."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from aiodist.membership import books, rejoining
from aiodist.membership.effects import Received
from aiodist.membership.machine import Membership
from aiodist.membership.records import Ended, Gone, decode_records, encode_record
from aiodist.membership.silence import RETURN_SECONDS
from aiodist.wire.messages import (
    EpochView,
    Evicted,
    Failed,
    Failure,
    JoinRequest,
    Leave,
    MemberLeft,
    MemberLost,
    Result,
    StoreAdd,
    StoreChanged,
    StoreCompareSet,
    StoreDelete,
    StoreGet,
    StoreSet,
    StoreWatch,
    Withdraw,
)
from aiodist.wire.recovery import Purpose, Vote, Waiting, WatchWaiting
from aiodist.wire.returning import Later, Rejoin, Rejoined, ViewWanted


class Member:
    """What a member remembers of its membership."""

    def __init__(self, ask: JoinRequest, view: EpochView) -> None:
        self.ask = ask
        self.view = view

    def claim(self, **changes: Any) -> Rejoin:
        view = self.view
        claim = Rejoin(self.ask, view.ranks[self.ask.id], view.epoch, view.digest, (), ())
        return replace(claim, **changes)

    def full(self, **changes: Any) -> Rejoin:
        return self.claim(view=self.view, **changes)


def form(world: Any, size: int = 2, lease: float = 4.0, first: int = 1, **fields: Any) -> Any:
    """A group whose members have the connections `first`, …, in order of rank."""
    asks = [
        JoinRequest(
            group="g", id=f"m{first + i}", rank=i, size=size, lease=lease, pid=first + i, **fields
        )
        for i in range(size)
    ]
    for i, ask in enumerate(asks):
        world.step(Received(first + i, 1, ask))
    views = [world.read(first + i) for i in range(size)]
    assert all(view == views[0] for view in views)
    return [Member(ask, view) for ask, view in zip(asks, views, strict=True)]


def restart(world: Any, *, state: bool) -> None:
    """Another machine in the place of this one, an hour later on its own clock."""
    before = world.machine
    data = b"".join(encode_record(record) for record in before.records())
    world.machine = Membership(wall_offset=1000.0, keep=True)
    if state:
        world.machine.restore(decode_records(data), world.now)
    world.mail.clear()
    world.closed.clear()


@pytest.mark.parametrize("state", [True, False])
def test_members_go_on_where_they_were(world: Any, state: bool) -> None:
    one, two = form(world)
    restart(world, state=state)
    if not state:
        assert world.say(11, one.claim()) == ViewWanted()
        assert world.say(12, two.claim()) == Later()
        assert world.say(11, one.full()) == Rejoined((), ())
    else:
        assert world.say(11, one.claim()) == Rejoined((), ())
    assert world.group()["absent"] == [1]
    assert world.say(12, two.claim()) == Rejoined((), ())
    found = world.group()
    assert (found["epoch"], found["absent"]) == (1, [])
    assert [member["id"] for member in found["members"]] == ["m1", "m2"]
    world.cut(12, "gone")
    assert world.read(11) == MemberLost(1, (1,), "gone")


@pytest.mark.parametrize("state", [True, False])
def test_who_does_not_come_back_within_its_lease_is_lost(world: Any, state: bool) -> None:
    one, _ = form(world, lease=4.0)
    restart(world, state=state)
    world.say(11, one.full())
    world.pass_time(3.9)
    assert world.read(11) == []
    world.say(11, StoreGet("k"))
    world.pass_time(0.2)
    reason = "it did not come back to the coordinator for 4 s"
    assert world.read(11) == MemberLost(1, (1,), reason)


def test_leases_begin_when_members_can_reach_the_coordinator_again(world: Any) -> None:
    one, two, _three = form(world, size=3, lease=4.0)
    restart(world, state=True)
    world.pass_time(100.0)
    assert world.say(12, two.claim()) == Rejoined((), ())
    world.pass_time(3.9)
    assert world.say(11, one.claim()) == Rejoined((), ())
    world.say(12, StoreGet("k"))
    world.pass_time(0.2)
    reason = "it did not come back to the coordinator for 4 s"
    assert world.read(11) == MemberLost(1, (2,), reason)


def test_a_group_of_which_nobody_comes_back_ends(world: Any) -> None:
    [one] = form(world, size=1)
    restart(world, state=True)
    world.pass_time(RETURN_SECONDS - 0.1)
    assert not world.machine.is_empty
    world.pass_time(0.2)
    assert world.machine.is_empty
    assert world.say(11, one.claim()) == Evicted("its group ended with epoch 1")
    assert 11 in world.closed
    assert form(world, size=1, first=21)[0].view.epoch == 2


@pytest.mark.parametrize("state", [True, False])
def test_who_was_lost_or_left_does_not_come_back(world: Any, state: bool) -> None:
    one, two, three = form(world, size=3)
    world.cut(2, "cut")
    world.say(3, Leave())
    restart(world, state=state)
    told = {} if state else {"lost": (1,), "left": (2,)}
    world.step(Received(11, 1, one.full(**told)))
    assert world.mail.pop(11)[-1] == (1, Rejoined((1,), (2,)))
    assert isinstance(world.say(12, two.claim()), Evicted)
    assert world.say(13, three.claim()) == Evicted("it had left")
    assert world.group()["absent"] == []


def test_what_others_were_told_of_a_member_holds_though_it_came_first(world: Any) -> None:
    one, two, three = form(world, size=3)
    restart(world, state=False)
    assert world.say(12, two.full()) == Rejoined((), ())
    assert world.say(13, three.claim()) == Rejoined((), ())
    assert world.say(11, one.claim(lost=(1,))) == [
        MemberLost(1, (1,), "it was ruled lost before it came back, or before the coordinator did"),
        Rejoined((1,), ()),
    ]
    assert isinstance(world.read(12), Evicted)
    assert isinstance(world.read(13), MemberLost)
    assert 12 in world.closed


def test_those_who_are_back_hear_of_those_who_left(world: Any) -> None:
    one, two, _ = form(world, size=3)
    restart(world, state=False)
    world.say(12, two.full())
    assert world.say(11, one.claim(left=(2,))) == Rejoined((), (2,))
    assert world.read(12) == MemberLeft(1, (2,))


def test_the_higher_epoch_wins(world: Any) -> None:
    old = form(world)
    world.cut(1)
    world.cut(2)
    new = form(world, first=3)
    assert new[0].view.epoch == 2
    restart(world, state=False)
    # Those who missed that the group went on, and come first.
    world.say(11, old[0].full())
    world.say(11, StoreSet("k", b"of the old"))
    assert world.say(13, new[0].claim()) == ViewWanted()
    assert world.say(13, new[0].full()) == Rejoined((), ())
    assert isinstance(world.read(11), Evicted)
    assert world.say(13, StoreGet("k")) == Result(None)
    assert world.say(12, old[1].claim()) == Evicted(
        "it is of epoch 1, and the group has gone on to epoch 2"
    )
    assert world.say(14, new[1].claim()) == Rejoined((), ())
    world.cut(13)
    world.cut(14)
    assert form(world, first=31)[0].view.epoch == 3


def test_who_was_lost_before_the_others_went_on_hears_why(world: Any) -> None:
    one, two, three = form(world, size=3)
    world.cut(2, "no word")
    for conn, member in ((1, one), (3, three)):
        world.step(Received(conn, 7, Vote(member.view.context, 0, Purpose.SHRINK)))
    assert world.group()["epoch"] == 2
    assert world.say(12, two.claim()) == Evicted("no word, and the group has gone on to epoch 2")


def test_members_of_the_lower_epoch_are_told(world: Any) -> None:
    old = form(world, size=1)
    world.cut(1)
    new = form(world, size=1, first=2)
    restart(world, state=False)
    world.say(11, old[0].full())
    world.say(12, new[0].full())
    assert world.read(11) == Evicted("its group goes on in epoch 2, of which it is no member")
    assert 11 in world.closed


def test_two_memberships_of_one_epoch_do_not_mix(world: Any) -> None:
    one = form(world)
    restart(world, state=False)
    other = form(world, first=5)
    assert other[0].view.epoch == one[0].view.epoch == 1
    refused = world.say(11, one[0].full())
    assert isinstance(refused, Evicted)
    assert "two coordinators have served this group" in refused.reason


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"epoch": 7}, "not the one that was announced"),
        ({"digest": b"other"}, "not the one that was announced"),
        ({"rank": 1}, "rank 1 of the view is another member"),
        ({"rank": 9}, "rank 9 of the view is another member"),
    ],
)
def test_a_view_has_to_fit_its_claim(world: Any, changes: dict[str, Any], text: str) -> None:
    one, _ = form(world)
    restart(world, state=False)
    failed = world.say(11, one.full(**changes))
    assert isinstance(failed, Failed)
    assert failed.kind is Failure.INVALID
    assert text in failed.text
    assert world.machine.is_empty


def test_a_view_has_to_make_sense(world: Any) -> None:
    one, _ = form(world)
    first, second = one.view.members
    restart(world, state=False)
    for members, text in (
        ((second, first), "sorted by rank"),
        ((first, replace(first, rank=1)), "a member id twice"),
    ):
        view = EpochView("g", 1, members)
        failed = world.say(11, one.claim(view=view, digest=view.digest))
        assert isinstance(failed, Failed)
        assert text in failed.text
    ask = replace(one.ask, size=2, min_size=1)
    failed = world.say(11, replace(one.full(), ask=ask))
    assert isinstance(failed, Failed)


def test_another_member_of_a_known_view_is_refused(world: Any) -> None:
    one, two = form(world)
    restart(world, state=True)
    refused = world.say(11, one.claim(ask=replace(one.ask, id="somebody")))
    assert isinstance(refused, Evicted)
    assert world.say(11, two.claim()) == Rejoined((), ())
    assert world.say(11, two.claim()).text == "this connection has joined already"


def test_a_view_is_asked_of_one_member_at_a_time(world: Any) -> None:
    one, two, three = form(world, size=3)
    restart(world, state=False)
    assert world.say(11, one.claim()) == ViewWanted()
    assert world.say(12, two.claim()) == Later()
    world.pass_time(2.0)
    assert world.say(12, two.claim()) == ViewWanted()
    assert world.say(11, one.claim()) == Later()
    world.cut(12)
    assert world.say(13, three.claim()) == ViewWanted()


def test_a_member_comes_over_another_connection(world: Any) -> None:
    one, _ = form(world)
    world.say(1, StoreWatch("k"), request=9)
    assert world.say(11, one.claim()) == Rejoined((), ())
    assert "over another connection" in world.closed[1]
    world.cut(1)
    assert world.read(2) == []
    assert world.say(2, StoreSet("k", b"")) == Result(None)
    assert world.read(1) == []
    world.cut(11)
    assert isinstance(world.read(2), MemberLost)


def test_a_view_that_was_missed_is_given_again(world: Any) -> None:
    one, two, _three = form(world, size=3)
    world.cut(3)
    restart(world, state=True)
    assert world.say(12, two.ask) == [
        one.view,
        MemberLost(1, (2,), "it was ruled lost before it came back, or before the coordinator did"),
    ]
    assert world.say(11, one.claim()) == Rejoined((2,), ())
    world.say(11, Leave())
    world.read(12)
    assert world.say(22, two.ask)[-1] == MemberLeft(1, (0,))


def test_who_was_lost_before_it_heard_that_it_was_in_joins_under_another_id(world: Any) -> None:
    one, two = form(world)
    world.cut(2, "it broke")
    assert world.say(12, two.ask) == Evicted("it broke")
    assert world.closed[12] == "it broke"
    assert world.group()["waiting"] == []
    world.read(1)
    world.join(13, rank=1)
    view = world.say(1, Vote(one.view.context, 1, Purpose.RENDEZVOUS))
    assert [member.id for member in view.members] == [one.ask.id, "id-13"]


def test_who_asks_again_while_it_waits_begins_anew(world: Any) -> None:
    ask = JoinRequest(group="g", id="me", rank=0, size=2)
    world.say(1, ask)
    world.say(2, ask)
    assert 1 in world.closed
    assert [one["id"] for one in world.group()["waiting"]] == ["me"]
    assert isinstance(world.join(3, rank=1), EpochView)


def test_joiners_wait_until_it_is_clear_who_comes_back(world: Any) -> None:
    one, two = form(world, lease=4.0)
    restart(world, state=True)
    assert world.join(21, rank=1) == []
    assert world.join(22) == []
    world.say(11, one.claim())
    assert world.say(11, WatchWaiting()) == Waiting(2)
    world.say(12, two.claim())
    assert world.read(11) == Waiting(0)
    for conn in (21, 22):
        refused = world.read(conn)
        assert isinstance(refused, Failed)
        assert refused.kind is Failure.COMPLETE


def test_a_joiner_may_take_the_place_of_who_does_not_come_back(world: Any) -> None:
    one, _ = form(world, lease=4.0)
    restart(world, state=True)
    world.say(11, one.claim())
    world.join(21, rank=1)
    world.pass_time(3.0)
    world.say(11, StoreGet("k"))
    world.say(21, StoreGet("k"))
    world.pass_time(1.5)
    assert isinstance(world.read(11), MemberLost)
    assert [one["id"] for one in world.group()["waiting"]] == ["id-21"]


def test_no_group_forms_before_others_could_come_back(world: Any) -> None:
    one, _ = form(world)
    world.machine = Membership(wall_offset=1000.0, form_after=world.now + 1.0)
    assert world.join(21, size=1, group="other") == []
    assert world.join(22, rank=0) == []
    assert world.join(23, rank=1) == []
    refused = world.join(24)
    assert "about to form" in refused.text
    world.say(11, one.full())
    world.pass_time(1.0)
    assert isinstance(world.read(21), EpochView)
    assert world.read(22) == []
    assert world.group()["epoch"] == 1


def test_more_joiners_of_an_elastic_group_than_it_has_room_for_wait(world: Any) -> None:
    world.machine = Membership(wall_offset=1000.0, form_after=world.now + 1.0)
    for conn in (21, 22, 23):
        assert world.join(conn, size=None, min_size=1, max_size=2) == []
    world.pass_time(1.0)
    view = world.read(21)
    assert [member.id for member in view.members] == ["id-21", "id-22"]
    assert world.read(22) == view
    assert world.say(21, WatchWaiting()) == Waiting(1)
    for conn in (21, 22):
        world.say(conn, Leave())
    world.pass_time(10.0)
    formed = world.read(23)
    assert [member.id for member in formed.members] == ["id-23"]
    assert formed.epoch == 2


def test_the_store_outlives_the_coordinator(world: Any) -> None:
    world.machine = Membership(wall_offset=1000.0, keep=True)
    one, _ = form(world)
    world.say(1, StoreSet("k", b"v"))
    world.say(1, StoreSet("short", b"v", 3.0), request=2)
    world.say(1, StoreSet("gone", b"v"), request=3)
    world.say(1, StoreDelete("gone"), request=4)
    world.pass_time(1.0)
    restart(world, state=True)
    assert world.group()["store"] == {"keys": 2, "bytes": 2 + 6}
    world.say(11, one.claim())
    assert world.say(11, StoreGet("k")) == Result(b"v")
    world.pass_time(1.9)
    assert world.say(11, StoreGet("short")) == Result(b"v")
    world.pass_time(0.2)
    assert world.say(11, StoreGet("short")) == Result(None)


def test_what_is_asked_twice_is_done_once(world: Any) -> None:
    world.machine = Membership(wall_offset=1000.0, keep=True)
    one, two = form(world)
    assert world.say(1, StoreAdd("n", 5), request=7) == Result(5)
    assert world.say(1, StoreCompareSet("c", None, b"mine"), request=8) == Result(True)
    for state in (True, True):
        restart(world, state=state)
        world.say(11, one.claim())
        world.say(12, two.claim())
        assert world.say(11, StoreAdd("n", 5), request=7) == Result(5)
        assert world.say(11, StoreCompareSet("c", None, b"mine"), request=8) == Result(True)
        assert world.say(12, StoreAdd("n", 0), request=7) == Result(5)
    assert world.say(11, StoreAdd("n", 5), request=9) == Result(10)


def test_a_watch_that_goes_on_begins_with_what_there_is(world: Any) -> None:
    form(world)
    world.say(1, StoreSet("k", b"v"))
    assert world.say(1, StoreWatch("k", again=True)) == [Result(None), StoreChanged("k", b"v")]
    assert world.say(1, StoreWatch("j", again=True), request=2) == [
        Result(None),
        StoreChanged("j", None),
    ]


def test_what_is_written_down_suffices(world: Any) -> None:
    """The records of the steps, and those of a snapshot, give the same."""
    world.machine = Membership(wall_offset=1000.0, keep=True)
    form(world, size=3)
    world.say(1, StoreSet("k", b"v"), request=1)
    world.say(1, StoreSet("k", b"w", 30.0), request=2)
    world.say(1, StoreSet("j", b"w"), request=3)
    world.say(1, StoreDelete("j"), request=4)
    world.say(1, StoreAdd("n", 3), request=5)
    assert world.say(1, StoreCompareSet("n", b"2", b""), request=6) == Result(False)
    world.join(8, group="forming")
    world.say(2, Leave())
    world.cut(3)
    world.join(9, group="h", size=1)
    world.say(9, Leave())
    snapshot = b"".join(map(encode_record, world.machine.records()))
    replayed = []
    for data in (world.kept, snapshot):
        machine = Membership(wall_offset=1000.0)
        machine.restore(decode_records(data), world.now)
        replayed.append([*machine.records()])
    assert sorted(map(repr, replayed[0])) == sorted(map(repr, replayed[1]))


def test_ends_that_are_long_ago_are_forgotten(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(books, "REMEMBERED", 2)
    for name in "abc":
        world.join(ord(name), group=name, size=1)
        world.cut(ord(name))
    ended = [one.group for one in world.machine.records() if isinstance(one, Ended)]
    assert ended == ["b", "c"]


def test_only_the_last_answers_are_remembered(world: Any) -> None:
    form(world, size=1)
    for request in range(1, 35):
        world.say(1, StoreAdd("n", 1), request=request)
    assert world.say(1, StoreAdd("n", 1), request=34) == Result(34)
    assert world.say(1, StoreAdd("n", 1), request=3) == Result(3)
    assert world.say(1, StoreAdd("n", 1), request=2) == Result(35)


def test_who_gives_up_hears_who_may_still_come_back(world: Any) -> None:
    one, _ = form(world)
    restart(world, state=True)
    world.say(11, one.claim())
    world.join(21)
    withdrawn = world.say(21, Withdraw())
    assert "rank 1 may still come back to this coordinator" in withdrawn.text


def test_ranks_that_there_are_not_are_not_lost(world: Any) -> None:
    one, _ = form(world)
    restart(world, state=True)
    assert world.say(11, one.claim(lost=(77,), left=(78,))) == Rejoined((), ())


def test_a_view_that_was_missed_comes_with_who_left(world: Any) -> None:
    one, two = form(world)
    world.say(1, Leave())
    restart(world, state=True)
    assert world.say(12, two.ask) == [one.view, MemberLeft(1, (0,))]


def test_what_is_asked_for_is_bounded(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rejoining, "MAX_ASKED", 1)
    one, two = form(world)
    restart(world, state=False)
    other = replace(one.ask, group="h")
    assert world.say(11, one.claim()) == ViewWanted()
    assert world.say(12, one.claim(ask=other)) == ViewWanted()
    assert world.say(13, two.claim()) == ViewWanted()
    world.cut(11)
    assert world.say(14, two.claim()) == Later()


def test_logs_that_make_no_sense(world: Any) -> None:
    world.machine = Membership(keep=True)
    form(world)
    formed = decode_records(world.kept)
    for record, text in (
        (Ended("g", "", 1), "ended before its members were gone"),
        (Gone("g", "", (0, 0), None), "is gone twice"),
    ):
        with pytest.raises(ValueError, match=text):
            Membership().restore([*formed, record], 0.0)


def test_records_that_make_no_sense() -> None:
    world = Membership()
    with pytest.raises(ValueError, match="no record at byte 0"):
        decode_records(b"\xc1")
    with pytest.raises(ValueError, match="no whole record"):
        decode_records(b"\x92\x01")
    with pytest.raises(ValueError, match="an unknown group"):
        world.restore([Gone("g", "", (0,), None)], 0.0)


def test_an_epoch_of_which_only_a_joiner_has_heard_is_numbered_again(world: Any) -> None:
    """Without a state file. A model of the protocol found this: see docs/proof.md."""
    ask = JoinRequest(group="g", id="m1", min_size=1, max_size=2, join_window=0.0)
    world.step(Received(1, 1, ask))
    world.pass_time(0.0)
    one = Member(ask, world.read(1))
    joiner = replace(ask, id="m2")
    world.step(Received(2, 1, joiner))
    vote = Vote(one.view.context, 0, Purpose.RENDEZVOUS)
    world.step(Received(1, 2, vote))
    admitted = Member(joiner, world.read(2))
    assert (admitted.view.epoch, len(admitted.view.members)) == (2, 2)
    restart(world, state=False)  # before member 1 has heard of epoch 2
    world.say(11, one.full())
    assert world.say(11, vote).epoch == 2
    refused = world.say(12, admitted.full())
    assert isinstance(refused, Evicted)
    assert "epoch 2 has other members here" in refused.reason
