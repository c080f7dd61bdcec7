"""Peers that break the protocol: ProtocolError, whatever they send, and bounded memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiodist.buffers.encoding import encode
from aiodist.errors import AiodistError, ProtocolError
from aiodist.p2p import frames as wire
from aiodist.p2p.credit import MAX_WANTS, TOTAL
from aiodist.transports.base import deliver
from aiodist.wire.frames import pack_fields

META = encode(np.zeros(100_000, np.uint8)).meta


def put(net: Any, fields: tuple[Any, ...], payload: bytes = b"") -> None:
    """Rank 0 sends a frame to rank 1."""
    landing = net.engines[1].frame(0, list(fields), len(payload))
    deliver(landing, (memoryview(payload),), len(payload))


def announce(net: Any, sid: int, tag: Any = 0) -> None:
    put(net, (wire.RTS, tag, False, sid, len(META), 100_000), META)


MALFORMED: list[tuple[tuple[Any, ...], int]] = [
    ((), 0),
    (("EAGER", 0, 0, 1), 10),
    ((True, 0, 0, 1), 10),
    ((12,), 0),
    ((-1,), 0),
    ((wire.EAGER,), 10),
    ((wire.EAGER, 0, False, 1), 0),
    ((wire.EAGER, 0, False, 0), 10),
    ((wire.EAGER, 0, False, 11), 10),
    ((wire.EAGER, 0, 0, 1), 10),
    ((wire.EAGER, 0, None, 1), 10),
    ((wire.EAGER, None, False, 1), 10),
    ((wire.EAGER, True, False, 1), 10),
    ((wire.EAGER, 2**63, False, 1), 10),
    ((wire.EAGER, "x" * 1025, False, 1), 10),
    ((wire.EAGER, [1], False, 1), 10),
    ((wire.EAGER, 0, False, 1), 65 * 1024 + 1),
    ((wire.EAGER, 0, True, 1), 10),
    ((wire.RTS, 0, False, 0, 10, 10), 9),
    ((wire.RTS, 0, False, 0, 0, 10), 0),
    ((wire.RTS, 0, False, -1, 10, 10), 10),
    ((wire.RTS, 0, False, 0, 10, -1), 10),
    ((wire.RTS, 0, False, 0, 10, 2**63), 10),
    ((wire.RTS, 0, False, 0, 20_000, 0), 20_000),
    ((wire.RTS, 0, False, 0, 10, 1.5), 10),
    ((wire.PUSH, 0, False, 0, 10, 10), 9),
    ((wire.PUSH, 0, False, 0, 10, 10, b"x"), 10),
    ((wire.PUSH, 0, False, 0, 20_000, 10), 0),
    ((wire.PULL, 0, 1), 0),
    ((wire.PULL, 0), 0),
    ((wire.PULL, 0, 1), 5),
    ((wire.DATA, 0), 100),
    ((wire.DATA, 0, 0), 100),
    ((wire.FIN, 0), 0),
    ((wire.WITHDRAW, 0), 0),
    ((wire.REFUSE, 0, 0), 0),
    ((wire.CREDIT, 0, 1), 0),
    ((wire.CREDIT, 0), 0),
    ((wire.CREDIT, 0, -1), 0),
    ((wire.CREDIT, 0, 0), 0),
    ((wire.CREDIT, 1.5, 1), 0),
    ((wire.WANT, 1, 2), 0),
    ((wire.WANT, None), 0),
    ((wire.WANT,), 0),
    ((wire.WANT, 1), 3),
    ((wire.UNWANT, b"x"), 0),
    ((wire.NOWANT, 0), 0),
]


@pytest.mark.parametrize(("fields", "nbytes"), MALFORMED)
def test_malformed_frames(net: Any, fields: tuple[Any, ...], nbytes: int) -> None:
    with pytest.raises(ProtocolError):
        put(net, fields, bytes(nbytes))


values = st.one_of(
    st.integers(-5, 12), st.integers(), st.none(), st.booleans(), st.text(max_size=3), st.floats()
)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.lists(values, max_size=7), st.integers(0, 50)), max_size=20))
def test_garbage_raises_nothing_but_protocol_errors(make_net: Any, frames: Any) -> None:
    net = make_net(2)
    works = [net.engines[1].recv(), net.engines[1].recv(0, 1)]
    net.engines[1].send(np.zeros(100_000), 0)
    for fields, nbytes in frames:
        try:
            put(net, tuple(fields), bytes(nbytes))
        except ProtocolError:
            break
    net.engines[1].close(AiodistError("over"))
    for work in works:
        work.exception()


@pytest.mark.parametrize("nbytes", [1, 10_000])
def test_messages_beyond_the_window_of_a_tag(net: Any, nbytes: int) -> None:
    with pytest.raises(ProtocolError, match="credit"):
        for _ in range(2000):
            put(net, (wire.EAGER, "t", False, 1), bytes(nbytes))


def test_messages_beyond_the_total(net: Any) -> None:
    with pytest.raises(ProtocolError, match="total"):
        for tag in range(TOTAL):
            put(net, (wire.EAGER, tag, False, 1), bytes(10_000))
    assert net.engines[1].iprobe(0, 0) is not None


def test_a_want_is_good_for_one_message(net: Any) -> None:
    for tag in range(69):
        put(net, (wire.EAGER, tag, False, 1), bytes(60_000))
    works = [net.engines[1].recv(0, "wanted"), net.engines[1].recv(0, "wanted")]
    put(net, (wire.EAGER, "wanted", True, 1), b"\xc0" + bytes(60_000))
    # The second receive has made the engine say it again.
    put(net, (wire.EAGER, "wanted", True, 1), b"\xc0" + bytes(60_000))
    with pytest.raises(ProtocolError, match="want"):
        put(net, (wire.EAGER, "wanted", True, 1), b"\xc0" + bytes(60_000))
    for work in works:
        work.exception()


def test_announcements_cost_too(net: Any) -> None:
    with pytest.raises(ProtocolError, match="credit"):
        for sid in range(2000):
            announce(net, sid)


def test_numbers_of_messages_ascend(net: Any) -> None:
    announce(net, 5)
    with pytest.raises(ProtocolError, match="announced message 5"):
        announce(net, 5)


def test_data_that_was_not_pulled(net: Any) -> None:
    announce(net, 0)
    with pytest.raises(ProtocolError, match="not pulled"):
        put(net, (wire.DATA, 0), bytes(10))


def test_more_data_than_was_announced(net: Any) -> None:
    net.engines[1].recv(0)
    announce(net, 0)
    put(net, (wire.DATA, 0), bytes(99_999))
    with pytest.raises(ProtocolError, match="not pulled"):
        put(net, (wire.DATA, 0), bytes(2))


def test_an_end_before_all_data(net: Any) -> None:
    net.engines[1].recv(0)
    announce(net, 0)
    put(net, (wire.DATA, 0), bytes(99_999))
    with pytest.raises(ProtocolError, match="before all data"):
        put(net, (wire.FIN, 0))


def test_an_announcement_that_lies_about_its_metadata(net: Any) -> None:
    work = net.engines[1].recv(0)
    put(net, (wire.RTS, 0, False, 0, len(META), 99_999), META)
    assert isinstance(work.exception(), ProtocolError)
    assert (wire.REFUSE, 0, wire.UNREADABLE) in [fields for _, _, fields in net.sent]


def test_metadata_that_is_garbage_fails_the_receive_alone(net: Any) -> None:
    work = net.engines[1].recv(0)
    put(net, (wire.EAGER, 0, False, 10), b"\xc1" * 10)
    assert isinstance(work.exception(), ProtocolError)
    net.engines[0].send("fine", 1)
    net.settle()
    assert net.engines[1].recv(0).result() == "fine"


@pytest.mark.parametrize(
    "second",
    [
        (wire.PULL, wire.FIRST_SID, wire.BODY),
        (wire.PULL, wire.FIRST_SID, wire.METADATA),
        (wire.REFUSE, wire.FIRST_SID, 0),
    ],
)
def test_what_was_pulled_is_pulled_once(net: Any, second: tuple[Any, ...]) -> None:
    work = net.engines[1].send(np.zeros(10**6), 0)
    put(net, (wire.PULL, wire.FIRST_SID, wire.BODY))
    with pytest.raises(ProtocolError, match="pulled"):
        put(net, second)
    work.cancel()


def test_a_want_twice(net: Any) -> None:
    put(net, (wire.WANT, "x"))
    with pytest.raises(ProtocolError, match="want"):
        put(net, (wire.WANT, "x"))


def test_too_many_wants(net: Any) -> None:
    for tag in range(MAX_WANTS):
        put(net, (wire.WANT, tag))
    with pytest.raises(ProtocolError, match="want"):
        put(net, (wire.WANT, -1))


def test_a_denial_of_a_want_that_holds(net: Any) -> None:
    for tag in range(69):
        put(net, (wire.EAGER, tag, False, 1), bytes(60_000))
    work = net.engines[1].recv(0, "wanted")
    with pytest.raises(ProtocolError, match="want"):
        put(net, (wire.NOWANT, "wanted"))
    work.cancel()


def test_a_late_denial_leaves_nothing_behind(net: Any) -> None:
    for tag in range(69):
        put(net, (wire.EAGER, tag, False, 1), bytes(60_000))
    net.engines[1].recv(0, "x").cancel()
    for tag in range(69):
        assert net.engines[1].recv(0, tag).exception() is not None
    net.loop.advance(1)
    assert not net.engines[1].idle
    put(net, (wire.NOWANT, "x"))
    assert net.engines[1].idle


def test_headers_stay_below_their_limit(net: Any) -> None:
    """Credit for many of the longest tags is returned in several frames."""
    for number in range(80):
        tag = f"{number:04d}" + "é" * 510
        work = net.engines[1].recv(0, tag)
        net.engines[0].send(None, 1, tag)
        net.settle()
        assert work.done()
    net.loop.advance(1)
    net.settle()
    assert max(len(pack_fields(*fields)) for _, _, fields in net.sent) < 60_000
    assert all(engine.idle for engine in net.engines)


def test_what_is_said_to_oneself_is_taken_in_one_after_the_other() -> None:
    """Also where taking it in ends in another `flush`, as every entry into the engine does."""
    seen: list[Any] = []

    def receive(fields: tuple[Any, ...], payload: object) -> None:
        seen.append(("begins", *fields))
        line.flush()
        seen.append(("ends", *fields))

    nobody: Any = SimpleNamespace(rank=0)
    line = wire.Wire(nobody, receive, nobody)
    for number in range(2):
        line.send(0, (number,), done=lambda number=number: seen.append(number))
    for _ in range(2):  # the second time there is nothing
        line.flush()
    assert seen == [("begins", 0), ("ends", 0), 0, ("begins", 1), ("ends", 1), 1]
    line.send(0, (2,))
    line.flush()
    assert seen[-1] == ("ends", 2)


class Turns:
    """The part of a loop, and of a group, that a `Wire` needs."""

    def __init__(self) -> None:
        self.rank = 0
        self.sent: list[tuple[Any, ...]] = []
        self.ready: list[tuple[Any, ...]] = []

    def send(self, dst: int, fields: tuple[Any, ...], *_: Any, **how: Any) -> None:
        self.sent.append((dst, *fields, "urgent" if how["urgent"] else ""))

    def call_soon(self, *call: Any) -> None:
        self.ready.append(call)

    def turn(self) -> None:
        ready, self.ready = self.ready, []
        for call, *args in ready:
            call(*args)


def held() -> tuple[wire.Wire, Turns]:
    turns: Any = Turns()
    return wire.Wire(turns, lambda *_: None, turns), turns


def test_what_is_held_back_goes_with_the_next_frame_to_its_rank() -> None:
    line, turns = held()
    line.hold(1, (wire.CREDIT, 0, 5))
    line.hold(2, (wire.CREDIT, 0, 6))
    assert turns.sent == []
    line.send(1, (wire.RTS,))
    assert turns.sent == [(1, wire.CREDIT, 0, 5, "urgent"), (1, wire.RTS, "")]
    line.let_all_go()
    assert turns.sent[2:] == [(2, wire.CREDIT, 0, 6, "urgent")]


def test_nothing_is_held_back_for_longer_than_the_loop_takes_to_run_the_program() -> None:
    line, turns = held()
    for number in range(2):
        line.hold(1, (wire.CREDIT, 0, number))
        turns.turn()
        assert len(turns.sent) == number
        turns.turn()
        assert turns.sent[number:] == [(1, wire.CREDIT, 0, number, "urgent")]
    assert not turns.ready


def test_one_frame_is_held_back_for_each_rank() -> None:
    """So whoever takes in message after message gives credit back meanwhile."""
    line, turns = held()
    for number in range(4):
        line.hold(1, (wire.CREDIT, 0, number))
    assert [number for *_, number, _ in turns.sent] == [0, 1, 2, 3]
    line.hold(0, (wire.CREDIT, 0, 9))  # to oneself: at once
    assert len(line.waiting) == 1
