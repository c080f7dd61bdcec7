"""Channels of weights: their last minutes, and what the page is told of them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from surveyed import channel, found, participant

from aiodist_server import channels as limits
from aiodist_server.channels import Channels
from aiodist_server.history import MOST_EVENTS, MOST_POINTS, WINDOW

PUBLISHER = participant(0, version=7, behind=0.0, lag=0, sent=500) | {"publishes": True}


def answer(*channels: dict[str, Any]) -> dict[str, Any]:
    return found() | {"channels": list(channels)}


def plain(known: Channels, last: dict[str, Any], now: float) -> Any:
    return json.loads(json.dumps(known.plain(last, now)))


def test_who_has_which_version_and_what_happened() -> None:
    known = Channels()
    named = participant(2, received=100) | {"name": "server 2"}
    silent = participant(3) | {"said": None, "name": "channel policy"}
    known.take(answer(channel(PUBLISHER, named, participant(1), newest=6)), 10.0)
    later = participant(2, received=500, behind=5.0) | {"name": "server 2"}
    last = answer(channel(PUBLISHER, later, silent))
    known.take(last, 12.0)
    [one] = plain(known, last, 15.0)
    assert (one["name"], one["newest"], one["nbytes"], one["count"]) == ("policy", 7, 1000, 2)
    [out] = one["publishers"]
    assert (out["name"], out["said"]["sent"]) == ("pid 100 on h", 500)
    assert [(taker["name"], taker["where"]) for taker in one["subscribers"]] == [
        ("pid 103 on h", "pid 103 on h"),  # of which nothing is heard
        ("server 2", "pid 102 on h"),
    ]
    assert one["series"] == {"ago": [5.0, 3.0], "behind": [3.0, 5.0], "received": [None, 200.0]}
    assert [event["text"] for event in one["events"]] == [
        "version 7 is published", "pid 101 on h is gone", "pid 103 on h came",
    ]  # fmt: skip
    assert "id2" not in json.dumps(one)
    assert plain(known, last, 12.0 + WINDOW)[0]["events"] == []


def test_what_a_subscriber_received_before_counts_for_no_rate() -> None:
    """It is silent for one look, or has come back to a coordinator that starts again."""
    known = Channels()
    silent = participant(1) | {"said": None}
    looks = [(participant(1, received=10**11),), (silent,)]
    looks += [(participant(1, received=10**11 + 6), participant(2, received=10**11))]
    for now, participants in enumerate(looks):
        last = answer(channel(*participants))
        known.take(last, 2.0 * now)
    assert plain(known, last, 4.0)[0]["series"]["received"] == [None, 0.0, 3.0]
    known.take(answer(channel()), 6.0)
    assert not known._pasts["policy", "r"].received


def test_a_participant_keeps_its_number() -> None:
    """The page knows by it which row is whose."""
    known = Channels()
    last = answer(channel(participant(1), participant(2)))
    known.take(last, 1.0)
    before = {one["name"]: one["key"] for one in plain(known, last, 1.0)[0]["subscribers"]}
    last = answer(channel(participant(3), participant(2)))
    known.take(last, 2.0)
    after = {one["name"]: one["key"] for one in plain(known, last, 2.0)[0]["subscribers"]}
    assert after["pid 102 on h"] == before["pid 102 on h"]
    assert after["pid 103 on h"] not in before.values()


def test_who_is_furthest_behind_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MOST_PARTICIPANTS", 2)
    takers = [participant(number, behind=float(number % 4)) for number in range(8)]
    known, last = Channels(), answer(channel(*takers))
    known.take(last, 1.0)
    [one] = plain(known, last, 1.0)
    assert [taker["said"]["behind"] for taker in one["subscribers"]] == [3.0, 3.0]
    assert one["left_out"] == 6


def test_it_stays_small() -> None:
    """However many channels there are, and however long they live."""
    known = Channels()
    for now in range(3 * MOST_POINTS):
        many = [channel(participant(now), name=f"c{number}") for number in range(40)]
        known.take(answer(*many), float(now))
    shown = known.plain(answer(*many), float(now))
    assert len(shown) == limits.MOST_CHANNELS == len(known._pasts)
    assert all(len(one["series"]["ago"]) <= MOST_POINTS for one in shown)
    assert all(len(one["events"]) <= MOST_EVENTS for one in shown)
    known.take(answer(), float(now + 1))
    assert known._pasts == {}
    assert known.plain(answer(), float(now + 1)) == []
