"""Encodes messages of the coordinator as frames."""

from __future__ import annotations

from aiodist.wire.codec import encode_body, frame_of
from aiodist.wire.limits import MAX_REPLY
from aiodist.wire.messages import Message


class Encoder:
    """Encode a message once if it is sent to many connections in a row.

    Examples are a view for all its members, or a loss.
    """

    def __init__(self) -> None:
        self._message: Message | None = None
        self._request = 0
        self._body = self._frame = b""

    def frame(self, message: Message, request: int) -> bytes:
        is_new = message is not self._message
        if is_new:
            self._message, self._body = message, encode_body(message, max_body=MAX_REPLY)
        if is_new or request != self._request:
            self._request = request
            self._frame = frame_of(message, request, self._body)
        return self._frame
