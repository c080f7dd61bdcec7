"""Python numbers that are reduced, as all ranks show them to each other: packed by msgpack.

A number of one type always has as many bytes, so that the blob of one is known but for these (see
`templates`).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgpack

from aiodist.buffers.scalars import Scalar, fits, reduction_of
from aiodist.buffers.tokens import Spec
from aiodist.collectives.forms import Matches
from aiodist.collectives.templates import LENGTH, Reading, Template
from aiodist.types import ReduceOp

_INT: Final = struct.Struct(">q")
_AN_INT: Final = b"\xd3"
"""What msgpack has before an integer of 64 bits."""
_FLOAT: Final = struct.Struct(">d")
_BOOLS: Final = (b"\xc2", b"\xc3")
"""What it has for False, and for True."""

KINDS: Final[dict[type, tuple[int, Sequence[int]]]] = {
    bool: (1, (1,)),
    int: (8, (2,)),
    float: (8, (2,)),
    complex: (8, (3, 12)),
}
"""The types of numbers: how many bytes each part has in the blob of one, and where these begin."""


def pack(values: Sequence[Scalar]) -> bytes:
    """The blob of some numbers, each an int of 64 bits, if it is an int."""
    head: bytes = msgpack.packb([None] * len(values))[: -len(values)]
    return b"".join((head, *map(_packed, values)))


def _packed(value: Scalar) -> bytes:
    if type(value) is int:
        return _AN_INT + _INT.pack(value)
    # There are no complex numbers in msgpack.
    packed: bytes = msgpack.packb([value.real, value.imag] if type(value) is complex else value)
    return packed


def unpack(blob: bytes) -> list[Scalar]:
    """The numbers in a blob. Raises whatever comes of it if that is no such blob."""
    return [complex(*value) if type(value) is list else value for value in msgpack.unpackb(blob)]


def template_of(blob: bytes, kind: type) -> Template | None:
    """The template of a blob with one number of this type; None where it is no such blob."""
    nbytes, starts = KINDS[kind]
    spec = Spec("scalar", "uint8", (nbytes,), nbytes)
    if len(blob) != starts[-1] + nbytes:
        return None
    return Template.of(blob, [(LENGTH + start, spec) for start in starts])


def bytes_of(value: Any) -> list[bytes] | None:
    """What goes into the gaps of that template. None: it is too large for them."""
    kind = type(value)
    if kind is float:
        return [_FLOAT.pack(value)]
    if kind is int:
        return [_INT.pack(value)] if fits(value) else None
    if kind is bool:
        return [_BOOLS[value]]
    return [_FLOAT.pack(value.real), _FLOAT.pack(value.imag)]


def matching(kind: type) -> Matches:
    """What finds numbers of that type."""

    def matches(value: Any, data: list[bytes]) -> bool:
        if type(value) is not kind or (found := bytes_of(value)) is None:
            return False
        data += found
        return True

    return matches


def reducing(found: Sequence[Reading], kind: type, op: ReduceOp) -> Callable[[], Scalar]:
    """What reduces the numbers of this type that are shown. It raises OverflowError."""
    reduce = reduction_of(kind, op)
    shown = [[data.flat for data in reading.data] for reading in found]
    if kind is bool:
        return lambda: reduce([bytes(view) == _BOOLS[True] for (view,) in shown])
    if kind is complex:
        return lambda: reduce([complex(*[_FLOAT.unpack(v)[0] for v in views]) for views in shown])
    unpack = (_INT if kind is int else _FLOAT).unpack
    views = [view for (view,) in shown]
    return lambda: reduce([unpack(view)[0] for view in views])
