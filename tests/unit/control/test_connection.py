"""The member's end of the connection to the coordinator: what it reads, and how it sees the end."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

import pytest

from aiodist.control.connection import ControlSocket
from aiodist.errors import ProtocolError
from aiodist.wire.codec import decode_message, encode_message
from aiodist.wire.frames import Frame
from aiodist.wire.limits import MAX_BODY_BEFORE_WELCOME
from aiodist.wire.messages import Evicted, Message, Renew

uvloop = pytest.importorskip("uvloop")


class Heard:
    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.ends: list[Exception] = []
        self.over = asyncio.Event()

    def frame(self, frame: Frame) -> None:
        self.messages.append(decode_message(frame)[1])

    def closed(self, error: Exception) -> None:
        self.ends.append(error)
        self.over.set()


def played(scenario: Callable[[Heard, ControlSocket, socket.socket], object], factory: object):
    async def main() -> Heard:
        heard = Heard()
        ours, theirs = socket.socketpair()
        control = ControlSocket(ours, heard.frame, heard.closed)
        try:
            scenario(heard, control, theirs)
            await asyncio.wait_for(heard.over.wait(), 20)
        finally:
            control.close()
            theirs.close()
        return heard

    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(main())


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def factory(request: pytest.FixtureRequest) -> object:
    return request.param


def test_the_end_is_seen_that_comes_with_the_last_words(factory: object) -> None:
    """The coordinator evicts who has just said something: the system resets the connection."""

    def scenario(heard: Heard, control: ControlSocket, theirs: socket.socket) -> None:
        control.send(encode_message(Renew()))  # is never read
        theirs.send(encode_message(Evicted("silent for too long")))
        theirs.close()

    heard = played(scenario, factory)
    assert heard.messages == [Evicted("silent for too long")]
    assert [type(error) for error in heard.ends] == [ConnectionResetError]


def test_what_was_said_last_counts_where_nothing_can_be_sent(factory: object) -> None:
    def scenario(heard: Heard, control: ControlSocket, theirs: socket.socket) -> None:
        theirs.send(encode_message(Evicted("why")))
        theirs.close()
        control.send(encode_message(Renew()))
        assert heard.messages == []  # not from inside of `send`

    heard = played(scenario, factory)
    assert heard.messages == [Evicted("why")]
    assert len(heard.ends) == 1


def test_nothing_large_is_taken_before_the_welcome(factory: object) -> None:
    def scenario(heard: Heard, control: ControlSocket, theirs: socket.socket) -> None:
        theirs.send(encode_message(Evicted("x" * MAX_BODY_BEFORE_WELCOME)))

    heard = played(scenario, factory)
    assert heard.messages == []
    assert [type(error) for error in heard.ends] == [ProtocolError]


def test_nobody_is_told_of_an_end_that_is_wanted() -> None:
    async def main() -> None:
        heard = Heard()
        ours, theirs = socket.socketpair()
        control = ControlSocket(ours, heard.frame, heard.closed)
        control.close()
        control.close()
        control.send(b"nothing")
        assert not control.send_from_thread(b"nothing")
        assert theirs.recv(1) == b""
        theirs.close()
        await asyncio.sleep(0)
        assert not heard.ends

    asyncio.run(main())


async def test_what_was_abandoned_is_closed_for_all_threads() -> None:
    """The lease thread is to hear that nobody gets what it says."""
    ours, theirs = socket.socketpair()
    heard = Heard()
    control = ControlSocket(ours, heard.frame, heard.closed)
    asyncio.get_running_loop().remove_reader(ours.fileno())  # as of a loop that was closed
    control.abandon()
    with theirs:
        assert not control.send_from_thread(encode_message(Renew()))
        assert theirs.recv(1) == b""
    assert not control.is_open


async def test_a_frame_whose_handler_fails_does_not_take_the_others_along() -> None:
    heard: list[Message] = []
    reported = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().set_exception_handler(
        lambda loop, context: reported.set_result(context["exception"])
    )

    def on_frame(frame: Frame) -> None:
        heard.append(decode_message(frame)[1])
        if len(heard) == 1:
            raise LookupError("a bug")

    ours, theirs = socket.socketpair()
    control = ControlSocket(ours, on_frame, lambda error: None)
    theirs.send(2 * encode_message(Renew()))
    assert str(await reported) == "a bug"
    assert heard == [Renew(), Renew()]
    control.close()
    theirs.close()
