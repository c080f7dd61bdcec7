"""Several flat arrays as one logical array, which can be cut at any element.

The gradients of a model are hundreds of arrays. Reduced one by one, each would need a round of its
own. Copied into one large array, all would be copied twice. A vector lets them be reduced as one
array without a copy. A plan speaks of elements 1,000 to 2,000. The vector knows that these are the
end of one array, all of the next, and the beginning of a third.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

Flat = NDArray[Any]


class Vector:
    """The concatenation of one-dimensional contiguous arrays of one dtype.

    `length` counts elements. `itemsize` is the bytes of one, and `nbytes` of all. `arrays` are the
    parts, without empty ones. Nothing is copied. A memoryview counts as an array of its bytes.
    """

    __slots__ = ("_bytes", "_offsets", "arrays", "dtype", "itemsize", "length", "nbytes")

    def __init__(self, parts: Sequence[Flat | memoryview], dtype: Any = None) -> None:
        """`dtype` is that of the parts. It is needed if there may be no part."""
        arrays = [
            np.asarray(part, np.uint8) if isinstance(part, memoryview) else part for part in parts
        ]
        self.dtype: np.dtype[Any] = arrays[0].dtype if dtype is None else np.dtype(dtype)
        self.arrays: list[Flat] = [array for array in arrays if len(array)]
        self.itemsize = self.dtype.itemsize
        for array in self.arrays:
            if array.dtype != self.dtype or array.ndim != 1 or not array.flags.c_contiguous:
                raise ValueError(
                    f"a vector of {self.dtype} takes flat contiguous arrays of it, "
                    f"not {array.dtype}{list(array.shape)}"
                )
        # The beginning of each part, and the end of the last.
        self._offsets = [0, *accumulate([len(array) for array in self.arrays])]
        self._bytes: list[memoryview] | None = None  # of `arrays`, made on demand
        self.length = self._offsets[-1]
        self.nbytes = self.length * self.itemsize

    @classmethod
    def of(cls, array: Flat) -> Vector:
        """Return the vector of one flat contiguous array.

        This skips the checks of each part, because nearly all vectors have one part, and are made
        within the call of a small collective.
        """
        vector = cls.__new__(cls)
        vector.dtype = array.dtype
        vector.itemsize = array.itemsize
        vector.length = len(array)
        vector.nbytes = array.nbytes
        vector.arrays = [array] if vector.length else []
        vector._offsets = [0, vector.length]
        vector._bytes = None
        return vector

    def lend(self, array: Flat | None) -> None:
        """Let it be `array` from here on, which has the same dtype and length as the one it was
        made of.

        None: the array belongs to the user again, and nothing is read until the next one is lent.
        """
        self.arrays = [] if array is None or not self.length else [array]
        self._bytes = None

    def __len__(self) -> int:
        return self.length

    def views(self, start: int, stop: int) -> list[memoryview]:
        """Return the bytes of elements `start` to `stop`, in order: contiguous views, none
        empty."""
        if start >= stop:
            return []
        size = self.itemsize
        whole = self._bytes
        if whole is None:
            whole = self._bytes = [array.view(np.uint8).data for array in self.arrays]
        if len(whole) == 1:
            return [whole[0][start * size : stop * size]]
        return [whole[i][a * size : b * size] for i, a, b in self._cut(start, stop)]

    def pieces(self, start: int, stop: int) -> list[Flat]:
        """Return elements `start` to `stop`, in order: flat views, none empty."""
        if start >= stop:
            return []
        if len(self.arrays) == 1:
            return [self.arrays[0][start:stop]]
        return [self.arrays[i][a:b] for i, a, b in self._cut(start, stop)]

    def piece(self, start: int, stop: int) -> Flat | None:
        """Return elements `start` to `stop` as one flat view if they lie in one array; else
        None."""
        arrays = self.arrays
        if len(arrays) == 1:
            return arrays[0][start:stop]
        offsets = self._offsets
        index = bisect_right(offsets, start) - 1
        if index >= len(arrays) or stop > offsets[index + 1]:
            return None
        return arrays[index][start - offsets[index] : stop - offsets[index]]

    def _cut(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        offsets = self._offsets
        index = bisect_right(offsets, start) - 1
        while start < stop:
            end = min(stop, offsets[index + 1])
            yield index, start - offsets[index], end - offsets[index]
            start = end
            index += 1


def align(operands: Sequence[Sequence[Flat]]) -> Iterator[list[Flat]]:
    """Cut lists of pieces of equal total length wherever any of them is cut.

    Yields one flat array of each operand, all of one length, in order, for a kernel.
    """
    if all(len(pieces) == 1 for pieces in operands):
        yield [pieces[0] for pieces in operands]
        return
    # A cut of any operand is a cut of all::
    #
    #     one        |--- 5 ---|-- 3 --|
    #     another    |- 2 -|---- 6 ----|
    #     yielded    | 2   | 3 |   3   |
    #
    # `at` is the position in each: the number of its piece, and the element in that.
    at = [(0, 0)] * len(operands)
    while all(index < len(pieces) for (index, _), pieces in zip(at, operands, strict=True)):
        n = min(
            len(pieces[index]) - start for (index, start), pieces in zip(at, operands, strict=True)
        )
        yield [
            pieces[index][start : start + n]
            for (index, start), pieces in zip(at, operands, strict=True)
        ]
        at = [
            (index, start + n) if start + n < len(pieces[index]) else (index + 1, 0)
            for (index, start), pieces in zip(at, operands, strict=True)
        ]
