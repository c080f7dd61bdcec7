"""Frames: a msgpack header and a payload of raw bytes.

A frame is the msgpack array ``[header, payload]``, both of msgpack's `bin` family::

    0x92  0xC5 HH HH  header…  0xC6 LL LL LL LL  payload…

The header bytes are themselves one msgpack array. Both lengths come before the bytes that they
count, so a reader can refuse a frame before it allocates anything.

**Why the payload is not in the header.** Msgpack would have to copy it to pack it, and again to
unpack it. So the payload is written straight from the user's memory, and read straight into it.

The two bytes 0x92 and 0xC5 in front serve as a signature: the first byte tells an HTTP request, a
TLS greeting or a port scan from a peer.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import msgpack

from aiodist.errors import ProtocolError

MAX_HEADER = 0xFFFF
"""The most bytes of a header: what its 16-bit length can say."""

MAX_PAYLOAD = 1024 * 1024
"""The most payload bytes of a frame of a divided message, so that control frames fit in between."""

MAX_WHOLE = 1152 * 1024
"""The most payload bytes of any frame: undivided data, with all that is said of it."""

PIECE = 256 * 1024
"""Payload bytes of frames whose data is reduced, so that it is still in the cache then."""

MAX_HEADER_BEFORE_HELLO = 4096
"""The most bytes of a header from a peer that has not shown that it is a member."""

_HEAD = struct.Struct(">BBH")
_TAIL = struct.Struct(">BI")
OVERHEAD = _HEAD.size + _TAIL.size
"""Bytes of a frame beyond header and payload."""


class Frame(NamedTuple):
    """A whole frame, as `Decoder` gives it."""

    header: bytes
    payload: bytes


def prefix(header: bytes, nbytes: int) -> bytes:
    """Return the bytes of a frame that come before its payload of `nbytes` bytes."""
    if len(header) > MAX_HEADER:
        raise ProtocolError(f"a header of {len(header)} bytes is over the {MAX_HEADER} a frame has")
    return _HEAD.pack(0x92, 0xC5, len(header)) + header + _TAIL.pack(0xC6, nbytes)


def parse_prefix(
    data: bytes | bytearray | memoryview, start: int, stop: int, max_header: int, max_payload: int
) -> tuple[bytes, int, int] | None:
    """Read one prefix from ``data[start:stop]``: (header, payload bytes, bytes taken).

    Returns None if the prefix is not complete yet. Raises ProtocolError for bytes that do not start
    a frame and for lengths over the limits, as soon as these can be seen.
    """
    # Each check comes as soon as its bytes have come, before more are awaited. A stranger that
    # claims a header of 60 KiB is refused at the fourth byte, and a browser or a port scanner at
    # the first.
    have = stop - start
    if have < 4:
        if have and data[start] != 0x92:
            raise ProtocolError(f"a frame starts with 0x92, not {data[start]:#04x}")
        return None
    first, kind, length = _HEAD.unpack_from(data, start)
    if first != 0x92 or kind != 0xC5:
        raise ProtocolError(f"a frame starts with 0x92 0xc5, not {first:#04x} {kind:#04x}")
    if length > max_header:
        raise ProtocolError(f"a header of {length} bytes, over the limit of {max_header}")
    if have < OVERHEAD + length:
        return None
    at = start + 4
    marker, nbytes = _TAIL.unpack_from(data, at + length)
    if marker != 0xC6:
        raise ProtocolError(f"a payload starts with 0xc6, not {marker:#04x}")
    if nbytes > max_payload:
        raise ProtocolError(f"a payload of {nbytes} bytes, over the limit of {max_payload}")
    return bytes(data[at : at + length]), nbytes, OVERHEAD + length


class Decoder:
    """Incremental decoder of whole frames, for any division of the stream."""

    def __init__(self, *, max_header: int = MAX_HEADER, max_payload: int = MAX_WHOLE) -> None:
        self.max_header = max_header
        self.max_payload = max_payload
        self._data = bytearray()

    def feed(self, chunk: bytes | bytearray | memoryview) -> list[Frame]:
        """Take in `chunk`. Returns the frames that became complete, in order.

        Raises ProtocolError for bytes that are not a frame. The decoder cannot be used after that.
        """
        data = self._data
        data += chunk
        frames: list[Frame] = []
        at = 0
        while True:
            parsed = parse_prefix(data, at, len(data), self.max_header, self.max_payload)
            if parsed is None:
                break
            header, nbytes, taken = parsed
            if len(data) - at < taken + nbytes:
                break
            frames.append(Frame(header, bytes(data[at + taken : at + taken + nbytes])))
            at += taken + nbytes
        del data[:at]
        return frames


def encode(header: bytes, payload: bytes = b"") -> bytes:
    """Return one whole frame."""
    return prefix(header, len(payload)) + payload


_packer = msgpack.Packer(use_bin_type=True)
"""Kept, because making one costs more than a header."""


def pack_fields(*fields: Any) -> bytes:
    """Return a header: the msgpack array of `fields`."""
    packed: bytes = _packer.pack(fields)
    return packed


class Stencil:
    """Makes prefixes of frames whose headers differ only in one number.

    Each is the prefix of ``pack_fields(*before, number, *after)`` with `nbytes` of payload. A
    collective that is called again and again sends the same header except for its number, so the
    rest is packed once. Msgpack writes a number in 1, 2, 3, 5 or 9 bytes. This changes the length
    of the header, so there is one start for each of these widths.
    """

    __slots__ = ("_end", "_starts")

    def __init__(self, before: tuple[Any, ...], after: tuple[Any, ...], nbytes: int) -> None:
        end = b"".join(map(_packer.pack, after))
        start = pack_fields(*before, 0, *after)[: -1 - len(end)]
        self._end = end + _TAIL.pack(0xC6, nbytes)
        # By the number of bytes that msgpack needs for the number.
        self._starts = {
            width: _HEAD.pack(0x92, 0xC5, len(start) + width + len(end)) + start
            for width in (1, 2, 3, 5, 9)
        }

    def fill(self, number: int) -> bytes:
        """Return the prefix of the frame with this number, 0 to 2^64 - 1."""
        packed: bytes = _packer.pack(number)
        prefix: bytes = self._starts[len(packed)] + packed + self._end
        return prefix


def _no_extensions(code: int, data: bytes) -> Any:
    raise ProtocolError(f"a header holds a msgpack extension (type {code}): expected none")


def unpack_fields(data: bytes | memoryview) -> list[Any]:
    """Return the fields of a header. Raises ProtocolError for bytes that are not a msgpack
    array."""
    try:
        fields = msgpack.unpackb(
            data,
            raw=False,
            use_list=True,
            strict_map_key=False,
            ext_hook=_no_extensions,
            max_ext_len=0,
        )
    except ProtocolError:
        raise
    except Exception as error:  # msgpack raises half a dozen unrelated types
        raise ProtocolError(f"not msgpack: {type(error).__name__}: {error}") from None
    if not isinstance(fields, list):
        raise ProtocolError(f"a header is a msgpack array, not {type(fields).__name__}")
    return fields
