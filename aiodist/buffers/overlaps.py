"""Which arrays share memory.

A reduction of several arrays reads some while it writes others. Where two of them share memory, the
result would depend on what came first on this rank, so such a call is refused, or goes by a copy.
Only contiguous arrays get here, so it is a question of intervals of addresses: sorted once, each
further array is found in them by bisection.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from typing import Any

from numpy.typing import NDArray


def _span(flat: NDArray[Any]) -> tuple[int, int]:
    """First and last address + 1 of a contiguous array."""
    start: int = flat.__array_interface__["data"][0]
    return start, start + flat.nbytes


def same(a: NDArray[Any], b: NDArray[Any]) -> bool:
    """Whether two contiguous arrays are the same memory."""
    return a is b or _span(a) == _span(b)


class Ranges:
    """The memory of contiguous arrays. `overlap`: whether two of them share some."""

    __slots__ = ("_ends", "_starts", "overlap")

    def __init__(self, flats: Iterable[NDArray[Any]]) -> None:
        spans = sorted([_span(flat) for flat in flats if flat.nbytes])
        self._starts = [start for start, _ in spans]
        self._ends = [end for _, end in spans]
        self.overlap = any(
            end > start for end, start in zip(self._ends, self._starts[1:], strict=False)
        )

    def touch(self, flat: NDArray[Any]) -> bool:
        """Whether `flat` shares memory with one of the arrays, which don't overlap."""
        start, end = _span(flat)
        index = bisect_left(self._starts, end) - 1
        return flat.nbytes > 0 and index >= 0 and self._ends[index] > start
