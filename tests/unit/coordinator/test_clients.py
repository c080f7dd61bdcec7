"""What a coordinator does with effects for its connections."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from aiodist.coordinator import encoding
from aiodist.coordinator.clients import Clients
from aiodist.membership.effects import SendMessage
from aiodist.wire.address import Address
from aiodist.wire.codec import decode_message
from aiodist.wire.frames import Decoder
from aiodist.wire.messages import Failed, Failure, Status


@pytest.mark.parametrize(
    ("status", "error", "why"),
    [
        ({"x": {1: 2}}, "ValueError", "a Status message needs msgpack with text keys"),
        ({"x": 1j}, "TypeError", "complex 1j cannot be sent"),
        ({"x": "y" * 100}, "MessageTooLargeError", "a Status message of 106 bytes"),
    ],
)
@pytest.mark.parametrize("number", [0, 3])
def test_a_message_that_cannot_be_encoded(
    number: int,
    status: dict[str, Any],
    error: str,
    why: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A request is refused, and without one the connection is closed. All is logged, except for
    an answer that is too large, which is no mistake of the coordinator."""
    monkeypatch.setattr(encoding, "MAX_REPLY", 100)
    clients = Clients(Address("inproc", "none"), None, None, True, lambda event: None)
    sent: list[bytes] = []
    closed: list[str] = []
    clients._connections[1] = cast(Any, SimpleNamespace(send=sent.append, close=closed.append))
    clients.carry_out(SendMessage(1, number, Status(status)), encoding.Encoder())
    is_too_large = error == "MessageTooLargeError"
    if number:
        [frame] = Decoder(max_header=100, max_payload=1000).feed(b"".join(sent))
        request, failed = decode_message(frame)
        assert request == number and isinstance(failed, Failed)
        assert failed.kind == (Failure.TOO_LARGE if is_too_large else Failure.INVALID)
        assert why in failed.text
        assert closed == []
    else:
        [reason] = closed
        assert f"cannot be sent: {error}: " in reason and why in reason
        assert sent == []
    logged = [record.message for record in caplog.records if record.exc_info]
    assert logged == ["a Status message cannot be sent"] * (not (number and is_too_large))
