"""The data of averagers at the coordinator: it is bounded by the members that are there."""

from __future__ import annotations

from typing import Any

import pytest
from averager_members import Members, back, restarted

from aiodist.membership.averagers import Room
from aiodist.membership.histories import RETURN_WINDOW, Histories
from aiodist.membership.records import AveragerRecorded
from aiodist.wire import averaging as a
from aiodist.wire.messages import Leave


def room_of(members: Members) -> Room:
    room: Room
    [room] = members.world.machine._averaging._rooms.values()
    return room


def end(members: Members, number: int, *, leave: bool) -> None:
    if leave:
        members.say(number, Leave())
    else:
        members.world.cut(number)


def parts_of(members: Members) -> list[str]:
    [averager] = members.world.machine.status()["averagers"]
    return [one["part"] for one in averager["parts"]]


def round_alone(members: Members, number: int) -> a.Outcome:
    """This member enters with a part of its own, and has a round of it."""
    members.enter(number, parts=("own",))
    [decision] = members.offer(number, part="own")
    held = a.AverageProgress("own", decision.round, decision.attempt, (0,), (0,))
    [done] = members.told(number, held)
    assert isinstance(done, a.AverageDone)
    return done.outcome


@pytest.fixture
def lone(members: Members) -> Members:
    """A quorum of one, so that each member has rounds by itself. Member 1 stays."""
    members.rules = a.Rules(1, 1.0, "AVG", "")
    members.enter(1)
    return members


@pytest.mark.parametrize("leave", [True, False])
def test_members_that_are_gone_are_forgotten(members: Members, *, leave: bool) -> None:
    members.enter(1)
    for number in range(2, 6):
        members.enter(number)
        end(members, number, leave=leave)
    assert list(room_of(members).infos) == ["id1"]
    members.enter(6, 7)
    assert room_of(members).order == {"id1": 0, "id6": 1, "id7": 2}


@pytest.mark.parametrize("file", [None, "log", "snapshot"])
def test_a_member_that_is_gone_is_known_while_a_round_names_it(
    members: Members, file: str | None
) -> None:
    members.enter(1, 2, 3)
    members.close(1, 2, 3)
    members.world.cut(3)
    decision = members.told(1)[-1]
    if file:
        restarted(members, file=True, snapshot=file == "snapshot")
        [decision] = back(members, 1)[-1:]
        back(members, 2)
    assert isinstance(decision, a.AverageDecision)
    assert [info.id for info in decision.members] == ["id1", "id2", "id3"]
    assert decision.remaining == (0, 1)
    assert sorted(room_of(members).infos) == ["id1", "id2", "id3"]
    members.hold(decision, 1, 2)
    [done] = members.told(2)[-1:]
    assert isinstance(done, a.AverageDone)
    assert sorted(room_of(members).infos) == ["id1", "id2"]


@pytest.mark.parametrize("leave", [True, False])
def test_a_part_without_members_is_forgotten(lone: Members, *, leave: bool) -> None:
    round_alone(lone, 2)
    end(lone, 2, leave=leave)
    assert parts_of(lone) == ["", "own"]
    lone.world.pass_time(RETURN_WINDOW)
    assert parts_of(lone) == [""]
    records = list(lone.world.machine.records())
    assert not any(isinstance(one, AveragerRecorded) for one in records)
    assert round_alone(lone, 3).before == a.Reached(0, b"")


def test_a_part_that_had_no_round_is_forgotten_at_once(lone: Members) -> None:
    lone.enter(2, parts=("own",))
    lone.say(2, Leave())
    assert parts_of(lone) == [""]


def test_a_part_is_forgotten_after_a_restart_as_well(lone: Members) -> None:
    round_alone(lone, 2)
    lone.world.cut(2)
    restarted(lone, file=True)
    back(lone, 1)
    assert parts_of(lone) == ["", "own"]
    lone.world.pass_time(RETURN_WINDOW)
    assert parts_of(lone) == [""]


@pytest.mark.parametrize("late", [False, True])
def test_a_member_that_was_lost_goes_on_in_its_part(lone: Members, *, late: bool) -> None:
    first = round_alone(lone, 2)
    lone.world.cut(2)
    lone.world.pass_time(RETURN_WINDOW if late else RETURN_WINDOW / 2)
    lone.enter(3, parts=("own",), outcomes=(first,))
    offer = a.AverageOffer("own", 1, first.reached, 1.0, b"f", "float32[3]")
    lone.say(3, offer)
    lone.world.pass_time(RETURN_WINDOW)
    [decision] = lone.told(3)
    assert isinstance(decision, a.AverageDecision)
    assert decision.before == first.reached


def test_a_message_about_a_part_looks_at_that_part_alone(
    members: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    look = Histories.look_for_last

    def noted(self: Histories, room: Room, name: str, *rest: Any) -> None:
        seen.append(name)
        look(self, room, name, *rest)

    monkeypatch.setattr(Histories, "look_for_last", noted)
    members.enter(1, parts=tuple("xyz"))
    seen.clear()
    members.offer(1, part="y")
    members.told(1, a.AverageWithdraw("y", 1))
    assert seen == ["y", "y"]
    members.enter(2, parts=("z",))
    assert seen[2:] == ["x", "y", "z"]


@pytest.mark.parametrize("first", ["x", "y"])
def test_each_part_closes_in_its_time(members: Members, first: str) -> None:
    """The coordinator has one timer for all parts of an averager."""
    members.enter(1, 2, 3, parts=("x", "y"))
    for part in sorted(("x", "y"), key=lambda part: part != first):
        members.offer(1, part=part)
        members.offer(2, part=part)
        members.world.pass_time(0.5)
    [decision] = members.told(1)
    assert decision.part == first
    members.world.pass_time(0.5)
    [decision] = members.told(1)
    assert decision.part != first
