"""Several flat arrays as one logical array, cut at any element.

The gradients of a model are hundreds of arrays. Reduced one by one, each would pay for a round of
its own; copied into one large array, all would be copied twice. As a vector they are reduced as if
they were one, where they lie: a plan speaks of elements 1,000 to 2,000, and the vector knows that
these are the end of one array, all of the next, and the beginning of a third.
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

    `length`: elements. `itemsize`: bytes of one. `arrays`: the parts, without the empty ones.
    Nothing is copied. A memoryview stands for an array of its bytes.
    """

    __slots__ = ("_bytes", "_offsets", "arrays", "dtype", "itemsize", "length")

    def __init__(self, parts: Sequence[Flat | memoryview], dtype: Any = None) -> None:
        """`dtype` is that of the parts; it has to be given where there may be no part."""
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
        # Where each part begins, and the end of the last.
        self._offsets = [0, *accumulate([len(array) for array in self.arrays])]
        self._bytes = [array.view(np.uint8).data for array in self.arrays]  # the bytes of each part
        self.length = self._offsets[-1]

    @classmethod
    def of(cls, array: Flat) -> Vector:
        """The vector of one flat contiguous array.

        Made without a look at each part, because nearly all vectors have one, and are made in the
        call of a small collective.
        """
        vector = cls.__new__(cls)
        vector.dtype = array.dtype
        vector.itemsize = array.itemsize
        vector.length = len(array)
        vector.arrays = [array] if vector.length else []
        vector._offsets = [0, vector.length]
        vector._bytes = [array.view(np.uint8).data] if vector.length else []
        return vector

    def __len__(self) -> int:
        return self.length

    @property
    def nbytes(self) -> int:
        return self.length * self.itemsize

    def views(self, start: int, stop: int) -> list[memoryview]:
        """The bytes of elements `start` to `stop`, in order: contiguous views, none empty."""
        if start >= stop:
            return []
        size = self.itemsize
        if len(self.arrays) == 1:
            return [self._bytes[0][start * size : stop * size]]
        return [self._bytes[i][a * size : b * size] for i, a, b in self._cut(start, stop)]

    def pieces(self, start: int, stop: int) -> list[Flat]:
        """Elements `start` to `stop`, in order: flat views, none empty."""
        if start >= stop:
            return []
        if len(self.arrays) == 1:
            return [self.arrays[0][start:stop]]
        return [self.arrays[i][a:b] for i, a, b in self._cut(start, stop)]

    def piece(self, start: int, stop: int) -> Flat | None:
        """Elements `start` to `stop` as one flat view, where they lie in one array; else None."""
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
    """Cut lists of pieces of equal total length where any of them is cut.

    Yields one flat array of each operand, all of one length, in order: what a kernel can work on.
    """
    if all(len(pieces) == 1 for pieces in operands):
        yield [pieces[0] for pieces in operands]
        return
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
