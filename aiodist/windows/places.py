"""Indices into exposed memory, and the checks of values that are written there. Pure: no I/O.

The rank that asks checks its arguments against the owner's dtype and shape, so that it hears of a
mistake at once. The owner checks again, because the other rank may have a bug. It then refuses only
that request.
"""

from __future__ import annotations

import operator
import reprlib
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from aiodist.buffers.arrays import UserArray, check_same, shown, view, writable
from aiodist.buffers.dtypes import CARRIERS, carrier
from aiodist.buffers.kernels import Kernel
from aiodist.phases.base import as_int
from aiodist.types import Op, ReduceOp

ALL = "..."
"""How an Ellipsis travels."""

INDICES = "a window is indexed by ints, slices of ints and ..."


class Request(NamedTuple):
    """What one rank asks of the memory of another.

    `number` is the tag of the answer. The answer is the value that was read, None, or a text that
    says why the request was refused.
    """

    op: str
    number: int
    where: list[Any]
    value: Any
    name: str
    """The name of the operator of `accumulate`, else ""."""

    @staticmethod
    def read(message: Any) -> Request:
        """Make a request of a message. Raises ValueError if it has no number to answer to.

        Everything else is checked when the request is carried out.
        """
        match message:
            case (op, int(number), where, value, name) if 0 < number < 1 << 63:
                return Request(op, int(number), where, value, name)
        raise ValueError(
            "expected five values, of which the second is a number above 0, not "
            + reprlib.repr(message)[:200]
        )


class Exposed(NamedTuple):
    """The dtype and shape of what a rank has exposed."""

    name: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return shown(self.name, self.shape)

    def part(self, where: Any) -> tuple[list[Any], tuple[int, ...]]:
        """Return an index in the form that travels, and the shape of the part that it means.

        Raises TypeError if the index has anything but ints, slices and ``...``, and IndexError if
        it lies outside.
        """
        items = where if isinstance(where, tuple) else (where,)
        plain = [_plain(item) for item in items]
        # An array of that shape that takes no memory.
        stand_in = np.broadcast_to(np.empty((), carrier(self.name)), self.shape)
        return plain, stand_in[index_of(plain)].shape

    @np.errstate(over="ignore")  # a number that is too large for a float becomes infinity
    def value(self, value: Any, shape: tuple[int, ...]) -> NDArray[Any]:
        """Return `value` as an array for a part of that shape.

        Raises TypeError and ValueError if it does not fit.
        """
        dtype = carrier(self.name)
        found = view(value, "value")
        if found is not None and found.name in CARRIERS:
            # numpy would take the bits of its elements for integers.
            raise TypeError(
                f"value: {found.name} cannot be converted to {self.name} because numpy has no such "
                "dtype: convert it first"
            )
        # A number has no dtype of its own: 200 fits uint8, although numpy takes it for an int64.
        is_number = isinstance(value, (int, float, complex)) and dtype.kind in "biufc"
        if is_number and np.result_type(value, dtype) == dtype:
            try:
                value = np.asarray(value, dtype)
            except OverflowError:
                text = f"value: the number is outside of the range of {self.name}"
                raise ValueError(text) from None
        try:
            array = np.asarray(value) if found is None else found.base
        except ValueError as error:
            text = f"value: numpy cannot make an array of it ({error}): give an array or a number"
            raise ValueError(text) from error
        # numpy would cut the digits of a number to the length of the strings.
        is_cut = dtype.kind in "SU" and array.dtype.kind not in "SU"
        if is_cut or not np.can_cast(array.dtype, dtype, "same_kind"):
            raise TypeError(
                f"value: {array.dtype} cannot be converted to {self.name} safely: convert it first"
            )
        try:
            np.broadcast_to(array, shape)
        except ValueError:
            raise ValueError(
                f"value has shape {array.shape}, and the part of that rank's memory has shape "
                f"{shape}: give an array of that shape, or one that numpy broadcasts to it"
            ) from None
        return array.astype(dtype, copy=False)

    def check_out(self, out: Any, shape: tuple[int, ...]) -> None:
        """Raises TypeError or ValueError if a part of that shape does not fit into `out`."""
        check_same("the part", self.name, shape, writable(out, "out"), "out")

    def operator(self, op: Op) -> str:
        """Return the name of an operator. Raises TypeError if windows do not have it."""
        op = ReduceOp.of(op)
        if op.function is not None or op.factor is not None or op.name == "AVG":
            raise TypeError(f"accumulate takes SUM, PRODUCT, MIN, MAX and the like, not {op}")
        Kernel.of(op, self.name)
        return op.name


def memory_of(x: Any) -> UserArray:
    """Return the memory of `x`. Raises TypeError or ValueError if it cannot be exposed."""
    array = writable(x, "x")
    if array.name in CARRIERS:
        raise TypeError(f"x: {array} cannot be exposed: numpy has no such dtype")
    return array


def index_of(plain: list[Any]) -> tuple[Any, ...]:
    """Make an index of the form that travels. Raises TypeError for anything but ints and slices.

    numpy also takes lists. They are refused, because a small request with a list could ask for any
    amount of memory.
    """
    return tuple(map(_index, plain))


def accumulate(into: NDArray[Any], value: NDArray[Any], op: str, name: str) -> NDArray[Any]:
    """Return ``into op value``, computed as a collective computes it."""
    kernel = Kernel.of(ReduceOp(op), name)
    operands = [
        np.ascontiguousarray(each, kernel.dtype).reshape(-1)
        for each in (into, np.broadcast_to(value, into.shape))
    ]
    result = np.empty(into.size, kernel.dtype)
    kernel.reduce(operands, result, 1)
    return result.reshape(into.shape)


def _index(plain: Any) -> Any:
    if isinstance(plain, tuple):
        return slice(*plain)
    return ... if plain == ALL else operator.index(plain)


def _plain(item: Any) -> Any:
    if item is Ellipsis:
        return ALL
    if isinstance(item, slice):
        ends = (item.start, item.stop, item.step)
        return tuple(None if end is None else as_int(end, INDICES) for end in ends)
    index = as_int(item, INDICES)
    if not -1 << 63 <= index < 1 << 63:  # numpy would say that it is no integer
        raise IndexError(f"index {index} is out of bounds: no axis is that long")
    return index
