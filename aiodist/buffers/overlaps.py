"""Which arrays share memory.

An operation reads some arrays while it writes others. Where two of them share memory, the result
would depend on what came first on this rank, so such a call is refused, or goes by a copy.

Of contiguous arrays that is a question of intervals of addresses: sorted once, each further array
is found in them by bisection (`Ranges`). Others may lie between each other, as the columns of a
matrix do, and share nothing: of those whose bounds meet, numpy is asked (`meetings`).
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
"""Most candidates that numpy may look at for one pair: two slices of any array of a few dimensions
take a handful. What takes more was made to be hard, and counts as sharing memory."""

FEW: Final = 4
"""So many arrays are compared two by two."""


def _span(flat: NDArray[Any]) -> tuple[int, int]:
    """First and last address + 1 of a contiguous array."""
    start: int = flat.__array_interface__["data"][0]
    return start, start + flat.nbytes


def same(a: NDArray[Any], b: NDArray[Any]) -> bool:
    """Whether two contiguous arrays are the same memory."""
    return a is b or _span(a) == _span(b)


def bounds(array: NDArray[Any]) -> tuple[int, int]:
    """First and last address + 1 of what an array, which need not be contiguous, lies between."""
    first = last = array.__array_interface__["data"][0]
    for length, stride in zip(array.shape, array.strides, strict=True):
        reach = (length - 1) * stride
        first, last = (first + reach, last) if reach < 0 else (first, last + reach)
    return first, last + array.itemsize


def shares(a: NDArray[Any], b: NDArray[Any]) -> bool:
    """Whether two arrays share memory."""
    try:
        return np.shares_memory(a, b, max_work=MOST_WORK)
    except np.exceptions.TooHardError:
        return True


def alike(a: NDArray[Any], b: NDArray[Any]) -> bool:
    """Whether two arrays have the same elements in the same places."""
    return (a.dtype, a.shape, a.strides) == (b.dtype, b.shape, b.strides) and bounds(a) == bounds(b)


def folds(array: NDArray[Any]) -> bool:
    """Whether two elements of one array share memory, as those of windows that slide do."""
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
    # Rare, and no array that slicing makes: all addresses are looked at.
    places = np.zeros(array.shape, np.intp)  # of an array without elements, none
    for axis, (stride, n) in enumerate(zip(array.strides, array.shape, strict=True)):
        places += (np.arange(n) * stride).reshape(-1, *[1] * (array.ndim - axis - 1))
    return bool((np.diff(np.sort(places, axis=None)) < array.itemsize).any())


def meetings(
    written: Sequence[NDArray[Any]], read: Sequence[NDArray[Any]] = ()
) -> Iterator[tuple[int, int]]:
    """The pairs of these, by their numbers, that share memory, of which one at least is `written`.
    Those that are `read` are numbered from ``len(written)`` on."""
    count = len(written)
    spans = sorted((*bounds(x), at) for at, x in enumerate((*written, *read)) if x.size)
    reaching: list[tuple[int, int]] = []  # the ends of those before, that may reach this one
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
        # They are sorted and apart, so only one of them can reach into [start, end): the last one
        # that begins before `end`. All before that one end before it begins.
        start, end = _span(flat)
        index = bisect_left(self._starts, end) - 1
        return flat.nbytes > 0 and index >= 0 and self._ends[index] > start


class Apart:
    """Whether contiguous arrays of known dtypes and shapes share no memory. Those that come again
    and again are known by who they are: to ask numpy where they lie takes many times as long."""

    __slots__ = ("_known", "_refs")

    def __init__(self) -> None:
        self._known: tuple[int, ...] | None = None
        self._refs: list[weakref.ref[Any]] = []

    def are(self, values: Sequence[Any], flats: Sequence[NDArray[Any]]) -> bool:
        """Whether they are. `values`: numpy arrays or tensors, `flats`: the memory of each."""
        # An array of numpy stays where it is as long as it lives. A tensor may be given another
        # memory, but says at once where that is.
        known = tuple([id(x) if type(x) is np.ndarray else x.data_ptr() for x in values])
        if known == self._known:
            return True
        # Of contiguous arrays numpy says it by their bounds: of a few, each pair is faster.
        pairs = combinations(flats, 2) if len(flats) <= FEW else ()
        if any(starmap(np.may_share_memory, pairs)) or (not pairs and Ranges(flats).overlap):
            return False
        self._refs = [weakref.ref(x, self._forget) for x in values if type(x) is np.ndarray]
        self._known = known
        return True

    def _forget(self, ref: weakref.ref[Any]) -> None:
        """Another array may get the number of one that is gone."""
        self._known = None
