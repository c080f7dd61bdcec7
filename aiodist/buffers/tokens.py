"""A tree of values as a flat list of msgpack tokens, in preorder.

The metadata of a message is the number of tokens, and the tokens. A token is a plain value (None,
bool, int of 64 bits, float, str, bytes) or one of the extension types below. A container gives the
number of its items and is followed by them (a dict by key, value, key, value, …).

Msgpack's own arrays and maps are not used, so that nothing nests. A reader then holds only what has
come, and chooses the depth of its stack. For example, ``{"w": float32[2,3], "n": (1, 2)}`` is seven
tokens, after their number::

    7   DICT(2)   "w"   ARRAY(numpy float32 [2,3])   "n"   TUPLE(2)   1   2

The 24 bytes of the array follow the metadata, and are not in it.

In values of at most `FEW` tokens, every int takes 64 bits. So values that differ in their numbers
only have metadata of the same length, and differ in known places (`leaves`).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple, cast

import msgpack
import numpy as np

from aiodist.buffers.arrays import Kind, shown
from aiodist.buffers.dtypes import CARRIERS, MAX_NDIM, TORCH, carrier
from aiodist.buffers.packed_numbers import CODES, NUMBERS, fits, packed
from aiodist.errors import ProtocolError

MAX_DEPTH: Final = 100
"""The most containers within containers."""
TOO_DEEP: Final = f"the value is nested over {MAX_DEPTH} levels deep: does it contain itself?"
"""The text of the ValueError for a deeper value."""

PLAIN: Final = frozenset({type(None), bool, float, str, bytes})
"""Types of values that are tokens as they are. Ints of 64 bits are, too."""

NO_ARRAYS: Final = PLAIN | {int, complex}
"""Types of leaves that hold no array. Most leaves that are not arrays are of these types."""

LIST, TUPLE, DICT, ARRAY, SCALAR, BIG_INT, COMPLEX, PICKLE = range(8)
"""Extension types. LIST, TUPLE and DICT hold the number of items, as 4 bytes."""

FEW: Final = 64
"""The most tokens of a value whose ints all take 64 bits."""

_COUNT: Final = struct.Struct("<I")
_COMPLEX: Final = struct.Struct("<dd")
_KINDS: Final[tuple[Kind, ...]] = ("numpy", "torch", "device")
_MAX_BYTES: Final = 2**63 - 1

Ext = msgpack.ExtType


class Spec(NamedTuple):
    """What the metadata says of one array. Its bytes come separately."""

    kind: Kind
    name: str
    shape: tuple[int, ...]
    nbytes: int

    def __str__(self) -> str:
        return shown(self.name, self.shape)


def pack(tokens: list[Any]) -> bytes:
    """Return the metadata of these tokens."""
    packed_so_far = packer(autoreset=False)
    packed_so_far.pack(len(tokens))
    if len(tokens) > FEW:
        for token in tokens:
            packed_so_far.pack(token)
        return bytes(packed_so_far.bytes())
    made = bytearray()
    for token in tokens:
        if type(token) is int and fits(token):
            made += packed_so_far.bytes() + CODES[int] + cast(bytes, packed(token))
            packed_so_far.reset()
        else:
            packed_so_far.pack(token)
    return bytes(made + packed_so_far.bytes())


def packer(**options: bool) -> Any:
    """Return what packs tokens one by one."""
    # Names of files may hold bytes that are not UTF-8, which Python shows as lone surrogates. They
    # travel as they are.
    made: Any = msgpack.Packer
    return made(unicode_errors="surrogatepass", **options)


class Number(NamedTuple):
    """A number in metadata: its type, and where its 8 bytes begin (see `packed_numbers`)."""

    kind: type
    at: int


def leaves(meta: bytes) -> list[Number | Spec] | None:
    """Return the numbers and arrays of a sound value in preorder, without keys of dicts.

    None if it has numbers that may take other numbers of bytes another time.
    """
    unpacker = msgpack.Unpacker(raw=False, unicode_errors="surrogatepass")
    unpacker.feed(meta)
    count = unpacker.unpack()
    found: list[Number | Spec] = []
    # Of each container: how many of its items are to come, whether they are keys and values by
    # turns, and whether it is in a key.
    inside: list[tuple[int, bool, bool]] = []
    for _ in range(count):
        start = unpacker.tell()
        token = unpacker.unpack()
        kind, is_key = type(token), False
        if inside:
            left, is_dict, is_key = inside.pop()
            inside += [(left - 1, is_dict, is_key)] if left > 1 else []
            is_key = is_key or (is_dict and left % 2 == 0)
        if kind in NUMBERS and not is_key:
            if count > FEW or meta[start : start + 1] != CODES[kind]:
                return None
            found.append(Number(kind, start + 1))
        elif kind is Ext and token.code == ARRAY:
            found.append(read_array(token.data))
        elif kind is Ext and token.code in (LIST, TUPLE, DICT):
            is_dict = token.code == DICT
            if items := read_count(token.data):
                inside.append((items * (1 + is_dict), is_dict, is_key))
    return found


def unpack(meta: bytes | memoryview) -> list[Any]:
    """Return the tokens of metadata. Raises ProtocolError."""
    # With limits of zero, msgpack refuses arrays and maps before it makes them, whatever size they
    # claim.
    unpacker = msgpack.Unpacker(
        raw=False,
        unicode_errors="surrogatepass",
        max_buffer_size=len(meta),
        max_array_len=0,
        max_map_len=0,
    )
    try:
        unpacker.feed(meta)
        tokens = [unpacker.unpack() for _ in range(unpacker.unpack())]
        end = unpacker.tell()
    except Exception as error:  # msgpack raises half a dozen unrelated types
        raise ProtocolError(
            f"the metadata of a value is not msgpack: {type(error).__name__}: {error}"
        ) from None
    if end != len(meta):
        raise ProtocolError(f"{len(meta) - end} bytes too many after the metadata of a value")
    return tokens


def container(code: int, count: int) -> Any:
    return Ext(code, _COUNT.pack(count))


def big_int(value: int) -> Any:
    # Sometimes one byte more than the bits need, because the sign needs room. Little-endian, as all
    # else on the wire. The length is not limited, because the whole metadata is.
    return Ext(BIG_INT, value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))


def complex_number(value: complex) -> Any:
    return Ext(COMPLEX, _COMPLEX.pack(value.real, value.imag))


def scalar(name: str, data: bytes) -> Any:
    """Make a numpy scalar. Its bytes travel in the metadata."""
    return Ext(SCALAR, bytes((len(name),)) + name.encode() + data)


@lru_cache(maxsize=1024)
def array(kind: Kind, name: str, shape: tuple[int, ...]) -> Any:
    """Make an array: kind, number of dimensions, dimensions, name of the dtype."""
    which = _KINDS.index(kind) if kind in _KINDS else 0
    return Ext(ARRAY, struct.pack(f"<BB{len(shape)}q", which, len(shape), *shape) + name.encode())


def read_count(data: bytes) -> int:
    if len(data) != _COUNT.size:
        raise ProtocolError(f"the size of a container has {len(data)} bytes, not 4")
    return int(_COUNT.unpack(data)[0])


def read_complex(data: bytes) -> complex:
    if len(data) != _COMPLEX.size:
        raise ProtocolError(f"a complex number has {len(data)} bytes, not 16")
    return complex(*_COMPLEX.unpack(data))


def read_scalar(data: bytes) -> Any:
    name = _text(data[1 : 1 + data[0]]) if data else ""
    dtype = _dtype(name)
    body = data[1 + len(name) :]
    if name in CARRIERS or len(body) != dtype.itemsize:
        raise ProtocolError(f"a scalar of dtype {name} has {len(body)} bytes")
    return np.frombuffer(body, dtype)[0]


# Peers choose the keys of this cache. So keys are short, because a longer one names no dtype and
# errors are not kept, and their number is bounded. A peer that sends ever new shapes makes others
# parse them, but takes no memory.
@lru_cache(maxsize=1024)
def read_array(data: bytes) -> Spec:
    """Raises ProtocolError for bytes that `array` does not make."""
    if len(data) < 2 or data[0] >= len(_KINDS) or data[1] > MAX_NDIM:
        raise ProtocolError(f"the description of an array starts with {data[:2]!r}")
    kind, ndim = _KINDS[data[0]], data[1]
    end = 2 + 8 * ndim
    if len(data) < end:
        raise ProtocolError(f"the description of an array of {ndim} dimensions is cut short")
    shape = struct.unpack_from(f"<{ndim}q", data, 2)
    name = _text(data[end:])
    dtype = _dtype(name)
    if (kind == "torch" and name not in TORCH) or (kind == "numpy" and name in CARRIERS):
        raise ProtocolError(f"{kind} has no dtype {name}")
    nbytes, bound = _sizes(dtype.itemsize, shape)
    if min(shape, default=0) < 0 or bound > _MAX_BYTES:
        raise ProtocolError(f"no array has the shape {shown(name, shape)}")
    return Spec(kind, name, shape, nbytes)


def _sizes(itemsize: int, shape: Sequence[int]) -> tuple[int, int]:
    """Return the bytes of the array, and the bytes if empty dimensions had one element.

    numpy checks the second number: it refuses the shape ``(0, 2**62, 2**62)``, which has no bytes
    at all. A peer that sends such a shape must get a clear error here, and not an exception inside
    numpy.
    """
    nbytes = bound = itemsize
    for n in shape:
        nbytes *= n
        bound *= n or 1
    return nbytes, bound


def _text(data: bytes) -> str:
    if len(data) > 32 or not data.isascii():  # the longest name has 26 characters
        raise ProtocolError(f"{data[:40]!r} is no name of a dtype")
    return data.decode("ascii")


def _dtype(name: str) -> Any:
    try:
        return carrier(name)
    except LookupError as error:
        raise ProtocolError(str(error.args[0])) from None
