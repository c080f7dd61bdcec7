"""Large messages between ranks that are far from each other: their first bytes go ahead of being
asked for, as far as there is credit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from aiodist.errors import MessageTooLargeError, PeerLostError, ProtocolError
from aiodist.p2p import frames as wire
from aiodist.p2p.credit import limits_for

MIB = 1024 * 1024
WAY = 4 * MIB
LIMITS = limits_for(WAY)


@pytest.fixture
def net(net: Any, make_net: Any) -> Any:
    return make_net(2, way=WAY)


def ramp(nbytes: int, first: int = 0) -> Any:
    return np.arange(first, first + nbytes // 4, dtype=np.int32)


def one_way(net: Any) -> None:
    """Let all come to rank 1 that rank 0 sends, and nothing the other way."""
    while net.loop.turn() or net.pipes[0, 1].queued:
        net.pipes[0, 1].flow()


def data_sent(net: Any) -> int:
    """Pieces that have gone to rank 1."""
    return int(net.kinds(0, 1).count(wire.DATA))


def assert_idle(net: Any) -> None:
    net.loop.advance(1)
    net.settle()
    assert all(engine.idle for engine in net.engines)


@pytest.mark.parametrize("posted", ["before", "after"])
@pytest.mark.parametrize("has_out", [True, False])
def test_the_first_bytes_are_there_without_a_round_trip(
    net: Any, posted: str, has_out: bool
) -> None:
    out = np.zeros(2 * MIB, np.int32) if has_out else None
    receiving = net.engines[1].recv(0, 0, out) if posted == "before" else None
    sending = net.engines[0].send(ramp(8 * MIB, 3), 1)
    one_way(net)
    front = data_sent(net) * 256 * 1024
    assert LIMITS.ahead - 256 * 1024 < front <= LIMITS.ahead
    if receiving is None:
        receiving = net.engines[1].recv(0, 0, out)
    assert not (sending.done() or receiving.done())
    net.settle()
    assert sending.done() and (receiving.result() == ramp(8 * MIB, 3)).all()
    assert out is None or receiving.result() is out
    assert data_sent(net) == 32  # nothing went twice
    assert_idle(net)


def test_what_nobody_receives_takes_no_more_than_there_is_credit_for(net: Any) -> None:
    sendings = [net.engines[0].send(ramp(8 * MIB), 1, tag) for tag in range(20)]
    small = net.engines[0].send(ramp(400), 1, "small")
    net.settle()
    assert data_sent(net) * 256 * 1024 <= LIMITS.total
    # And leaves some: who sends little does not wait behind it.
    assert small.done() and (net.engines[1].recv(0, "small").result() == ramp(400)).all()
    assert not any(sending.done() for sending in sendings)
    for tag, sending in enumerate(sendings):
        receiving = net.engines[1].recv(0, tag)
        net.settle()
        assert sending.done() and (receiving.result() == ramp(8 * MIB)).all()
    assert_idle(net)


def test_credit_comes_back_once_a_receive_has_taken_it(net: Any) -> None:
    for _ in range(5):
        receiving = net.engines[1].recv(0)
        before = data_sent(net)
        net.engines[0].send(ramp(8 * MIB), 1)
        one_way(net)
        assert (data_sent(net) - before) * 256 * 1024 > LIMITS.ahead - 256 * 1024
        net.settle()
        assert receiving.done()


def test_near_ranks_wait_to_be_asked(make_net: Any) -> None:
    net = make_net(2)
    net.engines[0].send(ramp(8 * MIB), 1)
    net.settle()
    assert not data_sent(net)


@pytest.mark.parametrize("come", [0, 1, 5, 100])
def test_a_send_that_is_cancelled_leaves_nothing(net: Any, come: int) -> None:
    sending = net.engines[0].send(ramp(8 * MIB), 1)
    for _ in range(come):
        net.pipes[0, 1].leave(100_000)
        net.pipes[0, 1].arrive(70_000)
    assert sending.cancel()
    net.settle()
    later = net.engines[1].recv(0)
    net.engines[0].send(ramp(400, 9), 1)
    net.settle()
    assert (later.result() == ramp(400, 9)).all()
    assert_idle(net)


@pytest.mark.parametrize("come", [0, 1, 5, 100])
def test_a_receive_that_is_cancelled_gets_nothing_more(net: Any, come: int) -> None:
    sending = net.engines[0].send(ramp(8 * MIB, 3), 1)
    for _ in range(come):
        net.pipes[0, 1].leave(100_000)
        net.pipes[0, 1].arrive(70_000)
    out = np.zeros(2 * MIB, np.int32)
    receiving = net.engines[1].recv(0, 0, out)
    net.pipes[0, 1].leave(100_000)
    net.pipes[0, 1].arrive(70_000)
    receiving.cancel()
    kept = out.copy()
    net.settle()
    assert (out == kept).all()
    again = net.engines[1].recv(0)
    net.settle()
    assert sending.done() and (again.result() == ramp(8 * MIB, 3)).all()
    assert_idle(net)


def test_a_message_that_is_refused_goes_no_further(make_net: Any) -> None:
    net = make_net(2, max_message_bytes=MIB, way=WAY)
    sending = net.engines[0].send(ramp(8 * MIB), 1)
    net.settle()
    with pytest.raises(MessageTooLargeError):
        net.engines[1].recv(0).result()
    net.settle()
    with pytest.raises(MessageTooLargeError):
        sending.result()
    assert data_sent(net) * 256 * 1024 <= LIMITS.ahead
    assert_idle(net)


def test_a_message_that_is_refused_lets_the_next_one_go_on(make_net: Any) -> None:
    net = make_net(2, max_message_bytes=3 * MIB, way=WAY)
    net.engines[0].send(ramp(2 * MIB, 3), 1, "fits")
    net.settle()
    receiving, refused = (net.engines[1].recv(0, tag) for tag in ("fits", "too large"))
    sending = net.engines[0].send(ramp(8 * MIB), 1, "too large")
    net.pipes[0, 1].leave(MIB)  # its announcement, and the link is full of what goes ahead
    net.pipes[0, 1].arrive(MIB)
    net.pipes[0, 1].arrive(MIB)
    net.pipes[1, 0].flow()
    net.settle()
    for work in (refused, sending):
        assert isinstance(work.exception(), MessageTooLargeError)
    assert (receiving.result() == ramp(2 * MIB, 3)).all()
    assert_idle(net)


def test_the_loss_of_the_sender_is_the_end_of_what_came_ahead(net: Any) -> None:
    net.engines[0].send(ramp(8 * MIB), 1)
    net.settle()
    receiving = net.engines[1].recv(0)
    net.lose(0)
    with pytest.raises(PeerLostError):
        receiving.result()


def test_up_to_as_much_is_pushed_to_who_has_given_leave(net: Any) -> None:
    """Of that nothing is left to be asked for."""
    for number in range(3):
        receiving = net.engines[1].recv(0)
        net.engines[0].send(ramp(2 * MIB, number), 1)
        if number:
            one_way(net)
            assert receiving.done()
        net.settle()
        assert (receiving.result() == ramp(2 * MIB, number)).all()


@pytest.mark.parametrize("ahead", [0, 2 * MIB, -1, True, "1"])
def test_what_goes_ahead_is_a_part(net: Any, ahead: Any) -> None:
    with pytest.raises(ProtocolError, match="malformed"):
        net.engines[1].frame(0, [wire.AHEAD, 0, False, 0, 21, 2 * MIB, ahead], 21)


def test_who_sends_more_ahead_than_it_has_credit_for_is_refused(net: Any) -> None:
    with pytest.raises(ProtocolError, match="credit"):
        net.engines[1].frame(0, [wire.AHEAD, 0, False, 0, 21, 9 * MIB, LIMITS.window], 21)
