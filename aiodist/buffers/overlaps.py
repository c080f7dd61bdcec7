"""Which arrays share memory.

An operation reads some arrays while it writes others. If two of them shared memory, the result
would depend on what came first on this rank. So such a call is refused, or uses a copy.

Contiguous arrays are intervals of addresses: sorted once, each further array is found in them by
bisection (`Ranges`). Other arrays may lie between each other, as the columns of a matrix do, and
share nothing. If their bounds meet, numpy is asked (`meetings`).
"""

from __future__ import annotations

import weakref
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations, starmap
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

MOST_WORK: Final[Any] = 100_000
"""How many candidates numpy may look at for one pair. Two slices of an array take a handful. A pair
that takes more was made to be hard, and counts as sharing memory."""

FEW: Final = 4
"""Up to this many arrays are compared two by two."""


def _span(flat: NDArray[Any]) -> tuple[int, int]:
    """Return the first address and the last + 1 of a contiguous array."""
    start: int = flat.__array_interface__["data"][0]
    return start, start + flat.nbytes


def same(a: NDArray[Any], b: NDArray[Any]) -> bool:
    """Tell whether two contiguous arrays are the same memory."""
    return a is b or _span(a) == _span(b)


def bounds(array: NDArray[Any]) -> tuple[int, int]:
    """Return the first address and the last + 1 of an array, which need not be contiguous."""
    first = last = array.__array_interface__["data"][0]
    for length, stride in zip(array.shape, array.strides, strict=True):
        reach = (length - 1) * stride
        first, last = (first + reach, last) if reach < 0 else (first, last + reach)
    return first, last + array.itemsize


def shares(a: NDArray[Any], b: NDArray[Any]) -> bool:
    """Tell whether two arrays share memory."""
    try:
        return np.shares_memory(a, b, max_work=MOST_WORK)
    except np.exceptions.TooHardError:
        return True


def alike(a: NDArray[Any], b: NDArray[Any]) -> bool:
    """Tell whether two arrays have the same elements in the same places."""
    return (a.dtype, a.shape, a.strides) == (b.dtype, b.shape, b.strides) and bounds(a) == bounds(b)


def folds(array: NDArray[Any]) -> bool:
    """Tell whether two elements of one array share memory, as those of sliding windows do."""
    steps = sorted(
        (abs(stride), n) for stride, n in zip(array.strides, array.shape, strict=True) if n > 1
    )
    reach = array.itemsize
    for step, n in steps:
        if step < reach:
            break
        reach += step * (n - 1)
    else:
        return False  # each dimension steps over all that the ones before it span
    # Rare: slicing never makes such an array. Most are seen by their strides and bounds. Only the
    # others get a table of all addresses, because the table of an expanded array may be huge.
    first, last = bounds(array)
    if array.size and (steps[0][0] == 0 or array.size * array.itemsize > last - first):
        return True
    places = np.zeros(array.shape, np.intp)  # none of an array without elements
    for axis, (stride, n) in enumerate(zip(array.strides, array.shape, strict=True)):
        places += (np.arange(n) * stride).reshape(-1, *[1] * (array.ndim - axis - 1))
    return bool((np.diff(np.sort(places, axis=None)) < array.itemsize).any())


def meetings(
    written: Sequence[NDArray[Any]], read: Sequence[NDArray[Any]] = ()
) -> Iterator[tuple[int, int]]:
    """Yield the pairs of arrays, by their numbers, that share memory and of which one is `written`.

    The arrays in `read` are numbered from ``len(written)`` on.
    """
    count = len(written)
    spans = sorted((*bounds(x), at) for at, x in enumerate((*written, *read)) if x.size)
    reaching: list[tuple[int, int]] = []  # the ends of earlier arrays that may reach this one
    for first, last, at in spans:
        reaching = [(end, other) for end, other in reaching if end > first]
        for _, other in reaching:
            one, two = min(other, at), max(other, at)
            if one < count:
                second = written[two] if two < count else read[two - count]
                if shares(written[one], second):
                    yield one, two
        reaching.append((last, at))


class Ranges:
    """The memory of contiguous arrays. `overlap`: two of them share some."""

    __slots__ = ("_ends", "_starts", "overlap")

    def __init__(self, flats: Iterable[NDArray[Any]]) -> None:
        spans = sorted([_span(flat) for flat in flats if flat.nbytes])
        self._starts = [start for start, _ in spans]
        self._ends = [end for _, end in spans]
        self.overlap = any(
            end > start for end, start in zip(self._ends, self._starts[1:], strict=False)
        )

    def touch(self, flat: NDArray[Any]) -> bool:
        """Tell whether `flat` shares memory with one of the arrays, which do not overlap."""
        # The arrays are sorted and disjoint, so only one of them can reach into [start, end): the
        # last one that begins before `end`. All earlier ones end before it begins.
        start, end = _span(flat)
        index = bisect_left(self._starts, end) - 1
        return flat.nbytes > 0 and index >= 0 and self._ends[index] > start


class Apart:
    """Remembers whether contiguous arrays share no memory.

    Their dtypes and shapes are known. Arrays that come again and again are recognised by identity,
    because asking numpy for their addresses takes many times as long.
    """

    __slots__ = ("_known", "_refs")

    def __init__(self) -> None:
        self._known: tuple[int, ...] | None = None
        self._refs: list[weakref.ref[Any]] = []

    def are(self, values: Sequence[Any], flats: Sequence[NDArray[Any]]) -> bool:
        """Tell whether they share no memory. `values` are numpy arrays or tensors, `flats` their
        memory."""
        # A numpy array keeps its address as long as it lives. A tensor may get other memory, but
        # tells its address at once.
        known = tuple([id(x) if type(x) is np.ndarray else x.data_ptr() for x in values])
        if known == self._known:
            return True
        # For contiguous arrays numpy decides by their bounds. For a few, comparing each pair is
        # faster.
        pairs = combinations(flats, 2) if len(flats) <= FEW else ()
        if any(starmap(np.may_share_memory, pairs)) or (not pairs and Ranges(flats).overlap):
            return False
        self._refs = [weakref.ref(x, self._forget) for x in values if type(x) is np.ndarray]
        self._known = known
        return True

    def _forget(self, ref: weakref.ref[Any]) -> None:
        """Forget the arrays, because another array may get the id of one that is gone."""
        self._known = None
