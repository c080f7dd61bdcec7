"""Joins the files of traced ranks into one trace for Chrome's trace viewer and Perfetto.

This module has no I/O: parts in, events out. A part is what `aiodist.rank.tracing` writes for one
rank.

**One clock.** Each part has comparisons of its clock with that of a coordinator. Ranks of one host
have one clock, so all of theirs are used together, and no error comes between them. The common
clock is that of one coordinator. A host that was compared with two coordinators leads from one to
the other.

**Waiting and moving.** A collective ends on no rank before all ranks have called it. So a rank
waits until the last rank has called, and after that data moves. Starts and ends are enough to see
this, once the operations of all ranks are side by side.

**Whole nanoseconds.** Times are rounded once, in the common clock. If starts and durations were
rounded apart, slices would overlap by a nanosecond, and Perfetto leaves such slices out.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, NamedTuple

from aiodist.membership.group import ranks_text
from aiodist.recorder import MESSAGES, OF_WINDOWS
from aiodist.work import SENDS

FORMAT = 3
"""The version of the parts."""

_KINDS = ("collectives", "messages", "windows", "membership")
"""The kinds of tracks, in the order in which viewers show them."""
_LANES = 1 << 20
"""The numbers of threads of one kind. Perfetto sorts threads by number."""
_WINDOW = 5.0
"""Seconds. The best comparison of clocks in each such window is used."""
_DRIFT = 60.0
"""Seconds until clocks may have drifted by more than comparisons are wrong."""
_OP = re.compile(r"\b[A-Z]{2,}\b")
_DTYPE = re.compile(r"\b([a-z]+\d*)\[")


Track = tuple[int, int]
"""The index of its kind, and which of those it is that run at the same time."""
_MEMBERSHIP: Track = (_KINDS.index("membership"), 0)

Sample = Sequence[float]
"""A time on a clock in seconds, by how much another clock is ahead, and the greatest error of that.
"""


class Clock:
    """The clock of one host or coordinator, compared with the common one."""

    def __init__(self, samples: Iterable[Sample]) -> None:
        best: dict[int, Sample] = {}
        for sample in samples:
            window = int(sample[0] // _WINDOW)
            if window not in best or sample[2] < best[window][2]:
                best[window] = sample
        self._samples = [best[window] for window in sorted(best)]

    @property
    def error(self) -> float:
        """The most seconds by which it may be wrong at a comparison."""
        return max((error for _, _, error in self._samples), default=0.0)

    def common(self, when: float) -> int:
        """The common time in ns for the second `when` on this clock."""
        return round((when + self.ahead(when)) * 1e9)

    def ahead(self, when: float) -> float:
        """By how much the common clock is ahead; between comparisons, along a line."""
        samples = self._samples
        if not samples:
            return 0.0
        at = bisect_right(samples, when, key=lambda sample: sample[0])
        if at in (0, len(samples)):
            return samples[max(0, at - 1)][1]
        (t0, before, _), (t1, after, _) = samples[at - 1], samples[at]
        return before + (after - before) * (when - t0) / (t1 - t0)

    def through(self, samples: Iterable[Sample]) -> list[Sample]:
        """Turn comparisons of another clock with this one into comparisons with the common one."""
        return [
            (when, ahead + self.ahead(when + ahead), error + self.error)
            for when, ahead, error in samples
        ]


@dataclass(slots=True)
class Operation:
    """One operation of one rank, in common time, in ns. `process`: the number of its part."""

    process: int
    context: str
    group: str
    epoch: int
    rank: int
    size: int
    op: str
    tag: Any
    seq: int | None
    call: str
    peer: int | None
    nbytes: int
    start: int
    end: int
    state: str
    error: str
    plans: list[str]
    transport: str | None
    track: Track = (0, 0)
    waits_for: int | None = None
    moves: int | None = None  # when data began to move; None: unknown


class Joined(NamedTuple):
    """The trace to write; its numbers of ranks and operations; and the error of their clocks in
    seconds.

    In words: `clocks`, what is known of them; `incomplete`, the ranks that kept only their last
    operations ("": none).
    """

    trace: dict[str, Any]
    ranks: int
    operations: int
    error: float
    clocks: str
    incomplete: str


def join(parts: Sequence[Mapping[str, Any]]) -> Joined:
    """Join `parts` into one trace. Raises ValueError if one is no part, or has another version."""
    for part in parts:
        if part.get("aiodist") != FORMAT:
            raise ValueError(f"expected a trace of version {FORMAT}, not {part.get('aiodist')!r}")
    parts = sorted(parts, key=lambda part: (part["group"], part["rank"], part["pid"]))
    clocks = _clocks(parts)
    # Each clock is compared with the common one, and two may both be wrong.
    errors = sorted(clock.error for clock in clocks.values())
    error = sum(errors[-2:]) if len(errors) > 1 else 0.0
    apart = {part["machine"]: part["host"] for part in parts if part["machine"] not in clocks}
    clocks |= dict.fromkeys(apart, Clock([]))
    operations = [
        one for process, part in enumerate(parts) for one in _operations(process, part, clocks)
    ]
    links = [*_collectives(operations), *_messages(operations, parts)]
    _lay_out(operations)
    starts = [one.start for one in operations]
    starts += [clocks[part["machine"]].common(when) for part in parts for when, _ in part["events"]]
    zero = min(starts, default=0)
    tracks: dict[int, set[Track]] = defaultdict(set)
    for one in operations:
        tracks[one.process].add(one.track)
    events: list[dict[str, Any]] = []
    for process, part in enumerate(parts):
        events += _names(process, part, tracks[process])
        clock = clocks[part["machine"]]
        events += [
            _instant(process, clock.common(when) - zero, text) for when, text in part["events"]
        ]
    for one in operations:
        events += _slices(one, zero)
    for number, (before, after) in enumerate(links):
        events += _arrow(number, before, after, zero)
    incomplete = _incomplete(parts)
    told = "one clock"
    if len(clocks) > 1:
        told = f"clocks of {len(clocks)} hosts, wrong by {error * 1e6:.0f} us at most"
    if apart:
        told += f", not comparable: {', '.join(sorted(apart.values()))}"
    other = {"clocks": told, "incomplete": incomplete or "none"}
    trace = {"traceEvents": events, "displayTimeUnit": "ns", "otherData": other}
    return Joined(trace, len(parts), len(operations), error, told, incomplete)


def _incomplete(parts: Iterable[Mapping[str, Any]]) -> str:
    """Name the ranks that kept only their last operations."""
    ranks: dict[str, list[int]] = defaultdict(list)
    for part in parts:
        if not part["complete"]:
            ranks[part["group"]].append(part["rank"])
    return ", ".join(f"{ranks_text(found)} of {group}" for group, found in ranks.items())


def _clocks(parts: Sequence[Mapping[str, Any]]) -> dict[str, Clock]:
    """Clocks by host, without hosts to which no comparison leads.

    The common time is that of the coordinator with which most hosts were compared.
    """
    compared: dict[str, dict[str, list[Sample]]] = defaultdict(lambda: defaultdict(list))
    for part in parts:
        for coordinator, samples in part["clock"].items():
            compared[coordinator][part["machine"]] += samples
    left = sorted(
        compared.values(),
        key=lambda one: (-len(one), sum(Clock(samples).error for samples in one.values())),
    )
    found: dict[str, list[Sample]] = defaultdict(list)
    while one := next((one for one in left if not found or found.keys() & one.keys()), None):
        left.remove(one)
        clock = Clock([])
        bridge = next((host for host in one if host in found), None)
        if bridge is not None:
            back = [(when + ahead, -ahead, error) for when, ahead, error in one.pop(bridge)]
            clock = Clock(Clock(found[bridge]).through(back))
        for host, samples in one.items():
            # A coordinator that is far away would only make known times worse. One that came after
            # another shows how clocks have drifted since.
            known = [when for when, *_ in found[host]]
            low, high = min(known, default=inf) - _DRIFT, max(known, default=-inf) + _DRIFT
            found[host] += [it for it in clock.through(samples) if not low <= it[0] <= high]
    hosts = {part["machine"] for part in parts}
    if len(hosts) == 1:  # which needs no clock but its own
        return dict.fromkeys(hosts, Clock([]))
    return {host: Clock(samples) for host, samples in found.items()}


def _operations(
    process: int, part: Mapping[str, Any], clocks: Mapping[str, Clock]
) -> Iterator[Operation]:
    clock = clocks[part["machine"]]
    for scope, op, tag, seq, call, peer, nbytes, start, end, state, error, plans in part[
        "operations"
    ]:
        group, epoch, rank, size, context, links = part["scopes"][scope]
        transport = _transport(op, peer, plans, links)
        begins = clock.common(start)
        yield Operation(
            process, context, group, epoch, rank, size, op, tag, seq, call, peer, nbytes,
            begins, max(begins, clock.common(end)), state, error, plans, transport,
        )  # fmt: skip


def _transport(
    op: str, peer: int | None, plans: Sequence[str], links: Sequence[str | None]
) -> str | None:
    """The transports of an operation, from the `links` of its rank, by rank; None if unknown."""
    if op in MESSAGES | OF_WINDOWS:
        return links[peer] if peer is not None and peer < len(links) else None
    kinds = {"memory"} if any(plan.startswith(("pull_", "team_")) for plan in plans) else set()
    if not plans or not all(plan.startswith("pull_") for plan in plans):
        kinds |= {kind for kind in links if kind is not None}
    return " + ".join(sorted(kinds)) or None


Link = tuple[Operation, Operation]
"""Two operations. The second one has waited for the first, or has taken its data."""


def _collectives(operations: Iterable[Operation]) -> Iterator[Link]:
    """Find collectives that belong together, and how long each has waited for the last one."""
    same: dict[Any, list[Operation]] = defaultdict(list)
    for one in operations:
        if one.op not in MESSAGES | OF_WINDOWS and one.seq is not None:
            same[one.context, repr(one.tag), one.seq].append(one)
    for ranks in same.values():
        last = max(ranks, key=lambda one: one.start)
        if len({one.rank for one in ranks}) < last.size:
            continue  # one that is not among them may have come later
        for one in ranks:
            _waits(one, last)
            if one is not last and last.start <= one.end:  # else it has failed before
                yield last, one


def _messages(
    operations: Iterable[Operation], parts: Sequence[Mapping[str, Any]]
) -> Iterator[Link]:
    """Find the receive for each message.

    Messages of one sender, receiver and tag are taken in their order, by receives in the order of
    their calls. If either rank kept only its last operations, it is unknown which message is the
    first of those kept. It is unknown from the end, too, because some may never be received.
    """
    sent: dict[Any, list[Operation]] = defaultdict(list)
    taken: dict[Any, list[Operation]] = defaultdict(list)
    for one in operations:
        if one.state != "done" or one.peer is None or not parts[one.process]["complete"]:
            continue
        if one.op in SENDS:
            sent[one.context, one.rank, one.peer, repr(one.tag)].append(one)
        elif one.op == "recv":
            taken[one.context, one.peer, one.rank, repr(one.tag)].append(one)
    for key, receives in taken.items():
        sends = sorted(sent.get(key, ()), key=lambda one: one.start)
        receives.sort(key=lambda one: one.start)
        for send, receive in zip(sends, receives, strict=False):
            _waits(receive, send)
            if send.op == "ssend":
                _waits(send, receive)
            yield send, receive


def _waits(one: Operation, other: Operation) -> None:
    """Note that `one` could not go on before `other` had begun."""
    one.moves = min(max(one.start, other.start), one.end)
    if one.moves > one.start:
        one.waits_for = other.rank


def _lay_out(operations: Iterable[Operation]) -> None:
    """Put operations that run at the same time on separate tracks."""
    free: dict[tuple[int, int], list[int]] = defaultdict(list)
    for one in sorted(operations, key=lambda one: one.start):
        kind = 1 if one.op in MESSAGES else 2 if one.op in OF_WINDOWS else 0
        ends = free[one.process, kind]
        lane = next((lane for lane, end in enumerate(ends) if end <= one.start), len(ends))
        if lane == len(ends):
            ends.append(0)
        ends[lane] = one.end
        one.track = kind, lane


def _thread(track: Track) -> int:
    """The number of a track, which is a thread for viewers."""
    kind, lane = track
    # No thread has the number of its process, because it would count as the main thread.
    return (1 + kind) * _LANES + lane


def _names(
    process: int, part: Mapping[str, Any], tracks: Iterable[Track]
) -> Iterator[dict[str, Any]]:
    def name(what: str, thread: int, **args: Any) -> dict[str, Any]:
        return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": args}

    yield name("process_name", 0, name=f"rank {part['rank']} of {part['group']}")
    yield name("process_labels", 0, labels=f"{part['host']} pid {part['pid']} {part['name']}")
    yield name("process_sort_index", 0, sort_index=process)
    for kind, lane in (*sorted(tracks), _MEMBERSHIP):
        thread = _thread((kind, lane))
        text = _KINDS[kind] if lane == 0 else f"{_KINDS[kind]} ({lane + 1})"
        yield name("thread_name", thread, name=text)
        yield name("thread_sort_index", thread, sort_index=thread)


def _instant(process: int, when: int, text: str) -> dict[str, Any]:
    return {
        "ph": "i", "s": "p", "cat": "membership", "name": text,
        "pid": process, "tid": _thread(_MEMBERSHIP), "ts": _us(when),
    }  # fmt: skip


def _slices(one: Operation, zero: int) -> Iterator[dict[str, Any]]:
    """The operation, and within it the time of waiting and of moving data."""
    where = {"pid": one.process, "tid": _thread(one.track)}
    args: dict[str, Any] = {
        "group": one.group, "epoch": one.epoch, "rank": one.rank, "bytes": one.nbytes,
        "state": one.state,
    }  # fmt: skip
    op, dtype = _OP.search(one.call), _DTYPE.search(one.call)
    more = {
        "tag": one.tag, "number": one.seq, "peer": one.peer, "call": one.call or None,
        "op": op and op[0], "dtype": dtype and dtype[1],
        "algorithm": " + ".join(one.plans) or None, "transport": one.transport,
        "error": one.error or None,
        "waited_us": None if one.moves is None else _us(one.moves - one.start),
        "moved_us": None if one.moves is None else _us(one.end - one.moves),
    }  # fmt: skip
    args |= {key: value for key, value in more.items() if value is not None}
    category = _KINDS[one.track[0]]
    untagged = 0 if one.op in MESSAGES else None
    name = one.op if one.tag == untagged else f"{one.op} {one.tag!r}"

    def piece(text: str, start: int, end: int, **args: Any) -> dict[str, Any]:
        when = {"ts": _us(start - zero), "dur": _us(end - start)}
        return {"ph": "X", "cat": category, "name": text, **where, **when, "args": args}

    yield piece(name, one.start, one.end, **args)
    if one.moves is None:
        return
    if one.waits_for is not None:
        yield piece(f"waiting for rank {one.waits_for}", one.start, one.moves)
    if one.end > one.moves:
        yield piece("moving", one.moves, one.end)


def _arrow(number: int, before: Operation, after: Operation, zero: int) -> Iterator[dict[str, Any]]:
    for one, kind in ((before, "s"), (after, "f")):
        when = one.start if kind == "s" or one.moves is None else one.moves
        end = {"bp": "e"} if kind == "f" else {}
        yield {
            "ph": kind, "id": number, "cat": "flow", "name": before.op, **end,
            "pid": one.process, "tid": _thread(one.track), "ts": _us(when - zero),
        }  # fmt: skip


def _us(ns: int) -> float:
    return ns / 1000
