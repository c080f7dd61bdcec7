"""Stalls: when the coordinator notes that one begins, and that it is over."""

from __future__ import annotations

from typing import Any

import pytest

from aiodist.membership.effects import Note
from aiodist.membership.survey import ANSWER_SECONDS
from aiodist.wire.activity import Activity, Inquire, Seen, Stalled, Wait, packed
from aiodist.wire.messages import Failed, Failure, Leave, Left, StoreWait, Withdrawn
from aiodist.wire.recovery import Purpose, Vote


def wait(*missing: int) -> Wait:
    return Wait(b"context1", "g", 1, "all_reduce", "None", 3, 12.0, packed(missing))


class Notes(list[Any]):
    """The notes about stalls, as (event, fields)."""

    def take(self) -> list[tuple[str, dict[str, Any]]]:
        found = [(note.event, dict(note.fields)) for note in self if note.event.startswith("stall")]
        self.clear()
        return found


@pytest.fixture
def notes(world: Any, monkeypatch: pytest.MonkeyPatch) -> Notes:
    notes = Notes()
    step = world.machine.step

    def noted(event: Any, now: float) -> Any:
        effects = step(event, now)
        notes.extend(effect for effect in effects if isinstance(effect, Note))
        return effects

    monkeypatch.setattr(world.machine, "step", noted)
    return notes


@pytest.fixture
def three(world: Any, notes: Notes) -> Any:
    for conn in (1, 2, 3):
        world.join(conn, rank=conn - 1, size=3, lease=60.0)
    world.mail.clear()
    notes.clear()
    return world


def test_it_begins_with_the_first_and_is_over_with_the_last(three: Any, notes: Notes) -> None:
    assert three.say(1, Stalled(12.0, (wait(2),)), request=7) == []
    assert three.read(3) == Inquire()
    three.say(3, Activity(places=("t.py:5 in main",), last="all_reduce #2 done"), request=0)
    [(request, seen)] = three.mail.pop(1)
    assert (request, seen.ranks) == (7, (2,))
    assert "in no operation at t.py:5 in main" in seen.texts[0]
    [(event, fields)] = notes.take()
    assert event == "stalled"
    assert (fields["rank"], fields["what"], fields["missing"]) == (0, "all_reduce #3", "rank 2")
    assert fields["seconds"] == 12.0
    assert fields["why"].startswith("rank 2: in no operation at t.py:5")

    three.say(2, Stalled(13.0, (wait(2),)))
    three.say(3, Activity(), request=0)
    assert isinstance(three.read(2), Seen)
    assert notes.take() == []
    three.pass_time(20.0)
    three.say(1, Stalled(0.0), request=0)
    assert notes.take() == []
    three.say(2, Stalled(0.0), request=0)
    assert notes.take() == [("stall over", {"group": "g", "seconds": 32.0})]
    three.say(2, Stalled(0.0), request=0)
    assert notes.take() == []


def test_another_one_is_told_anew(three: Any, notes: Notes) -> None:
    for _ in range(2):
        three.say(1, Stalled(12.0, (wait(),)))
        three.say(1, Stalled(0.0), request=0)
    assert [event for event, _ in notes.take()] == ["stalled", "stall over"] * 2


@pytest.mark.parametrize("how", ["leaves", "is lost"])
def test_who_waits_may_go(three: Any, notes: Notes, how: str) -> None:
    three.say(1, Stalled(12.0, (wait(),)))
    if how == "leaves":
        assert three.say(1, Leave()) != Left  # and the Seen before it
    else:
        three.cut(1)
    assert [event for event, _ in notes.take()] == ["stalled", "stall over"]


def test_what_is_over_before_it_was_noted_is_not_told(three: Any, notes: Notes) -> None:
    three.say(1, Stalled(12.0, (wait(2),)))
    three.say(1, Stalled(0.0), request=0)
    three.pass_time(ANSWER_SECONDS)
    assert notes.take() == []


def test_what_a_rank_does_after_the_wait_is_no_cause(three: Any, notes: Notes) -> None:
    three.say(1, Stalled(12.0, (wait(1, 2),)))
    three.mail.clear()
    three.say(2, Activity(places=("t.py:9 in main",), last="all_reduce #3 done"), request=0)
    three.say(3, Activity(places=("t.py:5 in load",), last="all_reduce #2 done"), request=0)
    late = "in no operation at t.py:5 in load (last: all_reduce #2 done)"
    assert three.read(1) == Seen((1, 2), ("", late))
    [(_, fields)] = notes.take()
    assert (fields["missing"], fields["why"]) == ("ranks 1-2", f"rank 2: {late}")


def test_ranks_that_are_gone_are_not_missing(three: Any, notes: Notes) -> None:
    three.cut(3)
    three.say(1, Stalled(12.0, (wait(1, 2),)))
    three.say(2, Activity(), request=0)
    [(_, fields)] = notes.take()
    assert fields["missing"] == "rank 1"


def test_votes_and_keys_are_known_here(three: Any, notes: Notes) -> None:
    view = three.group()["epoch"]
    assert view == 1
    context = next(iter(three.views))
    three.say(1, Vote(context[:8], 0, Purpose.AGREE))
    three.say(1, Stalled(12.0))
    three.pass_time(ANSWER_SECONDS)
    assert three.mail.pop(1)[-1][1].ranks == (1, 2)
    [(_, fields)] = notes.take()
    assert (fields["what"], fields["missing"]) == ("agree #0", "ranks 1-2")
    three.say(1, Stalled(0.0), request=0)
    three.cut(1)
    notes.clear()

    three.say(2, StoreWait(("weights",)))
    three.say(2, Stalled(12.0))
    [(_, fields)] = notes.take()
    assert (fields["what"], fields["why"]) == ("store.wait", "key 'weights' is not set")


def test_who_waits_to_join_hears_how_far_the_group_has_come(world: Any, notes: Notes) -> None:
    world.join(1, rank=0, size=3)
    reply = world.say(1, Stalled(10.0))
    assert isinstance(reply, Withdrawn)
    assert reply.missing == (1, 2)
    assert reply.text == "the group is not complete: 1 of 3 have joined; missing: ranks 1-2"
    [(event, fields)] = notes.take()
    assert (event, fields["what"], fields["rank"]) == ("stalled", "join", 0)
    assert fields["why"] == reply.text
    world.pass_time(5.0)
    world.join(2, rank=1, size=3)
    world.join(3, rank=2, size=3)
    assert notes.take() == [("stall over", {"group": "g", "seconds": 15.0})]


def test_who_gives_up_joining_stalls_nobody(world: Any, notes: Notes) -> None:
    world.join(1, rank=0, size=3)
    world.say(1, Stalled(10.0))
    world.cut(1)
    assert [event for event, _ in notes.take()] == ["stalled", "stall over"]


def test_strangers_do_not_stall(world: Any, notes: Notes) -> None:
    failed = world.say(9, Stalled(10.0))
    assert isinstance(failed, Failed)
    assert failed.kind is Failure.NOT_A_MEMBER
    assert world.say(9, Stalled(0.0)) == []
    assert notes.take() == []
