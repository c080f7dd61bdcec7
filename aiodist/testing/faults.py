"""Faults at named points in the life of an operation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from aiodist.trace import Scope

Point = Literal["start", "entered", "phase", "before_complete", "failed", "cancelled"]
Action = (
    Callable[[Any], None] | BaseException | Literal["kill", "unplug", "cancel", "stop", "block"]
)


@dataclass
class Fault:
    """What is to happen once: see `FaultInjector.fail_at`."""

    rank: int
    op: str
    point: Point
    action: Action
    nth: int
    seconds: float
    happened: bool = False


@dataclass
class FaultInjector:
    """A trace hook (see `aiodist.trace`) that lets things go wrong at chosen points.

    `do(action, rank, work, seconds)` carries out the named actions.
    """

    do: Callable[[str, int, Any, float], None]
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
    ) -> Fault:
        """When `rank` comes to `point` of an operation `op` for the `nth` time (0: the first):

        - "kill": its process ends, as by kill -9; "unplug": so does its host, nobody hears of it;
        - "stop": its process stops for `seconds`, as by SIGSTOP and SIGCONT;
        - "block": its loop does not turn for `seconds`, as while it computes;
        - "cancel": the Work is cancelled, in the next turn of the loop;
        - an exception: it is raised there (at the point "phase" only);
        - a function: it is called with the Work.

        What is returned tells, as `happened`, whether it came to that.
        """
        if isinstance(action, BaseException) and point != "phase":
            raise ValueError(
                f"an exception can be raised at the point 'phase' only, not at {point!r}"
            )
        fault = Fault(rank, op, point, action, nth, seconds)
        self.faults.append(fault)
        return fault

    def __call__(self, scope: Scope, point: str, work: Any, value: Any) -> None:
        for fault in self.faults:
            wanted = fault.rank, fault.op, fault.point
            if fault.happened or wanted != (scope.rank, work.op, point):
                continue
            # Counted here and not by the operation: `nth` is about calls of this rank that come to
            # this point, in the order in which they do.
            if fault.nth:
                fault.nth -= 1
                continue
            fault.happened = True
            if isinstance(fault.action, BaseException):
                raise fault.action
            if callable(fault.action):
                fault.action(work)
            else:
                self.do(fault.action, scope.rank, work, fault.seconds)
