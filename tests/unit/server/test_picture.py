"""What the page is told: what there is now, and the last minutes."""

from __future__ import annotations

import json
from typing import Any

from surveyed import doing, finding, found, group, member, wait

from aiodist_server import picture as limits
from aiodist_server.history import WINDOW, History
from aiodist_server.picture import picture


def shown(*groups: dict[str, Any], history: History | None = None, now: float = 100.0) -> Any:
    """As the page reads it."""
    answer = found(*groups)
    known = History() if history is None else history
    known.take(answer, now)
    return json.loads(json.dumps(picture(answer, known, now)))


def test_a_rank_that_waits_and_one_that_holds_it_up() -> None:
    places = ["train.py:3 in load", "train.py:9 in main"]
    history = History()
    ranks = [
        member(0, doing=doing(waits=[wait(4.0, missing="rank 1")])),
        member(1, doing=doing(places=places)),
    ]
    history.take(found(group(*ranks)), 90.0)
    history.note("formed", {"group": "train", "run_id": "r", "epoch": 1, "size": 2}, 80.04)
    (one,) = shown(group(*ranks, findings=[finding(1)]), history=history)["groups"]
    assert (one["name"], one["run"], one["state"]) == ("train", "r", "epoch 1, 2 of 2 ranks")
    assert not one["ended"]
    assert one["findings"] == [
        {
            "text": "rank 1 holds up others",
            "held": "ranks 0-1 in barrier #3 for 4 s",
            "culprits": [{"rank": 1, "who": "n1", "doing": "in no operation", "places": places}],
            "left_out": 0,
        }
    ]
    first, second = one["rows"]
    assert first["doing"] == "4 s in barrier #3, for rank 1"
    assert first["spans"] == [
        [14.0, 10.0, "waits", "in barrier #3, for rank 1"],
        [4.0, 0.0, "waits", "in barrier #3, for rank 1"],
    ]
    assert (second["kind"], second["places"], second["rate"]) == ("culprit", places, [0.0, 0, 0])
    assert one["events"] == [{"ago": 20.0, "kind": "formed", "text": "epoch 1 begins with 2 ranks"}]
    assert one["series"] == {
        "ago": [10.0, 0.0], "slowest": [None, 0.0], "calls": [None, 0.0], "fastest": [None, 0.0],
        "sent": [None, 0.0], "received": [None, 0.0], "wait": [4.0, 4.0],
    }  # fmt: skip


def test_no_ids_are_told() -> None:
    waiting = [{"rank": 1, "id": "joiner-id", "name": "", "host": "h", "pid": 7}]
    text = json.dumps(shown(group(member(0, id="member-id"), waiting=waiting)))
    assert "member-id" not in text
    assert "joiner-id" not in text


def test_who_is_not_there() -> None:
    joiners = [
        {"rank": rank, "id": "", "name": name, "host": "h", "pid": 7}
        for rank, name in [(None, "n4"), (2, "")]
    ]
    (one,) = shown(group(member(0), lost={"1": "it died"}, absent=[2, 3], waiting=joiners))[
        "groups"
    ]
    assert one["notices"] == [
        {"kind": "lost", "text": "rank 1 is lost: it died"},
        {"kind": "absent", "text": "ranks 2-3 may still come back to the coordinator"},
        {"kind": "waiting", "text": "n4 waits to join"},
        {"kind": "waiting", "text": "pid 7 on h waits to join as rank 2"},
    ]


def test_of_many_some_are_listed() -> None:
    lost = {str(rank): "gone" for rank in range(40)}
    (one,) = shown(group(member(50), lost=lost, findings=[finding(*[50] * 20)]))["groups"]
    assert [notice["text"] for notice in one["notices"]][-1] == "and 24 more"
    assert len(one["notices"]) == limits.MOST_LISTED + 1
    assert len(one["findings"][0]["culprits"]) == limits.MOST_LISTED
    assert one["findings"][0]["left_out"] == 4


def test_a_group_that_forms() -> None:
    (one,) = shown(group(epoch=None, waiting=[{"rank": 0, "name": "n0"}]))["groups"]
    assert one["state"] == "forming (size 3), 1 here"
    assert one["rows"] == []
    assert one["series"]["ago"] == []


def test_who_went_is_shown_beside_who_is_there() -> None:
    history = History()
    history.take(found(group(member(0), member(1))), 80.0)
    fields = {"group": "train", "run_id": "r", "rank": 1, "reason": "it died"}
    history.note("lost", fields, 90.0, "id1")
    survey = found(group(member(0), member(1), findings=[finding(1)]))
    (one,) = picture(survey, history, 95.0)["groups"]
    rows = [(row["rank"], row["how"], row["doing"], row["kind"]) for row in one["rows"]]
    assert rows == [(0, "", "in no operation", ""), (1, "lost", "lost: it died", "")]
    again = member(1, id="another", name="new")
    (one,) = shown(group(member(0), again), history=history)["groups"]
    rows = [(row["rank"], row["name"], row["gone"], row["doing"]) for row in one["rows"]]
    assert rows == [
        (0, "n0", None, "in no operation"),
        (1, "n1", 10.0, "lost: it died"),
        (1, "new", None, "in no operation"),
    ]
    assert len({row["key"] for row in one["rows"]}) == 3


def test_a_group_that_has_ended_comes_last() -> None:
    history = History()
    history.take(found(group(member(0), name="old")), 80.0)
    groups = [group(member(0), name="well"), group(member(0), name="bad", lost={"1": "gone"})]
    said = shown(*groups, history=history)
    assert [(one["name"], one["ended"]) for one in said["groups"]] == [
        ("bad", False), ("well", False), ("old", True),
    ]  # fmt: skip
    assert said["count"] == 2
    assert said["groups"][2]["state"] == "ended"
    assert [row["gone"] for row in said["groups"][2]["rows"]] == [0.0]


def test_of_many_groups_and_ranks_the_worst_are_shown() -> None:
    stuck = member(99, doing=doing(busy=3.0))
    large = group(*(member(rank) for rank in range(99)), stuck, name="large")
    small = [group(member(0), name=f"g{number:03}") for number in range(150)]
    said = shown(large, *small, group(member(0), name="bad", findings=[finding(0)]))
    assert [one["name"] for one in said["groups"][:3]] == ["bad", "large", "g000"]
    assert len(said["groups"]) == limits.MOST_GROUPS
    assert (len(said["others"]), said["others_left_out"]) == (limits.MOST_NAMES, 36)
    rows = said["groups"][1]["rows"]
    assert (len(rows), said["groups"][1]["rows_left_out"]) == (limits.MOST_RANKS, 36)
    assert [row["rank"] for row in rows] == [*range(63), 99]


def test_more_groups_than_are_remembered_are_shown_all_the_same() -> None:
    history = History()
    small = [group(member(0), name=f"g{number:03}") for number in range(64)]
    history.take(found(*small), 90.0)
    said = shown(*small, group(member(0), name="bad", findings=[finding(0)]), history=history)
    (row,) = said["groups"][0]["rows"]
    assert (row["key"], row["kind"], row["spans"]) == ("r0", "culprit", [])


def test_what_is_too_old_is_not_shown() -> None:
    history = History()
    waits = member(0, doing=doing(waits=[wait(1.5)]))
    long = member(1, doing=doing(busy=2.0))
    history.take(found(group(long, waits)), 10.0)
    history.note("formed", {"group": "train", "run_id": "r", "epoch": 1, "size": 2}, 10.0)
    (one,) = shown(group(long, member(0)), history=history, now=20.0 + WINDOW)["groups"]
    assert (one["rows"][0]["spans"], one["events"]) == ([], [])


def test_refusals_are_of_no_group() -> None:
    history = History()
    history.note("join refused", {"group": "x", "kind": "taken", "who": "n1"}, 99.0)
    assert shown(history=history)["events"] == [
        {"ago": 1.0, "kind": "join refused", "text": "group 'x': n1 may not join: taken"}
    ]


def test_what_codecs_have_saved() -> None:
    ranks = [member(0, doing=doing(saved=2000)), member(1, doing=doing(saved=1))]
    assert shown(group(*ranks, member(2, doing=None)))["groups"][0]["saved"] == 2001
