"""Reduction of flat arrays by a function of the user."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from aiodist.buffers.arrays import Kind, UserArray, check_same, over, view
from aiodist.buffers.dtypes import carrier
from aiodist.types import ReduceOp

Flat = NDArray[Any]

PIECE_BYTES: Final = 1024 * 1024
"""Bytes that an elementwise function gets at once: enough to outweigh the call, and little to
copy."""


class CustomKernel:
    """A user's function as a kernel, with the methods of `kernels.Kernel`.

    Accumulators are carriers, so loading and storing only copy. The function gets copies, so that
    it may write into `a` or `b`. Its exceptions are passed on. A result of another kind, dtype or
    shape raises TypeError or ValueError. If `sliceable` is False, the flat arrays must be whole:
    all `parts`, one after the other.
    """

    __slots__ = (
        "_function",
        "_label",
        "_parts",
        "dtype",
        "loads",
        "name",
        "op",
        "sliceable",
        "stores",
        "wire_dtype",
    )

    def __init__(self, op: ReduceOp, name: str, parts: Sequence[tuple[Kind, tuple[int, ...]]]):
        """`parts` are kind and shape of each of the caller's arrays that are joined here."""
        assert op.function is not None
        self._function = op.function  # the user's
        self._label = op.name.removeprefix("custom:")  # its name in errors
        self._parts = tuple(parts)
        self.op = op
        self.name = name
        # The same for carriers and accumulators, because nothing is converted.
        self.dtype: np.dtype[Any] = carrier(name)
        self.wire_dtype = self.dtype
        self.loads = False
        self.stores = False
        self.sliceable = op.elementwise

    def load(self, x: Flat, into: Flat | None = None) -> Flat:
        """Copy `x` to `into` (which is returned) or to a new array."""
        if into is None:
            return x.copy()
        into[:] = x
        return into

    def combine(self, into: Flat, a: Flat, b: Flat) -> None:
        """Compute ``into = f(a, b)``, with `a` from lower ranks. `into` may be `a` or `b`."""
        for kind, shape, start, stop in self._pieces(len(into)):
            into[start:stop] = self._call(kind, shape, a[start:stop], b[start:stop])

    def store(self, acc: Flat, out: Flat, size: int) -> None:
        """Copy `acc` to `out`."""
        out[:] = acc

    def reduce(self, operands: Sequence[Flat], out: Flat, size: int) -> None:
        """Compute ``out = f(f(operands[0], operands[1]), …)``. `out` may be one of the operands."""
        for kind, shape, start, stop in self._pieces(len(out)):
            acc = operands[0][start:stop]
            for operand in operands[1:]:
                acc = self._call(kind, shape, acc, operand[start:stop])
            out[start:stop] = acc

    # An elementwise function does not see the bounds of the arrays: they are joined, cut anywhere,
    # and it gets flat pieces. Any other function gets each array in its own shape.
    def _pieces(self, length: int) -> Iterator[tuple[Kind, tuple[int, ...], int, int]]:
        """Yield (kind, shape, start, stop) of each call of the function."""
        start = 0
        if self.sliceable:
            step = PIECE_BYTES // self.dtype.itemsize or 1
            for start in range(0, length, step):
                stop = min(start + step, length)
                yield self._parts[0][0], (stop - start,), start, stop
            return
        for kind, shape in self._parts:
            stop = start + int(np.prod(shape, dtype=np.int64))
            if start < stop:
                yield kind, shape, start, stop
            start = stop

    def _call(self, kind: Kind, shape: tuple[int, ...], a: Flat, b: Flat) -> Flat:
        """Return f of two flat arrays, flat.

        The result may be memory that the function writes again in its next call, so use it before.
        The function may write into its first argument and return it, or keep both. So both are
        copies, because neither the user's array nor data for another rank may change.
        """
        left, right = (over(x.copy(), kind, self.name, shape) for x in (a, b))
        result = self._take(self._function(left, right), shape)
        return np.ascontiguousarray(result.base, self.dtype).reshape(-1)

    def _take(self, result: Any, shape: tuple[int, ...]) -> UserArray:
        where = f"the result of the operator {self._label}"
        array = view(result, where)
        if array is None:
            raise TypeError(
                f"{where} must be an array like its arguments, it is {type(result).__name__}: "
                "return the array, even if it is the first argument"
            )
        check_same("each argument", self.name, shape, array, where)
        return array
