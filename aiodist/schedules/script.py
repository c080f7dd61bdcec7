"""Plans of huge arrays: of rounds that are alike only two are stored.

A large array goes in pieces, and each piece takes the same steps, with spans that lie some units
further on. So a long plan is kept as *stretches*. A stretch stores the first two of its rounds;
each later round differs from the one before by the same amount. Step n is computed from n. So a
plan takes only the memory, and the time to make it, of a plan for a few pieces. Here is a chain in
which a rank passes on what it receives::

    first     Recv 0:4   Send 0:4                        times = 1000
    second    Recv 4:8   Send 4:8
    round k   Recv 4 k:4 k + 4   Send 4 k:4 k + 4

Short plans are tuples, because to make a step takes a microsecond each time.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, islice, repeat
from typing import Any, Generic, NamedTuple, TypeVar, overload

from aiodist.schedules.plan import Await, Copy, Recv, Reduce, Span, Step

S = TypeVar("S", bound=Step)

LISTED = 8192
"""Most steps of a plan that are stored one by one: some 1.5 MiB."""

PAGE = 256
"""Steps of a long plan that are made at a time."""

FEWEST = 4
"""Fewest rounds that are stored as a stretch."""


class Stretch(NamedTuple, Generic[S]):
    """Steps that are done so many `times`: those of the `first` and of the `second` time."""

    first: tuple[S, ...]
    second: tuple[S, ...]
    times: int

    def step(self, at: int, time: int) -> S:
        """Step `at` of those that are done each time, the `time`-th time."""
        one, two = self.first[at], self.second[at]
        return one if one is two else _moved(one, two, time)


class Steps(Sequence[S]):
    """The steps of a long plan, made when they are asked for."""

    __slots__ = ("_ends", "stretches")

    def __init__(self, stretches: Iterable[Stretch[S]]) -> None:
        self.stretches = tuple(stretches)
        lengths = [len(stretch.first) * stretch.times for stretch in self.stretches]
        self._ends = [0, *accumulate(lengths)]

    def __len__(self) -> int:
        return self._ends[-1]

    @overload
    def __getitem__(self, index: int) -> S: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[S, ...]: ...
    def __getitem__(self, index: int | slice) -> S | tuple[S, ...]:
        ends = self._ends
        if isinstance(index, slice):
            numbers = range(ends[-1])[index]
            if numbers.step == 1:
                return tuple(islice(self._from(numbers.start), len(numbers)))
            return tuple(self[number] for number in numbers)
        if not 0 <= index < ends[-1]:
            index = range(ends[-1])[index]
        part = bisect_right(ends, index) - 1
        first, second, _ = self.stretches[part]
        time, at = divmod(index - ends[part], len(first))
        one, two = first[at], second[at]
        return one if one is two else _moved(one, two, time)

    def __iter__(self) -> Iterator[S]:
        return self._from(0)

    def _from(self, first: int) -> Iterator[S]:
        for stretch, start in zip(self.stretches, self._ends, strict=False):
            length = len(stretch.first)
            done, offset = divmod(max(0, first - start), length)
            for time in range(done, stretch.times):
                for at in range(offset, length):
                    yield stretch.step(at, time)
                offset = 0

    def ahead(self, first: int) -> Iterator[tuple[S, int]]:
        """See the function of this name."""
        for stretch, start in zip(self.stretches, self._ends, strict=False):
            length = len(stretch.first)
            done, offset = divmod(max(0, first - start), length)
            for at in range(length):
                left = stretch.times - done - (at < offset)
                if left > 0:
                    yield stretch.step(at, stretch.times - 1), left


class Pages(Generic[S]):
    """The steps of a long plan for one reader that takes them in order. They are made a page at a
    time, because between two steps large arrays go through the caches and displace the code that
    makes steps."""

    __slots__ = ("_first", "_page", "_steps")

    def __init__(self, steps: Steps[S]) -> None:
        self._steps = steps
        self._first = 0
        self._page: tuple[S, ...] = ()

    def __len__(self) -> int:
        return len(self._steps)

    def __getitem__(self, index: int) -> S:
        at = index - self._first
        if not 0 <= at < len(self._page):
            self._page = self._steps[index : index + PAGE]
            self._first, at = index, 0
        return self._page[at]


def ahead(steps: Sequence[S], first: int = 0) -> Iterator[tuple[S, int]]:
    """Each step from number `first` on, and how often it is still to come. Of steps that are alike,
    it is the last one."""
    if type(steps) is Steps:
        return steps.ahead(first)
    return zip(steps[first:], repeat(1), strict=False)


def written_down(steps: Sequence[Step]) -> int:
    """How many steps are in memory."""
    if type(steps) is Steps:
        # Steps that are the same each time are one object.
        return sum(len({*map(id, one), *map(id, two)}) for one, two, _ in steps.stretches)
    return len(steps)


def receives_of(steps: Sequence[Step]) -> dict[int, Sequence[Recv]]:
    """The receives among `steps`, by peer, in their order."""
    if type(steps) is not Steps:
        listed: dict[int, list[Recv]] = {}
        for step in steps:
            if isinstance(step, Recv):
                listed.setdefault(step.peer, []).append(step)
        return {**listed}
    found: dict[int, list[Stretch[Recv]]] = {}
    for stretch in steps.stretches:
        pairs: dict[int, list[tuple[Recv, Recv]]] = {}
        for one, two in zip(stretch.first, stretch.second, strict=True):
            if isinstance(one, Recv) and isinstance(two, Recv):
                pairs.setdefault(one.peer, []).append((one, two))
        for peer, those in pairs.items():
            first, second = zip(*those, strict=True)
            found.setdefault(peer, []).append(Stretch(first, second, stretch.times))
    return {peer: Steps(those) for peer, those in found.items()}


class Script:
    """A plan that is being written: a list of steps, with a method to add many rounds that are
    alike."""

    def __init__(self, steps: Iterable[Step] = ()) -> None:
        self._stretches: list[Stretch[Step]] = []
        self._last = [*steps]  # Steps that are in no stretch yet.

    def append(self, step: Step) -> None:
        self._last.append(step)

    def __iadd__(self, steps: Iterable[Step] | Script) -> Script:
        if not isinstance(steps, Script):
            self._last += steps
            return self
        for stretch in steps._stretches:
            self._add(stretch)
        self._last += steps._last
        return self

    def __iter__(self) -> Iterator[Step]:
        return iter(self._all())

    def _all(self) -> Steps[Step]:
        return Steps([*self._stretches, *_once(self._last)])

    def repeat(
        self,
        count: int,
        at: Callable[[int], Iterable[Step]],
        edges: Iterable[int] = (),
        margin: int = 1,
        period: int = 1,
    ) -> None:
        """Add ``at(k)`` for each k below `count`.

        Rounds may change at `edges`, at the start and at the end. If no edge is within `margin`
        rounds, the steps `period` rounds later are the same, with each span moved by a constant
        number of units.
        """

        def rounds(first: int, stop: int) -> tuple[Step, ...]:
            return tuple(step for k in range(first, stop) for step in at(k))

        done = 0
        for edge in sorted({0, count, *(edge for edge in edges if 0 < edge < count)}):
            times = (edge - margin - done) // period
            if times >= FEWEST:
                stop = done + times * period
                first, second, last = (
                    rounds(k, k + period) for k in (done, done + period, stop - period)
                )
                self._add(_stretch(first, second, last, times))
                done = stop
            stop = max(done, min(edge + margin, count))
            self._last += rounds(done, stop)
            done = stop

    def _add(self, stretch: Stretch[Step]) -> None:
        if stretch.first:
            self._stretches += [*_once(self._last), stretch]
            self._last = []

    def steps(self, tidied: Callable[[Sequence[Step]], Sequence[Step]] = tuple) -> Sequence[Step]:
        """All steps. `tidied` makes of steps in a row fewer that do the same."""
        steps = self._all()
        if len(steps) <= LISTED:
            return tuple(tidied([*steps]))
        return Steps(_paired(tidied(one), tidied(two), n) for one, two, n in steps.stretches)


def _once(steps: Iterable[S]) -> list[Stretch[S]]:
    listed = tuple(steps)
    return [Stretch(listed, listed, 1)] if listed else []


def _paired(first: Sequence[S], second: Sequence[S], times: int) -> Stretch[S]:
    """A stretch in which steps that are the same each time are one object."""
    pairs = zip(first, second, strict=True)
    return Stretch(tuple(first), tuple(a if a == b else b for a, b in pairs), times)


def _stretch(first: Sequence[S], second: Sequence[S], last: Sequence[S], times: int) -> Stretch[S]:
    """A stretch of `times` rounds. Raises ValueError unless its last round is `last`."""
    stretch = _paired(first, second, times)
    for time, steps in ((1, second), (times - 1, last)):
        made = [stretch.step(at, time) for at in range(len(first))]
        if made != [*steps] or [*map(type, made)] != [*map(type, steps)]:
            raise ValueError(f"rounds of a plan are not alike: expected {[*steps]}, got {made}")
    return stretch


_new = tuple.__new__  # It makes a named tuple without a call in Python.


def _moved(one: Any, two: Any, time: int) -> Any:
    """The step of round `time`, if it is `one` in round 0 and `two` in round 1."""
    kind = type(one)
    if kind is Copy:
        (into, source), (into_next, source_next) = one, two
        return _new(Copy, (_span(into, into_next, time), _span(source, source_next, time)))
    if kind is Reduce:
        into, operands, final = one
        return _new(Reduce, (_span(into, two[0], time), _spans(operands, two[1], time), final))
    if kind is Await:
        return Await(one.peers, one.count + (two.count - one.count) * time)
    return _new(kind, (one[0], _spans(one[1], two[1], time)))  # A Send or a Recv.


def _span(one: Span, two: Span, time: int) -> Span:
    buffer, start, stop = one
    by = two[1] - start
    if not by:
        return one
    by *= time
    return _new(Span, (buffer, start + by, stop + by))


def _spans(one: Sequence[Span], two: Sequence[Span], time: int) -> tuple[Span, ...]:
    return tuple([_span(a, b, time) for a, b in zip(one, two, strict=True)])
