"""The bytes of Python numbers as msgpack has them, all of one type in equally many bytes."""

from __future__ import annotations

import struct
from typing import Any, Final, cast

_MIN, _MAX = -(2**63), 2**63 - 1
_INT: Final = struct.Struct(">q")
_FLOAT: Final = struct.Struct(">d")
_BOOLS: Final = (b"\xc2", b"\xc3")
"""The bytes that msgpack writes for False and True."""

CODES: Final[dict[type, bytes]] = {int: b"\xd3", float: b"\xcb"}
"""The byte that msgpack writes before an int or a float of 64 bits."""
NUMBERS: Final = frozenset(CODES)
"""The types of numbers that have a byte for their type before their own."""
WIDTH: Final = 8
"""How many bytes of their own these have."""


def fits(value: int) -> bool:
    """Tell whether it is an int of 64 bits."""
    return _MIN <= value <= _MAX


def packed(value: float) -> bytes | None:
    """Return the bytes of a number, without the byte before an int or a float that tells its type.

    None: an int has more than 64 bits.
    """
    kind = type(value)
    if kind is float:
        return _FLOAT.pack(value)
    if kind is bool:
        return _BOOLS[bool(value)]
    return _INT.pack(value) if fits(cast(int, value)) else None


def unpacked(kind: type, data: bytes | memoryview) -> Any:
    """Return the number of this type that `packed` has made."""
    if kind is bool:
        return bytes(data) == _BOOLS[True]
    return (_FLOAT if kind is float else _INT).unpack(data)[0]
