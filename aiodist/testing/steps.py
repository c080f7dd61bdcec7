"""Collectives of random programs: how each is called, and what it has to return.

Each contribution contains the epoch, the rank and the step, and each result can be computed without
the others. So a wrong sum, a mixed-up operation and a message of another epoch all show.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aiodist.group import Group
from aiodist.work import Work

Array = NDArray[np.int64]
Parts = list[tuple[Any, Array]]
"""What came, and what it should be."""


@dataclass(frozen=True)
class Step:
    """One collective of the program, the same on all ranks. `size` is a number of elements."""

    number: int
    kind: str
    tag: str | int | None
    size: int
    root: int
    separate: bool
    """Whether `out` is given, if the operation takes it."""


def data(epoch: int, rank: int, number: int, size: int) -> Array:
    """Return what `rank` contributes."""
    # Epoch and step in the upper bits, the rank in the lower eight, and a small ramp on top. So
    # sums of all ranks are exact, and an element of another place, rank, step or epoch is another
    # number.
    return np.arange(size, dtype=np.int64) % 13 + (((epoch * 1000 + number) << 8) + rank + 1)


def total(group: Group, step: Step, ranks: int) -> Array:
    """Return the sum of what the first `ranks` ranks contribute."""
    found = np.zeros(step.size, np.int64)
    for rank in range(ranks):
        found += data(group.epoch, rank, step.number, step.size)
    return found


@dataclass(frozen=True)
class Kind:
    """A kind of collective.

    `start(group, step, x, options)` calls it. `expected(group, step, result)` returns what came
    beside what should have come.
    """

    start: Callable[[Group, Step, Array, dict[str, Any]], Work[Any]]
    expected: Callable[[Group, Step, Any], Parts]
    takes_out: bool = False


def _src(group: Group, step: Step) -> int:
    return step.root % group.size


def _own(group: Group, step: Step, rank: int) -> Array:
    return data(group.epoch, rank, step.number, step.size)


def _slots(group: Group, step: Step, x: Array) -> list[Array]:
    return [x + 1000 * (dst + 1) for dst in range(group.size)]


def _all_reduce(group: Group, step: Step, result: Any) -> Parts:
    return [(result, total(group, step, group.size))]


def _reduce(group: Group, step: Step, result: Any) -> Parts:
    return _all_reduce(group, step, result) if group.rank == _src(group, step) else []


def _by_rank(group: Group, step: Step, result: Any) -> Parts:
    return [(result[rank], _own(group, step, rank)) for rank in range(group.size)]


def _gathered(group: Group, step: Step, result: Any) -> Parts:
    return _by_rank(group, step, result) if group.rank == _src(group, step) else []


def _broadcast(group: Group, step: Step, x: Array, options: dict[str, Any]) -> Work[Any]:
    src = _src(group, step)
    into = x if group.rank == src or step.separate else None
    return group.broadcast(into, src, **options)


def _scatter(group: Group, step: Step, x: Array, options: dict[str, Any]) -> Work[Any]:
    src = _src(group, step)
    slots = _slots(group, step, x) if group.rank == src else None
    return group.scatter(slots, src, **options)


def _scattered(group: Group, step: Step, result: Any) -> Parts:
    return [(result, _own(group, step, _src(group, step)) + 1000 * (group.rank + 1))]


def _reduce_scatter(group: Group, step: Step, result: Any) -> Parts:
    return [(result, np.array_split(total(group, step, group.size), group.size)[group.rank])]


def _all_to_all(group: Group, step: Step, result: Any) -> Parts:
    return [
        (result[rank], _own(group, step, rank) + 1000 * (group.rank + 1))
        for rank in range(group.size)
    ]


def _scan(group: Group, step: Step, result: Any) -> Parts:
    return [(result, total(group, step, group.rank + 1))]


def _exscan(group: Group, step: Step, result: Any) -> Parts:
    # At rank 0 it is that rank's own contribution, unchanged.
    return [(result, total(group, step, max(1, group.rank)))]


KINDS: dict[str, Kind] = {
    "all_reduce": Kind(lambda g, s, x, o: g.all_reduce(x, **o), _all_reduce, takes_out=True),
    "reduce": Kind(lambda g, s, x, o: g.reduce(x, _src(g, s), **o), _reduce),
    "broadcast": Kind(_broadcast, lambda g, s, r: [(r, _own(g, s, _src(g, s)))]),
    "all_gather": Kind(lambda g, s, x, o: g.all_gather(x, **o), _by_rank),
    "gather": Kind(lambda g, s, x, o: g.gather(x, _src(g, s), **o), _gathered),
    "scatter": Kind(_scatter, _scattered),
    "reduce_scatter": Kind(lambda g, s, x, o: g.reduce_scatter(x, **o), _reduce_scatter),
    "all_to_all": Kind(lambda g, s, x, o: g.all_to_all(_slots(g, s, x), **o), _all_to_all),
    "scan": Kind(lambda g, s, x, o: g.scan(x, **o), _scan, takes_out=True),
    "exscan": Kind(lambda g, s, x, o: g.exscan(x, **o), _exscan, takes_out=True),
    "barrier": Kind(lambda g, s, x, o: g.barrier(**o), lambda g, s, r: []),
}
"""The collectives that random programs are made of."""


class StepCall:
    """A step that was called on one rank."""

    def __init__(
        self, group: Group, step: Step, timeout: float | None, wrong: bool = False
    ) -> None:
        """`wrong`: with another shape than the others."""
        if wrong:
            step = replace(step, size=step.size + 1)
        kind = KINDS[step.kind]
        self.group = group
        self.step = step
        self.x: Array | None = data(group.epoch, group.rank, step.number, step.size)
        self.out: Array | None = None
        options: dict[str, Any] = {"tag": step.tag, "timeout": timeout}
        if kind.takes_out and step.separate:
            self.out = options["out"] = np.zeros(step.size, np.int64)
        self.work = kind.start(group, step, self.x, options)

    def buffers(self) -> list[Array]:
        """Return the memory that the operation may write while it is pending."""
        return [buffer for buffer in (self.x, self.out) if buffer is not None]

    def drop(self) -> None:
        """Drop the memory."""
        self.x = self.out = None

    def wrong(self, result: Any) -> str:
        """Return what is wrong with its result; "" if nothing is."""
        for came, expected in KINDS[self.step.kind].expected(self.group, self.step, result):
            if not isinstance(came, np.ndarray) or not np.array_equal(came, expected):
                return (
                    f"{self.group!r} got a wrong result of {self.step}: {came!r}, not {expected!r}"
                )
        if self.out is not None:
            group, step = self.group, self.step
            assert self.x is not None
            if not np.array_equal(self.x, data(group.epoch, group.rank, step.number, step.size)):
                return f"{group!r}: {step} altered its input, though it has an out"
        return ""
