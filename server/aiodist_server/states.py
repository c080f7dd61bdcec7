"""The state of each rank of a group, by one answer of `Coordinator.survey`, for the timeline.

A wait counts from `culprits.LEAST` seconds on, because ranks that work together always wait for
each other a little.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from aiodist.membership import words
from aiodist.membership.culprits import LEAST

SEVERITY = ("", "idle", "waits", "busy", "silent", "culprit")
"""The kinds of a `State`, the worst last; "": nothing to tell."""


class State(NamedTuple):
    """The state of a rank for some `seconds`.

    `kind` is "culprit" (it holds up others, or they wait for each other), "silent" (no answer),
    "busy" (its event loop does not turn), "waits" (for others), or "idle". An idle rank is in an
    operation that waits for no rank in particular, such as a receive from any source.
    """

    kind: str
    seconds: float
    text: str


def states(group: Mapping[str, Any]) -> dict[int, State]:
    """Return the states, by rank, of the ranks that have one."""
    found = {}
    for member in group["members"]:
        state = _of(member)
        if state is not None:
            found[member["rank"]] = state
    for finding in group["findings"]:
        seconds = max((held["seconds"] for held in finding["held"]), default=0.0)
        way = words.held(finding, times=False)
        verb = "in a deadlock" if finding["deadlock"] else "holds up"
        for rank in finding["culprits"]:
            found[rank] = State("culprit", seconds, f"{verb}: {way}")
    return found


def _of(member: Mapping[str, Any]) -> State | None:
    doing = member["doing"]
    if doing is None:
        return State("silent", member["silent"], "no answer")
    at = f" at {doing['places'][0]}" if doing["places"] else ""
    if doing["busy"]:
        return State("busy", doing["busy"], f"its event loop does not turn{at}")
    for wait in doing["waits"][:1]:
        seconds = wait["seconds"] + doing["age"]
        if seconds >= LEAST:
            kind = "waits" if wait["missing"] or wait["lacking"] else "idle"
            return State(kind, seconds, f"in {words.waiting(wait)}{at}")
    return None
