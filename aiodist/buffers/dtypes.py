"""Names of dtypes on the wire, and the numpy dtypes that hold their elements.

A dtype has the name that numpy and torch give it: `float32`, `bool`, `datetime64[ns]`, `S12`,
`bfloat16`. For dtypes that numpy lacks (bfloat16, float8, …), elements are held in a *carrier*: the
unsigned integer of the same size. Elements are little-endian on the wire and in carrier arrays. A
name has no byte order: arrays of both orders travel, and new ones have this machine's.

**Why names instead of codes.** A rank with a newer torch may have dtypes that this rank does not
know. An error can show the name, and a known carrier can hold the bytes all the same.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

import numpy as np

DType = np.dtype[np.generic]

BOOL: Final = frozenset({"bool"})
SIGNED: Final = frozenset({"int8", "int16", "int32", "int64"})
UNSIGNED: Final = frozenset({"uint8", "uint16", "uint32", "uint64"})
INTEGERS: Final = SIGNED | UNSIGNED
LONG_DOUBLE: Final = f"longdouble{np.finfo(np.longdouble).nmant + 1}"
"""The name contains the bits of the significand, because long double differs between platforms."""
LONG_COMPLEX: Final = f"c{LONG_DOUBLE}"
FLOATS: Final = frozenset({"float16", "float32", "float64", "bfloat16", LONG_DOUBLE})
COMPLEX: Final = frozenset({"complex64", "complex128", LONG_COMPLEX})

NARROW: Final = frozenset(f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8))
"""Integers of fewer than 8 bits. torch can neither copy nor compute them."""

CARRIERS: Final = {
    "bfloat16": "<u2",
    "complex32": "<u4",
    "float8_e4m3fn": "u1",
    "float8_e4m3fnuz": "u1",
    "float8_e5m2": "u1",
    "float8_e5m2fnuz": "u1",
    "float8_e8m0fnu": "u1",
    "float4_e2m1fn_x2": "u1",
    "bits8": "u1",
    "bits1x8": "u1",
    "bits2x4": "u1",
    "bits4x2": "u1",
    "bits16": "<u2",
    **dict.fromkeys(NARROW, "u1"),
}
"""Dtypes that only torch has."""

TORCH: Final = (
    BOOL | INTEGERS | {"float16", "float32", "float64", "complex64", "complex128"} | set(CARRIERS)
)
"""Dtypes of tensors."""

MAX_NDIM: Final = 64 if int(np.__version__.split(".")[0]) >= 2 else 32


def _little(dtype: DType) -> DType:
    """Return the dtype in little-endian order, as *native* if that is this machine's order.

    numpy distinguishes "<i4", which `newbyteorder` makes, from "=i4", which users make. Buffers of
    the first report "<i", which memoryview, Cython and C extensions refuse.
    """
    return np.dtype(dtype.newbyteorder("<").str)


_PLAIN: Final[dict[str, DType]] = {
    **{
        name: _little(np.dtype(name))
        for name in sorted(
            BOOL | INTEGERS | {"float16", "float32", "float64", "complex64", "complex128"}
        )
    },
    **{name: np.dtype(carrier) for name, carrier in CARRIERS.items()},
}
_LONG: Final[dict[str, DType]] = {
    LONG_DOUBLE: _little(np.dtype(np.longdouble)),
    LONG_COMPLEX: _little(np.dtype(np.clongdouble)),
}
# Both byte orders have one name: an array of the other order is turned when it is read, and
# received arrays are little-endian. Hashes of `np.dtype` depend on the meaning, so "=i8", "<i8"
# and, with a C long of 8 bytes, "l" are one key.
_NAMES: Final[dict[DType, str]] = {
    order: name
    for name, dtype in [*_LONG.items(), *_PLAIN.items()]
    if name not in CARRIERS
    for order in (dtype, dtype.newbyteorder(">"))
}

_TIMES = re.compile(r"(?:datetime64|timedelta64)(?:\[(?:[1-9]\d{0,9})?(?:[YMWDhms]|[munpfa]s)\])?")
_STRINGS = re.compile(r"[SU][1-9]\d{0,9}")


def name_of(dtype: DType) -> str | None:
    """Return the wire name of a numpy dtype; None if it does not travel (objects, records, …)."""
    name = _NAMES.get(dtype)
    if name is None:
        if dtype.kind in "mM":
            return dtype.name
        if dtype.kind in "SU" and dtype.itemsize:
            return dtype.str[1:]
    return name


# The patterns are stricter than numpy, which takes "S" (a string of length 0) and "U007", for
# example. Each dtype has one name, so that ranks can compare dtypes by comparing names.
@lru_cache(maxsize=256)
def carrier(name: str) -> DType:
    """Return the little-endian numpy dtype that holds elements of dtype `name`.

    Raises LookupError for a name that no peer of this platform sends.
    """
    known = _PLAIN.get(name) or _LONG.get(name)
    if known is not None:
        return known
    if _TIMES.fullmatch(name) or _STRINGS.fullmatch(name):
        try:
            found = _little(np.dtype(name))
            if name_of(found) == name:  # the name of "datetime64[1s]" is "datetime64[s]"
                return found
        except (TypeError, ValueError):  # for example a string longer than numpy allows
            pass
    raise LookupError(f"no dtype {name!r} here")
