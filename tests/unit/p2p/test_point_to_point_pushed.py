"""Messages that are pushed: their data comes without having been asked for, as a receive that
waited for the message before gave leave for it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from aiodist.errors import MessageTooLargeError, MismatchError, PeerLostError, ProtocolError
from aiodist.p2p import frames as wire

MIB = 1024 * 1024


def ramp(nbytes: int, first: int = 0) -> Any:
    return np.arange(first, first + nbytes // 4, dtype=np.int32)


def give_leave(net: Any) -> None:
    """Rank 1 waits for a message of rank 0, so that the next one may be pushed."""
    receiving = net.engines[1].recv(0, "leave")
    net.engines[0].send(ramp(MIB), 1, "leave")
    net.settle()
    assert receiving.done()
    net.sent.clear()


def one_way(net: Any) -> None:
    """Let all come to rank 1 that rank 0 sends, and nothing the other way."""
    while net.loop.turn() or net.pipes[0, 1].queued:
        net.pipes[0, 1].flow()


def assert_idle(net: Any) -> None:
    net.loop.advance(1)
    net.settle()
    assert all(engine.idle for engine in net.engines)


def test_a_push_that_is_taken_back_leaves_all_as_it_was(net: Any) -> None:
    give_leave(net)
    sender = net.engines[0].sender
    sid = sender.push(1, "leave", 1000)
    assert sid is not None
    assert sender.push(1, "leave", 1000) is None  # leave is for one message
    sender.unpush(1, "leave", 1000)
    assert sender.push(1, "leave", 1000) == sid
    sender.unpush(1, "leave", 1000)
    receiving = net.engines[1].recv(0, "leave")
    net.engines[0].send(ramp(MIB, 7), 1, "leave")
    net.settle()
    np.testing.assert_array_equal(receiving.result(), ramp(MIB, 7))
    assert_idle(net)


@pytest.mark.parametrize("has_out", [True, False])
def test_a_receive_that_waits_gets_the_message_without_asking(net: Any, has_out: bool) -> None:
    give_leave(net)
    out = np.zeros(MIB // 4, np.int32) if has_out else None
    receiving = net.engines[1].recv(0, 0, out)
    sending = net.engines[0].send(ramp(MIB, 3), 1)
    one_way(net)
    assert sending.done() and (receiving.result() == ramp(MIB, 3)).all()
    assert out is None or receiving.result() is out
    kinds = net.kinds(0, 1)
    assert (kinds[0], kinds[-1]) == (wire.PUSH, wire.FIN) and wire.RTS not in kinds
    assert_idle(net)


def test_who_waits_again_and_again_gives_leave_each_time(net: Any) -> None:
    give_leave(net)
    for number in range(4):
        receiving = net.engines[1].recv(0)
        net.engines[0].send(ramp(MIB, number), 1)
        net.settle()
        assert (receiving.result() == ramp(MIB, number)).all()
    assert net.kinds(0, 1).count(wire.PUSH) == 4


def test_leave_is_good_for_one_message(net: Any) -> None:
    give_leave(net)
    for number in range(2):
        net.engines[0].send(ramp(MIB, number), 1)
    net.settle()
    assert [kind for kind in net.kinds(0, 1) if kind in (wire.RTS, wire.PUSH)] == [
        wire.PUSH,
        wire.RTS,
    ]


def test_a_first_message_and_one_that_is_too_large_are_pulled(net: Any) -> None:
    for nbytes in (MIB, MIB + 4):
        net.engines[1].recv(0)
        net.engines[0].send(ramp(nbytes), 1)
        net.settle()
    assert wire.PUSH not in net.kinds(0, 1)


def test_a_synchronous_send_waits_for_its_receive(net: Any) -> None:
    give_leave(net)
    sending = net.engines[0].send(ramp(MIB), 1, synchronous=True)
    net.settle()
    assert not sending.done()
    assert (net.engines[1].recv(0).cancel(), sending.done()) == (True, False)


def test_nobody_gives_leave_who_takes_no_large_messages(make_net: Any) -> None:
    net = make_net(2, max_message_bytes=MIB)
    give_leave_for = net.engines[1].recv(0)
    net.engines[0].send(ramp(100_000), 1)
    net.settle()
    assert give_leave_for.done()
    net.engines[0].send(ramp(MIB), 1)
    net.settle()
    assert wire.PUSH not in net.kinds(0, 1)
    with pytest.raises(MessageTooLargeError):
        net.engines[1].recv(0).result()


# -- nobody waits for it --------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["amid", "after"])
@pytest.mark.parametrize("has_out", [True, False])
def test_what_was_pushed_to_nobody_is_kept(net: Any, when: str, has_out: bool) -> None:
    give_leave(net)
    sending = net.engines[0].send(ramp(MIB, 3), 1)
    if when == "after":
        net.settle()
        assert sending.done()
    else:
        for _ in range(2):
            net.pipes[0, 1].leave(MIB)
            net.pipes[0, 1].arrive(MIB)
            net.pipes[0, 1].arrive(1000)
    out = np.zeros(MIB // 4, np.int32) if has_out else None
    receiving = net.engines[1].recv(0, 0, out)
    net.settle()
    assert (receiving.result() == ramp(MIB, 3)).all()
    assert out is None or receiving.result() is out
    assert_idle(net)


def test_there_is_one_at_most_that_nobody_waits_for(net: Any) -> None:
    give_leave(net)
    net.engines[0].send(ramp(MIB, 1), 1, "stray")
    net.settle()
    for number in range(3):
        receiving = net.engines[1].recv(0, "awaited")
        net.engines[0].send(ramp(MIB), 1, "awaited")
        net.settle()
        assert receiving.done()
        net.engines[0].send(ramp(MIB), 1, number)
        net.settle()
    assert net.kinds(0, 1).count(wire.PUSH) == 1
    assert (net.engines[1].recv(0, "stray").result() == ramp(MIB, 1)).all()
    give_leave(net)
    net.engines[0].send(ramp(MIB, 1), 1)
    assert net.kinds(0, 1)[0] == wire.PUSH


def test_an_out_that_does_not_fit_leaves_the_message_queued(net: Any) -> None:
    give_leave(net)
    out = np.full(7, -1, np.int32)
    receiving = net.engines[1].recv(0, 0, out)
    net.engines[0].send(ramp(MIB, 3), 1)
    net.settle()
    with pytest.raises(MismatchError, match="out= does not fit the message of rank 0"):
        receiving.result()
    assert (out == -1).all()
    assert (net.engines[1].recv(0).result() == ramp(MIB, 3)).all()
    assert_idle(net)


# -- it ends early --------------------------------------------------------------------------------


def amid(net: Any, out: Any = None) -> tuple[Any, Any]:
    """A message that was pushed to a receive, of which 200000 bytes have come."""
    give_leave(net)
    receiving = net.engines[1].recv(0, 0, out)
    sending = net.engines[0].send(ramp(MIB, 3), 1)
    pipe = net.pipes[0, 1]
    for _ in range(2):  # what announces it, and the first piece
        pipe.leave(MIB)
        pipe.arrive(MIB)  # a header
        pipe.arrive(200_000)
    return sending, receiving


def test_a_receive_cancelled_amid_what_is_pushed(net: Any) -> None:
    out = np.full(MIB // 4, -1, np.int32)
    _, receiving = amid(net, out)
    assert (out[:1000] == ramp(4000, 3)).all() and out[-1] == -1
    receiving.cancel()
    out[:] = -5
    net.settle()
    assert (out == -5).all()
    assert (net.engines[1].recv(0).result() == ramp(MIB, 3)).all()
    assert_idle(net)


def test_a_send_cancelled_amid_what_is_pushed(net: Any) -> None:
    give_leave(net)
    out = np.full(MIB // 4, -1, np.int32)
    receiving = net.engines[1].recv(0, 0, out)
    sending = net.engines[0].send(ramp(MIB, 3), 1)
    net.pipes[0, 1].leave(MIB)
    net.pipes[0, 1].leave(1000)  # the first piece is partly out
    assert sending.cancel()
    net.settle()
    assert not receiving.done()
    net.engines[0].send(ramp(MIB, 9), 1)
    net.settle()
    assert receiving.result() is out and (out == ramp(MIB, 9)).all()
    assert_idle(net)


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("left", ["nothing", "some", "all"])
def test_what_cannot_be_read_is_dropped_while_it_comes(net: Any, waits: bool, left: str) -> None:
    give_leave(net)
    net.channels[0].allow_pickle = True
    sending = net.engines[0].send([ramp(MIB), int], 1)
    assert net.kinds(0, 1)[0] == wire.PUSH
    receiving = net.engines[1].recv(0) if waits else None
    for _ in range({"nothing": 1, "some": 3, "all": 100}[left]):
        net.pipes[0, 1].leave(MIB)
    while net.pipes[0, 1].arrive(MIB):
        pass
    receiving = receiving or net.engines[1].recv(0)
    net.pipes[1, 0].flow()
    after = net.engines[1].recv(0)
    net.engines[0].send("after", 1)
    net.settle()
    with pytest.raises(ProtocolError, match="could not be read and was dropped"):
        receiving.result()
    assert after.result() == "after"
    assert sending.done() and (sending.exception() is None) == (left == "all")
    assert_idle(net)


@pytest.mark.parametrize("waits", [True, False])
def test_a_sender_lost_amid_what_it_pushed(net: Any, waits: bool) -> None:
    out = np.full(MIB // 4, -1, np.int32)
    _, receiving = amid(net, out)
    if not waits:
        receiving.cancel()
    net.lose(0)
    out[:] = -5
    receiving = receiving if waits else net.engines[1].recv(0)
    with pytest.raises(PeerLostError) as caught:
        receiving.result()
    assert caught.value.ranks == (0,) and (out == -5).all()


# -- frames that nobody sends ---------------------------------------------------------------------


def test_without_leave_nothing_is_pushed(net: Any) -> None:
    fields = (wire.PUSH, 0, False, 0, 5, 100)
    with pytest.raises(ProtocolError, match="rank 0 pushed message 0 without leave"):
        net.engines[1].frame(0, fields, 5)


@pytest.mark.parametrize("nbytes", [0, wire.MOST_PUSHED + 1])
def test_no_more_is_pushed_than_there_is_leave_for(net: Any, nbytes: int) -> None:
    give_leave(net)
    with pytest.raises(ProtocolError, match="malformed"):
        net.engines[1].frame(0, (wire.PUSH, 0, False, wire.FIRST_SID + 1, 5, nbytes), 5)
