"""Messages of the coordinator as frames: what goes to many is encoded once."""

from __future__ import annotations

import pytest

from aiodist.coordinator import encoding
from aiodist.coordinator.encoding import Encoder
from aiodist.wire.codec import encode_message
from aiodist.wire.limits import MAX_BODY, MAX_REPLY
from aiodist.wire.messages import MemberLost, Message, Status


def test_each_gets_the_frame_of_its_message_and_request() -> None:
    encoder = Encoder()
    first, second = MemberLost(1, (1,), "x"), MemberLost(1, (2,), "x")
    for message, request in ((first, 0), (first, 0), (first, 7), (second, 7), (first, 7)):
        assert encoder.frame(message, request) == encode_message(message, request)


def test_what_goes_to_many_is_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[Message] = []
    before = encoding.encode_body

    def counted(message: Message, *, max_body: int) -> bytes:
        encoded.append(message)
        return before(message, max_body=max_body)

    monkeypatch.setattr(encoding, "encode_body", counted)
    encoder, message = Encoder(), MemberLost(1, (1,), "x")
    for request in (0, 0, 1, 2):
        encoder.frame(message, request)
    assert encoded == [message]


def test_replies_may_be_larger_than_requests() -> None:
    status = Status({"text": "x" * MAX_BODY})
    assert MAX_BODY < len(Encoder().frame(status, 1)) < MAX_REPLY
