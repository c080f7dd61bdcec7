"""Nobody of a group is heard any more: that is the coordinator's own loss, not that of its members.

A lease is 6 seconds, and members that are well are heard every 2.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from aiodist.membership.effects import Received, Tick
from aiodist.membership.silence import RETURN_SECONDS, is_cut_off
from aiodist.wire.messages import (
    EpochView,
    Evicted,
    Failure,
    JoinRequest,
    MemberLost,
    Renew,
    Result,
    StoreGet,
    StoreSet,
)
from aiodist.wire.returning import Rejoin, Rejoined

LEASE = 6.0
SILENT = "all of its group fell silent"


class Member:
    """`conn` is its connection; the first one is the number of its id."""

    def __init__(self, world: Any, number: int, size: int, lease: float, group: str) -> None:
        self.world = world
        self.conn = number
        self.ask = JoinRequest(group=group, id=f"m{number}", size=size, lease=lease)
        world.step(Received(number, 1, self.ask))

    def come_back(self) -> Any:
        """Over a new connection."""
        self.conn += 100
        view = self.view
        rank = view.ranks[self.ask.id]
        return self.world.say(self.conn, Rejoin(self.ask, rank, view.epoch, view.digest, (), ()))

    def joined(self) -> None:
        self.view = self.world.read(self.conn)
        assert isinstance(self.view, EpochView)


def form(
    world: Any, size: int, *, lease: float = LEASE, first: int = 1, group: str = "g"
) -> list[Member]:
    members = [Member(world, first + number, size, lease, group) for number in range(size)]
    for member in members:
        member.joined()
    return members


def live(world: Any, members: Iterable[Member], seconds: float) -> None:
    """These are heard, one after the other, twice a second."""
    for _ in range(round(2 * seconds)):
        world.pass_time(0.5)
        for member in members:
            world.step(Received(member.conn, 0, Renew()))


@pytest.mark.parametrize("cut", [5.0, 7.0, 24.0, RETURN_SECONDS])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_a_coordinator_that_was_cut_off_evicts_nobody(world: Any, size: int, cut: float) -> None:
    members = form(world, size)
    world.say(1, StoreSet("k", b"v"))
    live(world, members, 2.0)
    world.pass_time(cut)
    told = [member.come_back() for member in members]
    assert told == [Rejoined((), ())] * size
    assert world.mail == {}
    found = world.group()
    assert (found["epoch"], found["absent"], len(found["members"])) == (1, [], size)
    assert world.say(members[0].conn, StoreGet("k")) == Result(b"v")
    live(world, members, 60.0)
    assert world.mail == {}


def test_nobody_is_told_of_an_eviction_that_there_was_not(world: Any) -> None:
    form(world, 2)
    world.pass_time(7.0)
    assert world.mail == {}
    assert world.closed == {1: SILENT, 2: SILENT}
    assert world.group()["absent"] == [0, 1]
    assert "silent" in world.notes
    assert "lost" not in world.notes


def test_leases_that_run_out_one_after_the_other_are_one_silence(world: Any) -> None:
    """The last signs of life of members that are well are up to a third of a lease apart."""
    members = form(world, 3)
    world.pass_time(1.0)
    world.say(members[1].conn, Renew())
    world.pass_time(1.0)
    world.say(members[2].conn, Renew())
    world.pass_time(4.0)
    assert world.closed == {1: SILENT, 2: SILENT, 3: SILENT}


def test_who_is_silent_alone_is_lost_after_its_lease(world: Any) -> None:
    one, two, three = form(world, 3)
    live(world, [one, three], 6.0)
    reason = "no sign of life for 6 s"
    assert world.read(one.conn) == MemberLost(1, (1,), reason)
    assert world.read(two.conn) == Evicted(reason)
    assert two.come_back() == Evicted(f"it was ruled lost: {reason}")


def test_half_of_the_members_that_are_silent_are_lost(world: Any) -> None:
    members = form(world, 4)
    live(world, members[:2], 6.0)
    assert world.read(1) == MemberLost(1, (2, 3), "no sign of life for 6 s")
    assert not world.group()["absent"]


def test_those_who_do_not_come_back_are_lost_a_lease_after_the_first_one_did(world: Any) -> None:
    members = form(world, 3)
    world.pass_time(30.0)
    assert members[1].come_back() == Rejoined((), ())
    live(world, members[1:2], 5.5)
    assert world.mail == {}
    live(world, members[1:2], 0.5)
    reason = "it did not come back to the coordinator for 6 s"
    assert world.read(members[1].conn) == MemberLost(1, (0, 2), reason)
    assert members[0].come_back() == Evicted(f"it was ruled lost: {reason}")


def test_one_that_was_absent_before_the_silence_may_come_back_after_it(world: Any) -> None:
    """The coordinator's host may have been suspended: then one tick comes, for all timers."""
    members = form(world, 3)
    world.pass_time(7.0)
    assert [member.come_back() for member in members[:2]] == [Rejoined((), ())] * 2
    world.now += 60.0
    world.step(Tick())
    assert world.group()["absent"] == [0, 1, 2]
    assert [member.come_back() for member in members] == [Rejoined((), ())] * 3
    assert "lost" not in world.notes


def test_all_are_dead_and_joiners_wait_one_lease_for_them(world: Any) -> None:
    form(world, 2)
    world.pass_time(100.0)
    one, two = (Member(world, number, 2, 60.0, "g") for number in (11, 12))
    world.pass_time(5.9)
    assert world.mail == {}
    world.pass_time(0.2)
    one.joined()
    two.joined()
    assert one.view.epoch == 2


def test_all_are_dead_and_their_successors_ask_for_another_size(world: Any) -> None:
    form(world, 2)
    world.pass_time(100.0)
    refused = world.join(11, size=1)
    assert refused.kind is Failure.SIZE_MISMATCH
    assert "has 0 of 2 members alive, and ranks 0-1 may come back for 6 s at most" in refused.text
    world.pass_time(LEASE)
    assert isinstance(world.join(12, size=1), EpochView)


def test_nobody_comes_back_to_a_coordinator_that_ends_with_its_process(world: Any) -> None:
    world = type(world)(returns=False)
    form(world, 2)
    world.pass_time(LEASE)
    assert world.read(1) == world.read(2) == Evicted("no sign of life for 6 s")
    assert world.machine.is_empty


def test_all_are_dead_and_nobody_asks_for_them(world: Any) -> None:
    [one] = form(world, 1)
    world.pass_time(LEASE + RETURN_SECONDS - 0.1)
    assert not world.machine.is_empty
    world.pass_time(0.2)
    assert world.machine.is_empty
    assert one.come_back() == Evicted("its group ended with epoch 1")


def test_other_groups_are_judged_by_themselves(world: Any) -> None:
    """One of them may be on another network than the others."""
    here = form(world, 2, group="here")
    there = form(world, 2, group="there", first=11)
    live(world, here, 30.0)
    assert world.group("here")["absent"] == []
    assert [member.come_back() for member in there] == [Rejoined((), ())] * 2


def test_joiners_that_are_cut_off_may_join_again(world: Any) -> None:
    members = form(world, 2)
    world.cut(2)
    world.read(1)
    joiner = Member(world, 3, 2, LEASE, "g")
    world.pass_time(7.0)
    assert world.closed == {1: SILENT, 3: SILENT}
    assert members[0].come_back() == Rejoined((1,), ())
    world.step(Received(4, 1, joiner.ask))
    assert [one["id"] for one in world.group()["waiting"]] == ["m3"]
    assert world.mail == {}


def test_it_is_cut_off_a_second_time(world: Any) -> None:
    members = form(world, 2)
    for _ in range(3):
        world.pass_time(24.0)
        assert [member.come_back() for member in members] == [Rejoined((), ())] * 2


@pytest.mark.parametrize(
    ("lives", "cut"),
    [
        ([(6.0, 0.0)], True),
        ([(6.0, 0.0), (6.0, 3.0)], True),
        ([(6.0, 0.0), (6.0, 3.1)], False),
        ([(6.0, 0.0), (60.0, 54.0)], False),
        ([(6.0, 0.0), (60.0, 30.0)], True),
    ],
)
def test_one_that_is_heard_in_time_shows_that_it_is_not_cut_off(
    lives: list[tuple[float, float]], cut: bool
) -> None:
    assert is_cut_off(lives) is cut
