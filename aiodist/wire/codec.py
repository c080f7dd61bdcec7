"""Control messages as frames, and back (see `aiodist.wire.messages` for what they say)."""

from __future__ import annotations

import hashlib
from typing import Any
from weakref import WeakValueDictionary

import msgpack

from aiodist.errors import MessageTooLargeError, ProtocolError
from aiodist.wire.columns import pack_rows, unpack_rows
from aiodist.wire.frames import Frame, encode, pack_fields, unpack_fields
from aiodist.wire.limits import MAX_BODY, MAX_MEMBERS
from aiodist.wire.messages import Message, message_type
from aiodist.wire.schema import build, integer, pack, plain

_check_request = integer(0, 2**32 - 1)

_shared: WeakValueDictionary[bytes, Message] = WeakValueDictionary()
"""Messages of many rows that somebody in this process holds, by what was decoded. Ranks that share
a process are sent the same view: thousands of them would not have the memory for one each."""


def encode_message(message: Message, request: int = 0, *, max_body: int = MAX_BODY) -> bytes:
    """The frame of a message.

    Raises MessageTooLargeError for a body over `max_body` bytes; ValueError for a message that the
    other side would refuse, TypeError for values that msgpack does not know.
    """
    return frame_of(message, request, encode_body(message, max_body=max_body))


def frame_of(message: Message, request: int, body: bytes) -> bytes:
    """The frame of a message whose body is encoded: that is the same for all who are sent it."""
    return encode(pack_fields(message.code, request), body)


def encode_body(message: Message, *, max_body: int = MAX_BODY) -> bytes:
    """What a message says. Raises as `encode_message` does."""
    body = pack(_as_sent(message))
    if len(body) > max_body:
        raise MessageTooLargeError(
            f"a {type(message).__name__} message of {len(body)} bytes, over the limit of {max_body}"
        )
    # What the other side would refuse ends the connection there, and says nothing here: so whoever
    # made the mistake is told at once.
    try:
        build(type(message), _received(type(message), body))
    except (ValueError, ProtocolError) as error:
        raise ValueError(f"a {type(message).__name__} message needs {error}") from None
    return body


def decode_message(frame: Frame, *, rows: bool = True) -> tuple[int, Message]:
    """(request number, message) of a frame. Raises ProtocolError for anything else. `rows`: whether
    to take messages of many rows, which become more than the bytes that came."""
    header = unpack_fields(frame.header)
    if len(header) != 2:
        raise ProtocolError(f"a control header is [type, request], not {len(header)} fields")
    code, request = header
    cls = message_type(code)
    if cls.at is not None and not rows:
        raise ProtocolError(f"{cls.__name__} is no message for here, or not yet")
    try:
        return _check_request(request), _decoded(cls, frame.payload)
    except ValueError as error:
        raise ProtocolError(f"a bad {cls.__name__} message: expected {error}") from None


def _decoded(cls: type[Message], body: bytes) -> Message:
    if cls.at is None:
        message: Message = build(cls, _unpack(body))
        return message
    # Of thousands of ranks in one process (a simulation, `aiodist.local`) each is sent the same
    # view over a connection of its own, and would make the same objects of it. By the bytes that
    # came they find the ones that another has made. A digest and not the body is the key: the body
    # may be of a megabyte, and the digest is there for as long as the view.
    key = hashlib.blake2b(body, digest_size=16, salt=bytes([cls.code])).digest()
    found = _shared.get(key)
    if found is None:
        found = _shared[key] = build(cls, _received(cls, body))
    return found


def _as_sent(message: Message) -> list[Any]:
    """The fields as they travel."""
    values: list[Any] = plain(message)
    if message.at is not None:
        values[message.at] = pack_rows([plain(row) for row in values[message.at]])
    return values


def _received(cls: type[Message], body: bytes) -> list[Any]:
    """The fields of a body, for `build`."""
    values = _unpack(body)
    if cls.at is not None and cls.at < len(values):
        values[cls.at] = unpack_rows(values[cls.at])
    return values


def _unpack(body: bytes) -> list[Any]:
    # The bounds on array and map lengths keep nested forged lengths from reserving memory.
    try:
        values = msgpack.unpackb(
            body, max_array_len=MAX_MEMBERS, max_map_len=MAX_MEMBERS, max_ext_len=0
        )
    except Exception as error:  # msgpack raises half a dozen unrelated types
        raise ProtocolError(f"not msgpack: {type(error).__name__}: {error}") from None
    if type(values) is not list:
        raise ProtocolError(f"a body is a msgpack array, not {type(values).__name__}")
    return values
