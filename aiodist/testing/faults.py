"""Faults at named points in the life of an operation."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from aiodist.coordinator.totals import OPS
from aiodist.phases.base import as_int, as_rank
from aiodist.recorder import MESSAGES, OF_WINDOWS
from aiodist.timeouts import check_seconds
from aiodist.trace import Scope

Point = Literal["start", "entered", "phase", "before_complete", "failed", "cancelled"]
Named = Literal["kill", "unplug", "cancel", "stop", "block"]
Action = Callable[[Any], None] | BaseException | Named

_OF_COLLECTIVES = frozenset({"entered", "phase"})
"""Points that messages and calls of a window do not reach."""
_TRACED_AS = {
    "isend": "send",
    "issend": "ssend",
    "irecv": "recv",
    "sendrecv": "recv",
}
"""Methods whose operations have the names of others."""


@dataclass
class Fault:
    """A fault that happens once: see `FaultInjector.fail_at`."""

    rank: int
    op: str
    point: Point
    action: Action
    nth: int
    seconds: float
    required: bool = True
    happened: bool = False
    came: int = 0  # how often the rank has reached that point


@dataclass
class FaultInjector:
    """A trace hook (see `aiodist.trace`) that makes things fail at chosen points.

    `do(action, rank, work, seconds)` carries out the named actions. `size`: how many ranks there
    are.
    """

    do: Callable[[str, int, Any, float], None]
    size: int
    faults: list[Fault] = field(default_factory=list)

    def fail_at(
        self,
        rank: int,
        op: str,
        point: Point,
        action: Action = "kill",
        *,
        nth: int = 0,
        seconds: float = 1.0,
        required: bool = True,
    ) -> Fault:
        """Fail when `rank` reaches `point` of an operation `op` for the `nth` time (0: the first).

        - "kill": its process ends, as by kill -9.
        - "unplug": its host ends, and no peer is told.
        - "stop": its process stops for `seconds`, as by SIGSTOP and SIGCONT.
        - "block": its loop does not turn for `seconds`, as while it computes.
        - "cancel": the Work is cancelled, in the next turn of the loop.
        - An exception is raised there (only at the point "phase").
        - A function is called with the Work.

        A fault that does not happen fails the simulation, because the test then tries nothing. With
        `required=False` it need not happen, and `happened` of the result tells whether it did.
        Raises ValueError for ranks, points, operations and actions that do not exist and for
        numbers that mean nothing, and TypeError for other objects.
        """
        rank = as_rank(rank, self.size, "rank")
        _check(op, point, action)
        nth = as_int(nth, "nth is an int")
        if nth < 0:
            raise ValueError(f"nth is at least 0, the first time, not {nth}")
        check_seconds("seconds", seconds)
        fault = Fault(rank, op, point, action, nth, seconds, required)
        self.faults.append(fault)
        return fault

    def problems(self) -> list[str]:
        """Return the required faults that did not happen, one a line."""
        return [
            f"a fault did not happen: rank {fault.rank} came to {fault.point!r} of {fault.op!r} "
            f"{fault.came} times, not {fault.nth + 1}. If it need not happen: required=False"
            for fault in self.faults
            if fault.required and not fault.happened
        ]

    def __call__(self, scope: Scope, point: str, work: Any, value: Any) -> None:
        for fault in self.faults:
            wanted = fault.rank, fault.op, fault.point
            if fault.happened or wanted != (scope.rank, work.op, point):
                continue
            # Counted here and not by the operation, because `nth` counts this rank's calls that
            # reach this point.
            fault.came += 1
            if fault.came <= fault.nth:
                continue
            fault.happened = True
            if isinstance(fault.action, BaseException):
                raise fault.action
            if callable(fault.action):
                fault.action(work)
            else:
                self.do(fault.action, scope.rank, work, fault.seconds)


def _check(op: str, point: str, action: object) -> None:
    """Raise ValueError or TypeError for a fault that could never happen."""
    if op not in OPS:
        hint = f": its operation is {_TRACED_AS[op]!r}" if op in _TRACED_AS else ""
        raise ValueError(f"op is one of {_listed(OPS)}, not {op!r}{hint}")
    points = get_args(Point)
    if op in MESSAGES | OF_WINDOWS:
        points = tuple(one for one in points if one not in _OF_COLLECTIVES)
    if point not in points:
        article = "an" if op[0] in "aei" else "a"
        text = f"{article} {op} comes to the points {_listed(points)}, not to {point!r}"
        raise ValueError(text)
    if isinstance(action, BaseException) and point != "phase":
        raise ValueError(f"an exception can be raised at the point 'phase' only, not at {point!r}")
    text = f"action is {_listed(get_args(Named))}, an exception or a function, not {action!r}"
    if isinstance(action, str):
        if action not in get_args(Named):
            raise ValueError(text)
    # A call of an exception class would make an exception, but raise none.
    elif isinstance(action, type) or not (isinstance(action, BaseException) or callable(action)):
        raise TypeError(text)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, sorted(names)))
