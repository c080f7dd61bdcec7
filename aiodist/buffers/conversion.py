"""Floats of one dtype as floats of another."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from aiodist.buffers.arrays import UserArray
from aiodist.buffers.dtypes import carrier
from aiodist.buffers.kernels import round_to_bfloat16

FLOATS: Final = frozenset({"float16", "float32", "float64", "bfloat16"})

_AT_ONCE = 1 << 16
"""Elements that are converted at once, so that they stay in the cache."""


def convert(source: NDArray[np.generic], name: str, into: UserArray) -> None:
    """Write the elements of `source`, a carrier array of dtype `name`, to `into`.

    They are rounded to nearest, ties to even. From float64 to bfloat16 they are rounded twice, by
    way of float32, as torch does. Both dtypes are in FLOATS, and both have one shape.
    """
    if name == into.name:
        np.copyto(into.base, source)
        return
    base = into.base
    if not source.ndim or (source.flags.c_contiguous and base.flags.c_contiguous):
        source, base = source.reshape(-1), base.reshape(-1)
    for at in np.ndindex(source.shape[:-1]):  # row by row, because strides may be any
        for start in range(0, source.shape[-1], _AT_ONCE):
            line = source[at][start : start + _AT_ONCE]
            base[at][start : start + _AT_ONCE] = _converted(line, name, into.name)


def _converted(line: NDArray[np.generic], name: str, into: str) -> NDArray[np.generic]:
    if name == "bfloat16":
        line = (line.astype("<u4") << 16).view("<f4")
    if into != "bfloat16":
        with np.errstate(over="ignore"):  # a number that is too large becomes infinity
            return line.astype(carrier(into))
    out = np.empty(line.shape, carrier(into))
    with np.errstate(over="ignore"):
        round_to_bfloat16(np.ascontiguousarray(line, "<f4"), out)
    return out
