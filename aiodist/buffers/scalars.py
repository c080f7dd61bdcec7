"""Reduction of Python numbers: int as int64, float as float64, complex, bool.

Arrays wrap around when they overflow, as in numpy, because a check would take as long as adding.
For single numbers users expect more: ints are added as Python adds them, and a result that does not
fit into 64 bits raises OverflowError. The numbers of all ranks are gathered, and each rank reduces
them in the order of the ranks. So all ranks get the same result, or the same error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, Final

import numpy as np

from aiodist.buffers.kernels import Kernel
from aiodist.buffers.packed_numbers import fits
from aiodist.types import ReduceOp

Scalar = bool | int | float | complex

_DTYPES: Final[dict[type, str]] = {
    bool: "bool",
    int: "int64",
    float: "float64",
    complex: "complex128",
}
_FOR_BOOL: Final = frozenset({"LAND", "LOR", "LXOR", "BAND", "BOR", "BXOR"})


def check_scalar(value: Any, op: ReduceOp) -> Scalar:
    """Return `value` as a plain bool, int, float or complex.

    Raises TypeError if the operator has no meaning for it, and OverflowError for an int of more
    than 64 bits.
    """
    # The order of `_DTYPES` matters, because a bool is an int, too. The result has exactly that
    # type, because a subclass such as `enum.IntEnum` would be a plain number on the other ranks.
    kind = next(kind for kind in _DTYPES if isinstance(value, kind))
    value = kind(value)
    if op.function is None:
        if kind is bool and op.name not in _FOR_BOOL:
            raise TypeError(
                f"{op} has no meaning for bool: LAND, LOR, LXOR, BAND, BOR and BXOR do, or pass an "
                "int"
            )
        if not (kind is int and op.name == "AVG"):
            Kernel.of(op, _DTYPES[kind])
    if kind is int:
        _check_range(value, f"{_shown(value)} given to {op}")
    plain: Scalar = value
    return plain


def reduce_scalars(values: Sequence[Scalar], op: ReduceOp) -> Scalar:
    """Reduce numbers of one type, given in rank order, in that type (AVG of int: float).

    Raises OverflowError, naming the operator, if an int result does not fit into 64 bits, and
    TypeError for mixed types or a custom operator that returns another type.
    """
    kind = type(values[0])
    if any(type(value) is not kind for value in values):
        names = ", ".join(sorted({type(value).__name__ for value in values}))
        raise TypeError(f"{op} of numbers of different types: {names}")
    return reduction_of(kind, op)(values)


def reduction_of(kind: type, op: ReduceOp) -> Callable[[Sequence[Any]], Scalar]:
    """Return the function that reduces numbers of this type."""
    if op.function is not None:
        return lambda values: reduce(lambda a, b: _custom(op, a, b), values)
    if kind is int:
        return lambda values: _reduce_ints(values, op)
    if kind is float and op.name in _FLOATS:
        return _FLOATS[op.name]
    kernel = Kernel.of(op, _DTYPES[kind])

    def by_kernel(values: Sequence[Any]) -> Scalar:
        out = np.empty(1, kernel.dtype)
        kernel.reduce([np.array([value], kernel.dtype) for value in values], out, len(values))
        plain: Scalar = out[0].item()
        return plain

    return by_kernel


def _reduce_ints(values: Sequence[int], op: ReduceOp) -> int | float:
    if op.name == "AVG":
        return sum(values) / len(values)
    result: int = _INTS[op.name](values, op.factor)
    _check_range(result, f"{op} over {len(values)} ranks, {_shown(result)},")
    return result


_INTS: Final[dict[str, Any]] = {
    "SUM": lambda values, _: sum(values),
    "PRODUCT": lambda values, _: reduce(int.__mul__, values),
    "MIN": lambda values, _: min(values),
    "MAX": lambda values, _: max(values),
    "BAND": lambda values, _: reduce(int.__and__, values),
    "BOR": lambda values, _: reduce(int.__or__, values),
    "BXOR": lambda values, _: reduce(int.__xor__, values),
    "LAND": lambda values, _: int(all(values)),
    "LOR": lambda values, _: int(any(values)),
    "LXOR": lambda values, _: sum(map(bool, values)) % 2,
    "PREMUL_SUM": lambda values, factor: factor * sum(values),
}


# What Python and numpy compute alike, bit by bit except for the choice of a NaN. Python takes a
# tenth of the time.
_FLOATS: Final[dict[str, Callable[[Sequence[Any]], float]]] = {
    "SUM": lambda values: reduce(float.__add__, values),
    "PRODUCT": lambda values: reduce(float.__mul__, values),
    "AVG": lambda values: reduce(float.__add__, values) / len(values),
}


def _custom(op: ReduceOp, a: Scalar, b: Scalar) -> Scalar:
    assert op.function is not None
    result = op.function(a, b)
    if isinstance(result, np.generic):
        result = result.item()
    if type(result) is not type(a):
        raise TypeError(
            f"{op} got two numbers of type {type(a).__name__} and returned {_shown(result)}: "
            "it must return that type"
        )
    if type(result) is int:
        _check_range(result, f"{op}, {_shown(result)},")
    plain: Scalar = result
    return plain


def _shown(value: Any) -> str:
    """Describe a value in an error, because Python refuses to print ints of thousands of digits."""
    if isinstance(value, int) and value.bit_length() > 200:
        return f"an int of {value.bit_length()} bits"
    try:
        return repr(value)
    except ValueError:  # there is such an int in it
        return f"a {type(value).__name__}"


def _check_range(value: int, what: str) -> None:
    if not fits(value):
        raise OverflowError(f"{what} does not fit in 64 bits: use float, or an array")
