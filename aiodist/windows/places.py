"""Which part of exposed memory is meant, and what may be written there. No I/O in here.

The rank that asks checks everything, against the dtype and shape that the owner has told: so it
hears of a mistake at once, and the owner carries out what it is asked. That may be wrong all the
same, where the other rank is not what it should be: then the owner refuses that one request.
"""

from __future__ import annotations

import operator
import reprlib
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from aiodist.buffers.arrays import check_same, view, writable
from aiodist.buffers.dtypes import CARRIERS, carrier
from aiodist.buffers.kernels import Kernel
from aiodist.types import Op, ReduceOp

ALL = "..."
"""How an Ellipsis travels."""


class Request(NamedTuple):
    """What one rank asks of the memory of another. `number`: the tag of its answer, which is what
    was read, None, or the reason in words why it was not carried out."""

    op: str
    number: int
    where: list[Any]
    value: Any
    name: str
    """Of the operator."""

    @staticmethod
    def read(message: Any) -> Request:
        """A request that has come. Raises ValueError where it is none that could be answered; what
        else may be wrong with it shows when it is carried out."""
        match message:
            case (op, int(number), where, value, name) if 0 < number < 1 << 63:
                return Request(op, int(number), where, value, name)
        raise ValueError(
            "expected five values, of which the second is a number above 0, not "
            + reprlib.repr(message)
        )


class Exposed(NamedTuple):
    """What a rank has exposed."""

    name: str
    shape: tuple[int, ...]

    def part(self, where: Any) -> tuple[list[Any], tuple[int, ...]]:
        """An index as it travels, and the shape of what it means. Raises TypeError for what is no
        index of ints and slices, IndexError for one that lies outside."""
        items = where if isinstance(where, tuple) else (where,)
        plain = [_plain(item) for item in items]
        # An array of that shape that takes no memory.
        stand_in = np.broadcast_to(np.empty((), carrier(self.name)), self.shape)
        return plain, stand_in[index_of(plain)].shape

    def value(self, value: Any, shape: tuple[int, ...]) -> NDArray[Any]:
        """What is written to a part of that shape. Raises TypeError and ValueError for what does
        not fit."""
        dtype = carrier(self.name)
        found = view(value, "value")
        # A number has no dtype of its own: 200 fits uint8, though it would be an int64.
        if isinstance(value, (int, float, complex)) and np.result_type(value, dtype) == dtype:
            value = np.asarray(value, dtype)
        array = np.asarray(value) if found is None else found.base
        if not np.can_cast(array.dtype, dtype, "same_kind"):
            raise TypeError(f"value: {array.dtype} does not become {self.name}: convert it")
        np.broadcast_to(array, shape)
        return array.astype(dtype, copy=False)

    def check_out(self, out: Any, shape: tuple[int, ...]) -> None:
        """Raises TypeError and ValueError where a part of that shape does not go into `out`."""
        check_same("the part", self.name, shape, writable(out, "out"), "out")

    def operator(self, op: Op) -> str:
        """The name of an operator. Raises TypeError for one that is not for windows."""
        op = ReduceOp.of(op)
        if op.function is not None or op.factor is not None or op.name == "AVG":
            raise TypeError(f"accumulate takes SUM, PRODUCT, MIN, MAX and the like, not {op}")
        Kernel.of(op, self.name)
        return op.name


def memory_of(x: Any) -> tuple[Exposed, NDArray[Any]]:
    """The memory of an array to expose. Raises TypeError and ValueError for what cannot be."""
    array = writable(x, "x")
    if array.name in CARRIERS:
        raise TypeError(f"x: {array} cannot be exposed: numpy has no such dtype")
    return Exposed(array.name, array.shape), array.base


def index_of(plain: list[Any]) -> tuple[Any, ...]:
    """The index that travelled. Raises TypeError for what is none of ints and slices: numpy takes
    more than these, such as lists, by which a small request could ask for any amount of memory."""
    return tuple(map(_index, plain))


def accumulate(into: NDArray[Any], value: NDArray[Any], op: str, name: str) -> NDArray[Any]:
    """``into op value``, as a collective would reduce them."""
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
        return tuple(None if end is None else operator.index(end) for end in ends)
    if isinstance(item, bool):
        raise TypeError("a window is indexed by ints, slices and ..., not by bools")
    return operator.index(item)
