"""The difference between two versions of a chunk, as bytes. Pure.

A step of training changes few elements of a model in bf16, most of them by one unit in the last
place. So a difference says which elements changed, and by how much::

    base    1.00  0.50  0.25  0.12  2.00       elements, read as unsigned integers
    new     1.00  0.51  0.25  0.12  1.99
    gaps          1                 2          unchanged elements before each change
    values        +1                -1         as 2 and 1: the sign is the lowest bit

Integers are subtracted, because ±1 then has two values, and 1 bit says which. The exclusive-or of
two neighbours has many values, because of carries. The bytes of a value go apart, because the high
ones are mostly 0. Gaps and each of these planes are compressed on their own by DEFLATE, without a
search for repeated strings: Huffman codes come within 11 % of the entropy of random changes. Python
has DEFLATE, and zlib-ng (the extra `weights`) is twice as fast, so any two participants understand
each other.

A code is one of four forms:

=========================  ===========================================
nothing has changed        no bytes
few elements have changed  gaps and values
most have changed          values of all elements
anything else              the chunk itself, if the others take as much
=========================  ===========================================
"""

from __future__ import annotations

import math
import sys
from typing import Any, NamedTuple

import msgpack
import numpy as np

from aiodist.buffers.arrays import Flat
from aiodist.compiled import core
from aiodist.errors import ProtocolError

IS_FAST = True
"""Whether the library is zlib-ng."""

try:
    from zlib_ng import zlib_ng as zlib
except ImportError:
    IS_FAST = False
    import zlib  # type: ignore[no-redef]

WIDTHS = (1, 2, 4, 8)
"""Bytes of an element."""

FAR = 255
"""A gap of this many elements without a change behind it: the next gap goes on from there."""

DENSE = 1 / 2
"""Values of all elements are coded if more than this share of them has changed."""

OVERHEAD = 16
"""Most bytes that the code of a chunk has above those of the chunk."""

SAMPLE = 8192
"""Bytes of a plane that tell whether it can be compressed."""

RANDOM = 7.5
"""Bits of entropy of a byte. Planes above it are not compressed."""

RUNS = 3 / 4
"""Runs of a byte are looked for if it is more than this share of a plane."""

RAW = -15
"""Tells zlib to leave out headers and checksums."""

Stream = bytes | list[bytes]
"""Bytes as they are (none: all are 0), or what DEFLATE made of them."""


class Coded(NamedTuple):
    """A difference: its bytes, and how many bytes of the chunk belong to changed elements."""

    code: bytes
    changed: int


def encode(base: Flat, new: Flat, width: int) -> Coded:
    """Code the difference between two versions of a chunk.

    `base` and `new` are contiguous arrays of uint8 of the same length, which is a multiple of
    `width`, the bytes of an element: 1, 2, 4 or 8. Elements of another width cost bytes, and are
    exact all the same.
    """
    dtype = _dtype(width)
    old, now = base.view(dtype), new.view(dtype)
    count, between, values = _changes(old, now)
    if not count:
        return Coded(b"", 0)
    steps, gaps = count, None
    if between is not None:
        steps, gaps = len(between), _deflated(between)
    planes = values.view(np.uint8).reshape(-1, width)
    streams = [_deflated(np.ascontiguousarray(planes[:, at])) for at in range(width)]
    code: bytes = msgpack.packb((width, steps, gaps, streams))
    if len(code) >= len(new):
        code = msgpack.packb(new.tobytes())
    return Coded(code, count * width)


def decode(code: bytes | memoryview, base: Flat, out: Flat) -> None:
    """Write the newer version of a chunk to `out`.

    `base` and `out` are contiguous arrays of uint8 of the same length. `out` may be `base` itself.
    It is all that is written, whatever `code` says. Whether the result is the right one is for a
    checksum to say.

    Raises ProtocolError if `code` is no difference of such a chunk. `out` is undefined then.
    """
    if not len(code):
        _copy(base, out)
        return
    try:
        _apply(msgpack.unpackb(code), base, out)
    except Exception as error:  # msgpack, zlib and numpy raise half a dozen unrelated types
        raise ProtocolError(f"no difference of a chunk of {len(out)} bytes: {error}") from None


def _apply(coded: Any, base: Flat, out: Flat) -> None:
    if isinstance(coded, bytes):
        np.copyto(out, np.frombuffer(coded, np.uint8))
        return
    width, steps, gaps, streams = coded
    dtype = _dtype(width)
    now = out.view(dtype)
    places: Any = slice(None)
    count = len(now)
    if gaps is not None:
        if not 0 < steps <= count:
            raise ValueError(f"{steps} changes of {count} elements")
        places = _places(_inflated(gaps, steps))
        count = len(places)
        if places[-1] >= len(now):  # they only grow
            raise ValueError(f"element {places[-1]} of {len(now)} changes")
    planes = np.empty((count, width), np.uint8)
    for at, stream in zip(range(width), streams, strict=True):
        planes[:, at] = _inflated(stream, count)
    values = planes.reshape(-1).view(dtype)
    values = (values >> 1) ^ -(values & 1)
    _copy(base, out)
    now[places] += values


def _copy(base: Flat, out: Flat) -> None:
    if out is not base:
        np.copyto(out, base)


def width_of(dtype: np.dtype[Any]) -> int:
    """Bytes of an element, for `encode`. A complex number counts as two."""
    return math.gcd(dtype.itemsize // (2 if dtype.kind == "c" else 1), max(WIDTHS))


def _dtype(width: int) -> np.dtype[Any]:
    if width not in WIDTHS:
        raise ValueError(f"elements have {WIDTHS} bytes, not {width!r}")
    return np.dtype(f"<u{width}")


def _changes(old: Flat, now: Flat) -> tuple[int, Flat | None, Flat]:
    """How many elements have changed, the gaps before each of them, and by how much it has changed.
    None instead of the gaps: so many have changed that there is a value for each element."""
    room = int(DENSE * len(now))
    if core is not None and sys.byteorder == "little":
        between, values = np.empty(room + len(now) // FAR, np.uint8), np.empty(room, now.dtype)
        found = core.differ(old, now, between, values)
        if found is not None:
            count, steps = found
            return count, between[:steps], values[:count]
    places = np.flatnonzero(old != now)
    if len(places) > room:
        return len(places), None, _unsigned(now - old)
    return len(places), _gaps(places), _unsigned(now[places] - old[places])


def _unsigned(values: Flat) -> Flat:
    """The same, with the sign as the lowest bit."""
    width = values.itemsize
    signs = (values.view(f"<i{width}") >> (8 * width - 1)).view(values.dtype)  # 0, or all bits
    found: Flat = (values << 1) ^ signs
    return found


def _gaps(places: Flat) -> Flat:
    """The number of elements before each of these places, as bytes. See `FAR`."""
    gaps = np.diff(places, prepend=-1) - 1
    far = np.flatnonzero(gaps >= FAR)
    times, gaps[far] = np.divmod(gaps[far], FAR)
    return np.insert(gaps.astype(np.uint8), np.repeat(far, times), FAR)


def _places(gaps: Flat) -> Flat:
    ends = gaps != FAR
    found: Flat = np.cumsum(gaps + ends.astype(np.int64))[ends] - 1
    return found


def _deflated(plane: Flat) -> Stream:
    if not plane.any():
        return b""
    counts = np.bincount(plane[:: max(1, len(plane) // SAMPLE)])
    share = counts[counts > 0] / counts.sum()
    if -(share * np.log2(share)).sum() > RANDOM:
        return plane.tobytes()
    # A Huffman code takes at least one bit for each byte, which is too much if nearly all bytes are
    # the same.
    strategy = zlib.Z_RLE if share.max() > RUNS else zlib.Z_HUFFMAN_ONLY
    deflater = zlib.compressobj(1, zlib.DEFLATED, RAW, 9, strategy)
    found: bytes = deflater.compress(plane.data) + deflater.flush()
    return [found] if len(found) < len(plane) else plane.tobytes()


def _inflated(stream: Stream, count: int) -> Flat:
    """Inflate to `count` bytes, at least one. Raises ValueError if `stream` has fewer or more."""
    if not stream:
        return np.zeros(count, np.uint8)
    if isinstance(stream, list):
        (deflated,) = stream
        stream = zlib.decompressobj(RAW).decompress(deflated, count + 1)  # one more is too many
    found: Flat = np.frombuffer(stream, np.uint8)
    if len(found) != count:
        raise ValueError(f"{len(found)} bytes where {count} were expected")
    return found
