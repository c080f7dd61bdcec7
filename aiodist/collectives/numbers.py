"""Python numbers that are reduced, packed by msgpack as all ranks show them to each other.

All numbers of one type take the same number of bytes. So a blob with one number is known except for
these bytes (see `templates`).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any, Final, cast

import msgpack

from aiodist.buffers.packed_numbers import CODES, packed, unpacked
from aiodist.buffers.scalars import Scalar, reduction_of
from aiodist.buffers.tokens import Spec
from aiodist.collectives.forms import Matches
from aiodist.collectives.templates import LENGTH, Reading, Template
from aiodist.types import ReduceOp

_FLOAT: Final = struct.Struct(">d")

KINDS: Final[dict[type, tuple[int, Sequence[int]]]] = {
    bool: (1, (1,)),
    int: (8, (2,)),
    float: (8, (2,)),
    complex: (8, (3, 12)),
}
"""The types of numbers. For each: the bytes of each of its parts, and the offsets of the parts in
a blob with one number."""


def pack(values: Sequence[Scalar]) -> bytes:
    """Return the blob of some numbers. Every int takes 64 bits."""
    head: bytes = msgpack.packb([None] * len(values))[: -len(values)]
    return b"".join((head, *map(_packed, values)))


def _packed(value: Scalar) -> bytes:
    if type(value) is int:
        return CODES[int] + cast(bytes, packed(value))
    # msgpack has no complex numbers.
    made: bytes = msgpack.packb([value.real, value.imag] if type(value) is complex else value)
    return made


def unpack(blob: bytes) -> list[Scalar]:
    """Return the numbers in a blob. May raise anything if the blob is malformed."""
    return [complex(*value) if type(value) is list else value for value in msgpack.unpackb(blob)]


def template_of(blob: bytes, kind: type) -> Template | None:
    """Return the template of a blob with one number of this type, or None for another blob."""
    nbytes, starts = KINDS[kind]
    spec = Spec("scalar", "uint8", (nbytes,), nbytes)
    if len(blob) != starts[-1] + nbytes:
        return None
    return Template.of(blob, [(LENGTH + start, spec) for start in starts])


def bytes_of(value: Any) -> list[bytes] | None:
    """Return the bytes for the gaps of that template, or None if the number is too large."""
    if type(value) is complex:
        return [_FLOAT.pack(value.real), _FLOAT.pack(value.imag)]
    found = packed(value)
    return None if found is None else [found]


def matching(kind: type) -> Matches:
    """Return a check for numbers of that type."""

    def matches(value: Any, data: list[bytes]) -> bool:
        if type(value) is not kind or (found := bytes_of(value)) is None:
            return False
        data += found
        return True

    return matches


def reducing(found: Sequence[Reading], kind: type, op: ReduceOp) -> Callable[[], Scalar]:
    """Return a function that reduces the shown numbers of this type. It raises OverflowError."""
    reduce = reduction_of(kind, op)
    shown = [reading.data for reading in found]  # may lie elsewhere in each call
    if kind is complex:
        return lambda: reduce(
            [complex(*[_FLOAT.unpack(d.flat)[0] for d in each]) for each in shown]
        )
    return lambda: reduce([unpacked(kind, data.flat) for (data,) in shown])
