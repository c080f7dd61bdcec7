"""Channels of weights: their last minutes, and what the page shows of them, as plain data.

Pure, as `aiodist_server.history`: the caller passes answers of `Coordinator.survey`, and the time.
What is known of a channel is forgotten with it.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

from aiodist.wire.channels import store_of
from aiodist_server.history import MOST_EVENTS, MOST_POINTS, MOST_TEXT, WINDOW

MOST_CHANNELS = 16
"""How many channels are shown and kept."""
MOST_PARTICIPANTS = 64
"""How many subscribers of one channel are shown: those that are furthest behind."""

Key = tuple[str, str]
"""Name and run id."""

Plain = Mapping[str, Any]
"""What `aiodist.membership.channels` says of a channel, or of one of its participants."""


class Point(NamedTuple):
    """A channel at one time.

    `behind`: how many seconds its last subscriber was behind. `received`: bytes a second that all
    subscribers received. A subscriber counts from its second look on. None: not known.
    """

    when: float
    behind: float | None
    received: float | None


class _Past:
    """What is known of one channel."""

    def __init__(self) -> None:
        self.points: deque[Point] = deque(maxlen=MOST_POINTS)
        self.events: deque[tuple[float, str, str]] = deque(maxlen=MOST_EVENTS)
        self.newest: int | None = None
        self.names: dict[str, str] = {}  # of the participants, by id
        # Numbers of the participants, because only holders of the token may see ids.
        self.numbers: dict[str, int] = {}
        self.received: dict[str, int] = {}  # as told by participants, by id
        self._came = itertools.count()

    def take(self, channel: Plain, now: float, *, first: bool) -> None:
        there = {one["id"]: named(one, channel) for one in channel["participants"]}
        # Participants that were there before the first look have not come just now.
        if not first:
            for one in there.keys() - self.names.keys():
                self.events.append((now, "came", f"{there[one]} came"))
            for one in self.names.keys() - there.keys():
                self.events.append((now, "gone", f"{self.names[one]} is gone"))
            if channel["newest"] is not None and channel["newest"] != self.newest:
                self.events.append((now, "version", f"version {channel['newest']} is published"))
        self.names, self.newest = there, channel["newest"]
        before = self.numbers
        self.numbers = {one: before[one] if one in before else next(self._came) for one in there}
        said = {one["id"]: one["said"] for one in subscribers(channel) if one["said"] is not None}
        received = {one: fields["received"] for one, fields in said.items()}
        rate = None
        if self.points and now > self.points[-1].when:
            # One that comes back to a coordinator says all that it has ever received.
            known = received.keys() & self.received.keys()
            moved = sum(received[one] - self.received[one] for one in known)
            rate = moved / (now - self.points[-1].when)
        last = self.received | received  # also of participants that are silent now
        self.received = {one: count for one, count in last.items() if one in there}
        behind = max((fields["behind"] for fields in said.values()), default=None)
        self.points.append(Point(now, behind, rate))


class Channels:
    """The last minutes of each channel."""

    def __init__(self) -> None:
        self._pasts: dict[Key, _Past] = {}

    def take(self, found: Plain, now: float) -> None:
        """Take in an answer of `Coordinator.survey`."""
        before = self._pasts
        self._pasts = {}
        for channel in found["channels"][:MOST_CHANNELS]:
            key = channel["name"], channel["run_id"]
            past = self._pasts[key] = before.get(key) or _Past()
            past.take(channel, now, first=key not in before)

    def plain(self, found: Plain, now: float) -> list[dict[str, Any]]:
        """Return what the page shows, with times as seconds ago. `found` was taken before."""
        shown = found["channels"][:MOST_CHANNELS]
        return [_shown(one, self._pasts[one["name"], one["run_id"]], now) for one in shown]


def subscribers(channel: Plain) -> list[Plain]:
    """Return the subscribers: silent ones first, then those that are furthest behind."""

    def urgency(one: Plain) -> float:
        return -float("inf") if one["said"] is None else -float(one["said"]["behind"])

    return sorted((one for one in channel["participants"] if not one["publishes"]), key=urgency)


def publishers(channel: Plain) -> list[Plain]:
    """Return the publishers. There is one, except while another one takes its place."""
    return [one for one in channel["participants"] if one["publishes"]]


def _shown(channel: Plain, past: _Past, now: float) -> dict[str, Any]:
    takers = subscribers(channel)

    def participants(them: list[Plain]) -> list[dict[str, Any]]:
        return [
            {
                "key": past.numbers[one["id"]],
                "name": past.names[one["id"]],
                "where": _where(one),
                "said": one["said"],
            }
            for one in them[:MOST_PARTICIPANTS]
        ]

    points = [point for point in past.points if now - point.when < WINDOW]
    return {
        "name": channel["name"],
        "run": channel["run_id"],
        "newest": channel["newest"],
        "nbytes": channel["nbytes"],
        "count": len(takers),
        "publishers": participants(publishers(channel)),
        "subscribers": participants(takers),
        "left_out": max(0, len(takers) - MOST_PARTICIPANTS),
        "series": {
            "ago": [round(now - point.when, 1) for point in points],
            "behind": [point.behind for point in points],
            "received": [point.received for point in points],
        },
        "events": [
            {"ago": round(now - when, 1), "kind": kind, "text": text}
            for when, kind, text in reversed(past.events)
            if now - when < WINDOW
        ],
    }


def named(one: Plain, channel: Plain) -> str:
    """Return the name of a participant, if its program gave it one; else its process."""
    is_given = one["name"] and one["name"] != store_of(channel["name"])
    return str(one["name"] if is_given else _where(one))[:MOST_TEXT]


def _where(one: Plain) -> str:
    return f"pid {one['pid']} on {one['host'] or 'an unknown host'}"
