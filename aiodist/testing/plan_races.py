"""Data races within the plans of all ranks, by vector clocks.

The bytes of a Send are read at some time between the Send and the peer's Recv. The bytes of a Recv
are written at some time after both the peer's Send and the own Grant, and before the Recv is done.
Two accesses to the same memory, at least one of them a write, race unless the end of one happens
before the start of the other. The order is known from the program, from frames, from the grants
that frames have to wait for, and from publications that were awaited.

Sources: Lamport, "Time, clocks, and the ordering of events in a distributed system", 1978;
Flanagan, Freund, "FastTrack", 2009. The latter shows that it is enough to compare with the last
write, and with the reads since.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from aiodist.schedules.plan import SHARED, Plan, Span
from aiodist.testing.plan_checks import locate, name_of, placed, read, written

Event = tuple[int, int]
"""A step: its rank and its index."""

Clock = tuple[int, ...]
"""How many steps of each rank have happened before or with an event."""


class _Access(NamedTuple):
    span: Span
    step: Event
    """The step that makes it."""
    starts: Sequence[Event]
    """It starts after all of these."""
    end: Event
    writes: bool


def find_race(
    plans: Sequence[Plan],
    trace: Sequence[Event],
    clocks: Sequence[Sequence[Clock]],
    ends: Mapping[Event, Event],
    starts: Mapping[Event, Sequence[Event]],
    in_place: Collection[int],
) -> str | None:
    """A description of two accesses that race, or None.

    `trace`: all steps in an order in which they were done. `clocks`: of every step, by rank.
    `ends`: the Recv of each Send. `starts`: the Send of each Recv, and its Grant if it has one.
    `in_place`: the ranks at which X and OUT are the same memory.
    """
    private: list[list[_Access]] = [[] for _ in plans]
    shared: list[_Access] = []
    for rank, at in trace:
        for access in _accesses(plans[rank], at, ends, starts, same=rank in in_place):
            (shared if access.span.buffer >= SHARED else private[rank]).append(access)
    for accesses in (*private, shared):
        if (found := _first_race(accesses, clocks)) is not None:
            earlier, later, (buffer, start, stop) = found
            verb = "writes" if later.writes else "reads"
            what = "written" if earlier.writes else "read"
            return (
                f"{_locate(plans, later)} {verb} {name_of(buffer)}[{start}:{stop}],"
                f" which may still be {what} for {_locate(plans, earlier)}:"
                " nothing that happened before says that this is over"
            )
    return None


def _locate(plans: Sequence[Plan], access: _Access) -> str:
    rank, at = access.step
    return locate(plans[rank], at)


def _accesses(
    plan: Plan,
    at: int,
    ends: Mapping[Event, Event],
    starts: Mapping[Event, Sequence[Event]],
    *,
    same: bool,
) -> list[_Access]:
    """What step `at` does to memory, reads first."""
    here, step = (plan.rank, at), plan.steps[at]
    since, end = starts.get(here, (here,)), ends.get(here, here)
    return [
        _Access(placed(span, same=same), here, since, end, writes)
        for writes, spans in ((False, read(step)), (True, written(step)))
        for span in spans
        if span.length
    ]


def _first_race(
    accesses: Sequence[_Access], clocks: Sequence[Sequence[Clock]]
) -> tuple[_Access, _Access, Span] | None:
    """The first of `accesses`, in the order in which they were made, that races with an earlier
    one: the two accesses, and the units."""
    # The ends of accesses cut each buffer into intervals, of which an access has all or nothing. So
    # the last write, and the reads since, are kept for each interval, not for each unit, because
    # even plans of millions of units have few intervals.
    found: dict[int, set[int]] = {}
    for access in accesses:
        found.setdefault(access.span.buffer, set()).update(access.span[1:])
    edges = {buffer: sorted(ends) for buffer, ends in found.items()}
    last_write: dict[tuple[int, int], _Access] = {}
    reads_since: dict[tuple[int, int], list[_Access]] = {}
    for access in accesses:
        buffer, start, stop = access.span
        at = edges[buffer]
        for i in range(bisect_left(at, start), bisect_left(at, stop)):
            key = (buffer, i)
            before = [last_write[key]] if key in last_write else []
            if access.writes:
                # Reads may overlap each other. After a write that comes after all of them, they can
                # be forgotten, because all later accesses that come after the write come after them
                # as well. Had one of them raced with the write, that would have been the answer.
                before += reads_since.pop(key, [])
                last_write[key] = access
            else:
                reads_since.setdefault(key, []).append(access)
            for earlier in before:
                if not any(_happens_before(earlier.end, start, clocks) for start in access.starts):
                    return earlier, access, Span(buffer, at[i], at[i + 1])
    return None


def _happens_before(a: Event, b: Event, clocks: Sequence[Sequence[Clock]]) -> bool:
    return clocks[b[0]][b[1]][a[0]] > a[1]
