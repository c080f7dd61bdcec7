"""The places of the parts of several ranks in a buffer: in rank order without gaps, without the own
part."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from aiodist.schedules.plan import Span


@lru_cache(maxsize=64)
def _starts(lengths: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(accumulate(lengths, initial=0))


class Parts(NamedTuple):
    """A buffer with a part for each other rank. The own part is a buffer of its own, if it has
    one."""

    rank: int
    starts: Sequence[int]
    """The offsets of all ranks' parts, the own part included; and their sum."""
    buffer: int
    own: int | None
    """The buffer that is the own part."""

    def around(self, first: int, count: int) -> list[Span]:
        """The parts of `count` ranks from `first` on, cyclically."""
        size = len(self.starts) - 1
        first %= size
        stop = first + count
        if stop <= size:
            return self._run(first, stop)
        return self._run(first, size) + self._run(0, stop - size)

    def _run(self, first: int, stop: int) -> list[Span]:
        if not first <= self.rank < stop:
            return self._others(first, stop)
        length = self.starts[self.rank + 1] - self.starts[self.rank]
        own = [] if self.own is None else [Span(self.own, 0, length)]
        return [*self._others(first, self.rank), *own, *self._others(self.rank + 1, stop)]

    def _others(self, first: int, stop: int) -> list[Span]:
        """The parts of ranks `first` to `stop`, which do not include the own rank."""
        absent = 0
        if first > self.rank:
            absent = self.starts[self.rank + 1] - self.starts[self.rank]
        start, end = self.starts[first] - absent, self.starts[stop] - absent
        return [Span(self.buffer, start, end)] if start < end else []


def parts_of(rank: int, lengths: Sequence[int], buffer: int, own: int | None = None) -> Parts:
    """The parts, of `lengths` by rank, as `rank` has them in `buffer`."""
    return Parts(rank, _starts(tuple(lengths)), buffer, own)
