"""What members are doing: how the coordinator asks, and what it makes of the answers."""

from __future__ import annotations

from typing import Any

import pytest

from aiodist.membership.survey import ANSWER_SECONDS, MOST_ASKERS, what
from aiodist.wire.activity import Activity, Inquire, Seen, SeenRequest, Wait, packed
from aiodist.wire.messages import Failed, Failure, Renew, Status, StatusRequest

ASK = StatusRequest(ask_members=True)
STRANGER = 99


def wait(*missing: int, seconds: float = 5.0, seq: int | None = 3) -> Wait:
    return Wait(b"context1", "g", 1, "all_reduce", "None", seq, seconds, packed(missing))


@pytest.fixture
def two(world: Any) -> Any:
    world.join(1, rank=0, lease=10.0)
    world.join(2, rank=1, lease=10.0)
    world.read(1)
    return world


def answer(world: Any, conn: int, activity: Activity) -> None:
    assert world.say(conn, activity, request=0) == []


def group_of(reply: Any) -> dict[str, Any]:
    assert isinstance(reply, Status)
    [group] = reply.status["groups"]
    return group


def test_members_are_asked_and_the_culprit_is_named(two: Any) -> None:
    assert two.say(STRANGER, ASK) == []
    assert two.read(1) == Inquire()
    assert two.read(2) == Inquire()
    answer(two, 1, Activity(waits=(wait(1),)))
    answer(two, 2, Activity(places=("t.py:5 in main",), last="all_reduce #2 done"))
    group = group_of(two.read(STRANGER))
    first, second = group["members"]
    [waiting] = first["doing"]["waits"]
    assert (waiting["what"], waiting["seconds"], waiting["missing"]) == (
        "all_reduce #3",
        5.0,
        "rank 1",
    )
    assert second["doing"]["places"] == ["t.py:5 in main"]
    [finding] = group["findings"]
    assert finding["culprits"] == (1,)
    assert finding["held"] == ({"what": "all_reduce #3", "ranks": (0,), "seconds": 5.0},)


@pytest.mark.parametrize(
    ("tag", "text"),
    [
        (None, "split #3"),
        ("b'", 'split tag "b\'" #3'),
        (b"made", "split"),
        (7, "split tag 7 #3"),
    ],
)
def test_tags_of_the_program_are_shown(tag: object, text: str) -> None:
    assert what(Wait(b"context1", "g", 1, "split", repr(tag), 3, 5.0, packed([1]))) == text


def test_who_has_entered_is_not_missing(two: Any) -> None:
    two.say(STRANGER, ASK)
    answer_first = Activity(waits=(wait(1),))  # it has not heard of rank 1 yet
    two.say(1, answer_first, request=0)
    two.say(2, Activity(waits=(wait(0),)), request=0)
    group = group_of(two.read(STRANGER))
    assert [member["doing"]["waits"][0]["missing"] for member in group["members"]] == ["", ""]
    assert group["findings"] == []


def test_who_does_not_answer_is_silent(two: Any) -> None:
    two.pass_time(4.0)
    two.say(1, Renew(), request=0)
    two.say(STRANGER, ASK)
    two.say(1, Activity(waits=(wait(1),)), request=0)
    assert two.read(STRANGER) == []
    two.pass_time(ANSWER_SECONDS)
    group = group_of(two.read(STRANGER))
    assert group["members"][1]["doing"] is None
    assert group["members"][1]["silent"] == pytest.approx(4.0 + ANSWER_SECONDS)
    assert [finding["culprits"] for finding in group["findings"]] == [(1,)]


def test_a_busy_loop_has_said_so_before(two: Any) -> None:
    two.say(2, Activity(busy=2.0, places=("t.py:57 in step",)), request=0)
    two.pass_time(3.0)
    two.say(STRANGER, ASK)
    two.say(1, Activity(waits=(wait(1),)), request=0)
    assert two.read(STRANGER) == []  # it may still answer
    two.pass_time(ANSWER_SECONDS)
    group = group_of(two.read(STRANGER))
    doing = group["members"][1]["doing"]
    assert doing["busy"] == pytest.approx(2.0 + 3.0 + ANSWER_SECONDS)
    assert doing["places"] == ["t.py:57 in step"]
    assert [finding["culprits"] for finding in group["findings"]] == [(1,)]


def test_a_loop_that_turns_again_is_not_busy(two: Any) -> None:
    two.say(2, Activity(busy=2.0), request=0)
    two.say(2, Renew(), request=0)
    two.say(STRANGER, ASK)
    two.pass_time(ANSWER_SECONDS)
    assert group_of(two.read(STRANGER))["members"][1]["doing"] is None


def test_an_answer_is_not_kept(two: Any) -> None:
    two.say(STRANGER, ASK)
    for conn in (1, 2):
        two.say(conn, Activity(last="old"), request=0)
    two.read(STRANGER)
    two.say(STRANGER, ASK)
    two.pass_time(ANSWER_SECONDS)
    assert [member["doing"] for member in group_of(two.read(STRANGER))["members"]] == [None, None]


def test_members_are_asked_once_for_all_who_want_to_know(two: Any) -> None:
    two.say(STRANGER, ASK)
    two.say(STRANGER + 1, ASK)
    assert two.read(1) == Inquire()
    for conn in (1, 2):
        two.say(conn, Activity(), request=0)
    assert isinstance(two.read(STRANGER), Status)
    assert isinstance(two.read(STRANGER + 1), Status)


def test_who_goes_is_not_waited_for(two: Any) -> None:
    two.say(STRANGER, ASK)
    two.say(1, Activity(), request=0)
    two.cut(2)
    two.pass_time(0.0)
    assert [member["rank"] for member in group_of(two.read(STRANGER))["members"]] == [0]


def test_who_asked_and_went_is_forgotten(two: Any) -> None:
    two.say(STRANGER, ASK)
    two.cut(STRANGER)
    two.pass_time(ANSWER_SECONDS)
    assert two.read(STRANGER) == []


def test_nobody_to_ask(world: Any) -> None:
    assert world.say(STRANGER, ASK).status["groups"] == []


def test_askers_are_bounded(two: Any) -> None:
    for number in range(MOST_ASKERS + 1):
        two.say(STRANGER + number, ASK)
    assert isinstance(two.read(STRANGER), Status)  # the oldest gets what there is
    assert two.read(STRANGER + 1) == []


def test_a_member_asks_about_others(two: Any) -> None:
    assert two.say(1, SeenRequest((1,))) == []
    assert two.read(2) == Inquire()
    two.say(2, Activity(places=("t.py:7 in f",), waits=(wait(0, seconds=1.5),)), request=0)
    assert two.read(1) == Seen((1,), ("in all_reduce #3 for 1.5 s at t.py:7 in f",))


def test_what_is_known_of_others_in_words(two: Any) -> None:
    two.say(2, Activity(busy=2.0, places=("t.py:7 in f",)), request=0)
    two.say(1, SeenRequest((1, 5)))
    two.pass_time(ANSWER_SECONDS)
    text = "its event loop has not turned for at least 3.0 s at t.py:7 in f"
    assert two.read(1) == Seen((1, 5), (text, ""))
    two.say(2, Renew(), request=0)
    two.say(1, SeenRequest((1,)))
    two.pass_time(ANSWER_SECONDS)
    text = f"no answer; its last sign of life came {ANSWER_SECONDS:.1f} s ago"
    assert two.read(1).texts == (text,)
    two.say(1, SeenRequest((1,)))
    two.say(2, Activity(last="barrier #1 done"), request=0)
    assert two.read(1).texts == ("in no operation (last: barrier #1 done)",)


def test_who_asks_says_for_how_long(two: Any) -> None:
    two.say(1, SeenRequest((1,), 0.25))
    two.pass_time(0.25)
    assert two.read(1).texts == ("no answer; its last sign of life came 0.2 s ago",)
    two.say(1, SeenRequest((1,), 2 * ANSWER_SECONDS))
    two.pass_time(ANSWER_SECONDS)
    assert isinstance(two.read(1), Seen)


def test_what_a_member_said_before(two: Any) -> None:
    two.say(1, SeenRequest((1,)))
    two.say(2, Activity(places=("t.py:7 in f", "g"), waits=(wait(0, seconds=1.5),)), request=0)
    assert isinstance(two.read(1), Seen)
    two.pass_time(0.5)
    two.say(1, SeenRequest((1,), 0.25))
    two.pass_time(0.25)
    assert two.read(1).texts == (
        "no answer; its last sign of life came 0.8 s ago; 0.8 s ago it was in all_reduce #3 for "
        "1.5 s at t.py:7 in f",
    )


def test_only_members_ask_about_others(two: Any) -> None:
    reply = two.say(STRANGER, SeenRequest((0,)))
    assert isinstance(reply, Failed)
    assert reply.kind is Failure.NOT_A_MEMBER
