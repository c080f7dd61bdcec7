"""How long who has connected may take to show who it is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from aiodist.errors import ProtocolError
from aiodist.links.greeting import (
    HANDSHAKE_TIMEOUT,
    Claim,
    Counterpart,
    Door,
    Greeter,
    Greeting,
    Identity,
)
from aiodist.transports.base import Link
from aiodist.wire import kinds
from aiodist.wire.frames import pack_fields
from aiodist.wire.proof import NONCE_BYTES

HELLO = pack_fields(kinds.HELLO, kinds.MAGIC, kinds.VERSION, bytes(NONCE_BYTES))
PROOF = pack_fields(kinds.PROOF, b"mark", b"proof", 0, 0)


class Timer:
    """Of a `Loop`."""

    def __init__(self, callback: Callable[[], None]) -> None:
        self.callback = callback
        self.is_over = False

    def cancel(self) -> None:
        self.is_over = True


class Loop:
    """Timers that a test ends."""

    def __init__(self) -> None:
        self.timers: list[Timer] = []

    def call_later(self, seconds: float, callback: Callable[[], None]) -> Timer:
        assert seconds == HANDSHAKE_TIMEOUT
        self.timers.append(Timer(callback))
        return self.timers[-1]

    def end_patience(self) -> None:
        """All that is waited for has taken too long."""
        for timer in list(self.timers):
            if not timer.is_over:
                timer.is_over = True
                timer.callback()


class Stranger:
    """The link of somebody who has connected, whose frames come when this side polls."""

    peer_name = "10.0.0.9:40000"

    def __init__(self) -> None:
        self.lies_there: list[bytes] = []
        self.sent: list[bytes] = []
        self.error: BaseException | None = None
        self.greeter: Any = None

    def send(self, header: bytes) -> None:
        self.sent.append(header)

    def poll(self) -> None:
        while self.lies_there:
            self.greeter.frame(self, self.lies_there.pop(0), 0).landed()

    def close(self, error: BaseException) -> None:
        self.error = error


class Desk:
    """Where the proof is judged."""

    def __init__(self) -> None:
        self.loop = Loop()
        self.asked = 0

    def holds(self, greeter: Greeter) -> bool:
        return True

    def identify(self, *shown: object) -> None:
        self.asked += 1


@pytest.fixture
def desk() -> Desk:
    return Desk()


@pytest.fixture
def stranger(desk: Desk) -> Stranger:
    made = Stranger()
    made.greeter = Greeter(cast(Door, desk), cast(Link, made))
    return made


def test_of_a_loop_that_hardly_turns_neither_frame_is_too_late(
    desk: Desk, stranger: Stranger
) -> None:
    """Each lies there when the time for it is over: nobody but this loop has kept it waiting."""
    stranger.lies_there.append(HELLO)
    desk.loop.end_patience()
    assert (stranger.error, len(stranger.sent)) == (None, 1)
    stranger.lies_there.append(PROOF)
    desk.loop.end_patience()
    assert (stranger.error, desk.asked) == (None, 1)
    desk.loop.end_patience()  # its part is done: now it waits for this rank
    assert stranger.error is None


@pytest.mark.parametrize("frames", [[], [HELLO]], ids=["nothing", "hello"])
def test_who_says_no_more_is_sent_away(desk: Desk, stranger: Stranger, frames: list[bytes]) -> None:
    stranger.lies_there += frames
    for _ in frames:
        stranger.poll()
    desk.loop.end_patience()
    assert str(stranger.error) == "no greeting within 10 s"
    assert desk.asked == 0


async def test_what_is_no_answer_to_a_greeting_is_refused() -> None:
    """Whatever is sent instead of the challenge, in the place of which it might be taken."""
    peer = SimpleNamespace(rank=1, id="b", claim=Claim(0, 0))
    nonce = bytes(NONCE_BYTES)
    for frame, nbytes in [
        (pack_fields(kinds.PROOF, nonce), 0),
        (pack_fields(kinds.CHALLENGE, nonce, 0), 0),
        (pack_fields(kinds.CHALLENGE, nonce), 1),
    ]:
        link = Stranger()
        greeting = Greeting(asyncio.get_running_loop(), cast(Counterpart, peer), Identity("g", "a"))
        with pytest.raises(ProtocolError, match="not the answer to a greeting"):
            greeting.frame(cast(Link, link), frame, nbytes)


def test_a_proof_is_of_one_member_role_greeting_and_claim() -> None:
    nonces, claim = (b"1" * NONCE_BYTES, b"2" * NONCE_BYTES), Claim(1, 5)
    caller, listener = Identity("g", "a", b"token"), Identity("g", "b", b"token")
    mac = caller.prove("caller", "b", nonces, claim)
    assert listener.check("caller", "a", mac, nonces, claim)
    assert not listener.check("listener", "a", mac, nonces, claim)
    assert not listener.check("caller", "c", mac, nonces, claim)
    assert not listener.check("caller", "a", mac, (nonces[0], b"3" * NONCE_BYTES), claim)
    assert not listener.check("caller", "a", mac, nonces, Claim(1, 6))
    assert not listener.check("caller", "a", bytes(len(mac)), nonces, claim)
    for other in (Identity("h", "b", b"token"), Identity("g", "b", b"other"), Identity("g", "b")):
        assert not other.check("caller", "a", mac, nonces, claim)
