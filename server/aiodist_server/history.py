"""What happened in the last minutes, in bounded memory: what the page draws.

`History.take` gets each answer of `Coordinator.survey`, and `History.note` what the coordinator
notes meanwhile. Pure: the caller passes the time, of a clock that does not jump.

It takes at most `MOST_BYTES`, for any number and names of groups and ranks. Old entries go, and the
oldest makes room for a new one. But if the largest number of groups or members is kept, further
ones have no history.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

from aiodist.membership import rates, words
from aiodist.membership.group import ranks_text
from aiodist.membership.rates import Counted, Rate
from aiodist.wire.activity import bits_of, ranks_in
from aiodist.wire.averaging import averager_of
from aiodist.wire.channels import channel_of
from aiodist_server.states import states

WINDOW = 300.0
"""Seconds that are kept."""

MOST_GROUPS = 64
MOST_ROWS = 4096
"""The most members, of all groups."""
MOST_SPANS = 8192
MOST_POINTS = 160
"""The most points of one group, and so of its plots."""
MOST_EVENTS = 64
"""The most events of one group, and of those without a known group."""
MOST_TEXT = 256
"""The most characters of one text."""
MOST_BYTES = 32 << 20
"""The most bytes of all that. Texts may have four bytes a character."""

_TOGETHER = 1.0
"""Seconds in which the same event of several ranks counts as one."""

GroupKey = tuple[str, str]
"""Name and run id."""


class Point(NamedTuple):
    """A group at one time.

    `slowest`, `calls` and `fastest`: collectives a second, of the slowest, the median and the
    fastest rank. `sent` and `received`: bytes a second of all its ranks. `wait`: seconds of the
    longest wait for others. None: not known.
    """

    when: float
    slowest: float | None
    calls: float | None
    fastest: float | None
    sent: float | None
    received: float | None
    wait: float


@dataclass(slots=True)
class Span:
    """A rank was in one `State` from `start` to `end`."""

    start: float
    end: float
    kind: str
    text: str


@dataclass(slots=True)
class Event:
    """An event of a group. `ranks` are those it happened to, as bits. `fields` has the group if it
    is not known."""

    when: float
    kind: str
    ranks: int
    fields: Mapping[str, Any]

    @property
    def text(self) -> str:
        text = words.happened(self.kind, ranks_text(ranks_in(self.ranks)), self.fields)
        group = self.fields.get("group")
        return (f"group {group!r}: {text}" if group else text)[:MOST_TEXT]


@dataclass(slots=True)
class Row:
    """One member. `number` names it here, because only holders of the token may see its id."""

    number: int
    rank: int
    name: str
    host: str
    pid: int
    came: float
    gone: float | None = None  # when it stopped being a member
    how: str = ""  # how it went: "lost", "left", …; "": it is there, or that is not known
    reason: str = ""
    spans: deque[Span] = field(default_factory=deque)
    counts: Counted | None = None  # the last counts that it told, and when
    rate: Rate | None = None  # None: not known


class GroupHistory:
    """One group, also after its end."""

    def __init__(self, key: GroupKey) -> None:
        self.name, self.run_id = key
        self.ended: float | None = None  # when; None: it is there
        self.rows: dict[str, Row] = {}  # by the id of the member, in the order in which they came
        self.points: deque[Point] = deque(maxlen=MOST_POINTS)
        self.events: deque[Event] = deque(maxlen=MOST_EVENTS)

    def here(self) -> Iterator[Row]:
        """Return the rows of present members."""
        return (row for row in self.rows.values() if row.gone is None)


class History:
    """The history of all groups.

    `groups` is by key, in the order in which they came. `events` are those of no known group.
    """

    def __init__(self) -> None:
        self.groups: dict[GroupKey, GroupHistory] = {}
        self.events: deque[Event] = deque(maxlen=MOST_EVENTS)
        self._rows = 0  # how many, in all groups
        self._numbers = 0  # of rows so far
        # All spans, by the time at which they were noted, each with its row.
        self._spans: deque[tuple[Row, Span]] = deque()

    def take(self, found: Mapping[str, Any], now: float) -> None:
        """Take in an answer of `Coordinator.survey`."""
        there = set()
        for plain in found["groups"]:
            if plain["channel"] or plain.get("averager"):
                continue  # see `aiodist_server.channels` and `aiodist_server.averagers`
            key = plain["name"], plain["run_id"]
            there.add(key)
            group = self._group(key)
            if group is not None:
                group.ended = None
                self._take_group(group, plain, now)
        for key, group in self.groups.items():
            if key not in there:
                self._end(group, now)
        self._forget(now - WINDOW)

    def note(self, kind: str, fields: Mapping[str, Any], now: float, member: str = "") -> bool:
        """Take in what the coordinator noted: see `aiodist.membership.effects.Note`.

        Returns whether it is an event here. Those of channels and averagers are not.
        """
        fields = {name: _short(value) for name, value in fields.items()}
        key = fields.pop("group", ""), fields.pop("run_id", "")
        if channel_of(key[0]) or averager_of(key[0]):
            return False
        rank = fields.pop("rank", None)
        # A process that is refused makes no group.
        group = self.groups.get(key) if kind.endswith("refused") else self._group(key)
        if group is None:
            fields["group"] = key[0]
        ranks = 0 if rank is None else bits_of([rank])
        _add(self.events if group is None else group.events, Event(now, kind, ranks, fields))
        if group is None:
            return True
        if kind == "deleted":
            self._end(group, now)
        elif (row := group.rows.get(member)) is not None:  # a row may have an older rank
            row.gone, row.how, row.reason = now, kind, fields.get("reason", "")
        return True

    # Inside.

    def _group(self, key: GroupKey) -> GroupHistory | None:
        """Return the group of that name, made if need be; None: there is no room for it."""
        if key in self.groups:
            return self.groups[key]
        if len(self.groups) >= MOST_GROUPS:
            ended = [(one.ended, key) for key, one in self.groups.items() if one.ended is not None]
            if not ended:
                return None
            self._drop(min(ended)[1])
        group = self.groups[key] = GroupHistory(key)
        return group

    def _drop(self, key: GroupKey) -> None:
        self._rows -= len(self.groups.pop(key).rows)

    def _take_group(self, group: GroupHistory, plain: Mapping[str, Any], now: float) -> None:
        there = states(plain)
        for member in plain["members"]:
            row = self._row(group, member, now)
            if row is None:
                continue
            row.rank = member["rank"]
            if member["doing"] is not None:
                counts = rates.counted(member["doing"], now)
                row.rate, row.counts = rates.between(row.counts, counts), counts
            state = there.get(row.rank)
            if state is not None:
                self._span(row, now - state.seconds, now, state.kind, state.text)
        ids = {member["id"] for member in plain["members"]}
        for one, row in group.rows.items():
            if one not in ids and row.gone is None:
                row.gone = now
        waits = [state.seconds for state in there.values() if state.kind == "waits"]
        known = [row.rate for row in group.here() if row.rate is not None]
        if plain["members"]:
            group.points.append(_point(now, known, max(waits, default=0.0)))

    def _row(self, group: GroupHistory, member: Mapping[str, Any], now: float) -> Row | None:
        """Return the row of a member, made if need be; None: there is no room for it."""
        row = group.rows.get(member["id"])
        if row is not None:
            # It may have been away from the coordinator.
            row.gone, row.how, row.reason = None, "", ""
            return row
        if self._rows >= MOST_ROWS:
            return None
        self._rows += 1
        self._numbers += 1
        who = _short(member["name"]), _short(member["host"]), member["pid"]
        row = group.rows[member["id"]] = Row(self._numbers, member["rank"], *who, came=now)
        return row

    def _span(self, row: Row, start: float, end: float, kind: str, text: str) -> None:
        """Note that a row is in a state since `start`: extend its last span, or add one."""
        text = text[:MOST_TEXT]
        last = row.spans[-1] if row.spans else None
        if last is not None:
            if (last.kind, last.text) == (kind, text) and start <= last.end:
                last.end = end
                return
            start = max(start, last.end)
        span = Span(max(start, end - WINDOW), end, kind, text)
        row.spans.append(span)
        self._spans.append((row, span))
        if len(self._spans) > MOST_SPANS:
            self._forget_span()

    def _forget_span(self) -> None:
        row, _ = self._spans.popleft()
        row.spans.popleft()  # it is the oldest of its row as well

    def _end(self, group: GroupHistory, now: float) -> None:
        if group.ended is None:
            group.ended = now
            for row in group.here():
                row.gone = now

    def _forget(self, before: float) -> None:
        """Drop everything that ended before that time."""
        while self._spans and self._spans[0][1].end < before:
            self._forget_span()
        for key, group in list(self.groups.items()):
            if group.ended is not None and group.ended < before:
                self._drop(key)
                continue
            while group.points and group.points[0].when < before:
                group.points.popleft()
            old = [one for one, row in group.rows.items() if row.gone and row.gone < before]
            for one in old:
                del group.rows[one]
            self._rows -= len(old)


def _short(value: Any) -> Any:
    return value[:MOST_TEXT] if isinstance(value, str) else value


def _add(events: deque[Event], event: Event) -> None:
    """Add an event. An event of many ranks at once is one."""
    last = events[-1] if events else None
    alike = (
        last is not None
        and event.ranks
        and last.ranks
        and last.kind == event.kind
        and event.when - last.when < _TOGETHER
        and all(last.fields.get(name) == event.fields.get(name) for name in ("group", "reason"))
    )
    if last is not None and alike:
        last.ranks |= event.ranks
        last.fields = {name: value for name, value in last.fields.items() if name != "who"}
    else:
        events.append(event)


def _point(now: float, known: list[Rate], wait: float) -> Point:
    if not known:
        return Point(now, None, None, None, None, None, wait)
    calls = [rate.calls for rate in known]
    sent, received = sum(rate.sent for rate in known), sum(rate.received for rate in known)
    return Point(now, min(calls), median(calls), max(calls), sent, received, wait)
