"""Encode control messages as frames, and decode them (see `aiodist.wire.messages`)."""

from __future__ import annotations

import hashlib
from typing import Any
from weakref import WeakValueDictionary

from aiodist.errors import MessageTooLargeError, ProtocolError
from aiodist.wire.columns import pack_rows, unpack_rows
from aiodist.wire.frames import Frame, encode, pack_fields, unpack_fields
from aiodist.wire.limits import MAX_BODY, MAX_REQUEST
from aiodist.wire.messages import Message, message_type
from aiodist.wire.schema import build, integer, pack, plain, unpack

_check_request = integer(0, MAX_REQUEST)

_shared: WeakValueDictionary[bytes, Message] = WeakValueDictionary()
"""Messages with many rows that this process holds, by a digest of their bytes.

Ranks that share a process get the same view. Thousands of them would not have the memory for a copy
each.
"""


def encode_message(message: Message, request: int = 0, *, max_body: int = MAX_BODY) -> bytes:
    """Return the frame of a message.

    Raises MessageTooLargeError for a body over `max_body` bytes, ValueError for a message that the
    other side would refuse, and TypeError for values that msgpack does not know.
    """
    return frame_of(message, request, encode_body(message, max_body=max_body))


def frame_of(message: Message, request: int, body: bytes) -> bytes:
    """Return the frame of a message whose body is encoded. The body is the same for all
    receivers."""
    return encode(pack_fields(message.code, request), body)


def encode_body(message: Message, *, max_body: int = MAX_BODY) -> bytes:
    """Return the body of a message. Raises as `encode_message` does."""
    body = pack(_as_sent(message))
    if len(body) > max_body:
        raise MessageTooLargeError(
            f"a {type(message).__name__} message of {len(body)} bytes, over the limit of {max_body}"
        )
    # The other side would close the connection for an invalid message, without a hint here. So we
    # check now, and the caller that made the mistake gets an error.
    try:
        build(type(message), _received(type(message), body))
    except ValueError as error:
        raise ValueError(f"a {type(message).__name__} message needs {error}") from None
    return body


def decode_message(frame: Frame, *, rows: bool = True) -> tuple[int, Message]:
    """Return (request number, message). Raises ProtocolError for anything but a message.

    `rows`: accept messages with many rows, which take more memory than the bytes that came.
    """
    header = unpack_fields(frame.header)
    if len(header) != 2:
        raise ProtocolError(f"a control header is [type, request], not {len(header)} fields")
    code, request = header
    cls = message_type(code)
    if cls.at is not None and not rows:
        raise ProtocolError(f"the message {cls.__name__} is not expected here, or not yet")
    try:
        return _check_request(request), _decoded(cls, frame.payload)
    except ValueError as error:
        raise ProtocolError(f"a bad {cls.__name__} message: expected {error}") from None


def _decoded(cls: type[Message], body: bytes) -> Message:
    if cls.at is None:
        message: Message = build(cls, _unpack(body))
        return message
    # In a simulation or `aiodist.local`, thousands of ranks in one process get the same view over
    # connections of their own, and would make equal objects. They find those that another rank has
    # made, by a digest of the bytes. The key is not the body itself, because that may take a
    # megabyte for as long as the view lives.
    key = hashlib.blake2b(body, digest_size=16, salt=bytes([cls.code])).digest()
    found = _shared.get(key)
    if found is None:
        found = _shared[key] = build(cls, _received(cls, body))
    return found


def _as_sent(message: Message) -> list[Any]:
    """Return the fields as they travel."""
    values: list[Any] = plain(message)
    if message.at is not None:
        values[message.at] = pack_rows([plain(row) for row in values[message.at]])
    return values


def _received(cls: type[Message], body: bytes) -> list[Any]:
    """Return the fields of a body, for `build`."""
    values = _unpack(body)
    if cls.at is not None and cls.at < len(values):
        values[cls.at] = unpack_rows(values[cls.at])
    return values


def _unpack(body: bytes) -> list[Any]:
    values = unpack(body)
    if type(values) is not list:
        raise ValueError(f"a msgpack array, not {type(values).__name__}")
    return values
