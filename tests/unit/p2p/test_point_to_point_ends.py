"""Point to point that does not end well: cancelled, timed out, lost, closed."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest

from aiodist.buffers.values import Incoming
from aiodist.errors import CollectiveTimeoutError, GroupClosedError, PeerLostError
from aiodist.links.peer import CLOSED, LEFT
from aiodist.types import ANY_SOURCE, ANY_TAG

MIB = 1024 * 1024


def ramp(nbytes: int, first: int = 0) -> Any:
    return np.arange(first, first + nbytes // 4, dtype=np.int32)


# -- cancelling -----------------------------------------------------------------------------------


def test_a_cancelled_receive_takes_no_message(net: Any) -> None:
    work = net.engines[1].recv(0)
    assert work.cancel()
    net.engines[0].send("kept", 1)
    net.settle()
    assert net.engines[1].recv(0).result() == "kept"


def start_transfer(net: Any, out: Any) -> tuple[Any, Any]:
    """A transfer of 1 MiB of which 300000 bytes have come."""
    sending = net.engines[0].send(ramp(MIB), 1)
    receiving = net.engines[1].recv(0, ANY_TAG, out)
    net.pipes[0, 1].flow()
    net.pipes[1, 0].flow()
    for _ in range(2):
        net.pipes[0, 1].leave(MIB)
    net.pipes[0, 1].arrive(1)
    net.pipes[0, 1].arrive(MIB)
    net.pipes[0, 1].arrive(1)
    net.pipes[0, 1].arrive(300_000 - 256 * 1024)
    return sending, receiving


@pytest.mark.parametrize("first_out", [True, False])
@pytest.mark.parametrize("second_out", [True, False])
def test_a_receive_cancelled_amid_the_transfer_loses_nothing(
    net: Any, first_out: bool, second_out: bool
) -> None:
    out = np.full(MIB // 4, -1, np.int32) if first_out else None
    sending, receiving = start_transfer(net, out)
    if out is not None:
        assert (out[:75_000] == ramp(300_000)).all() and (out[75_000:] == -1).all()
    assert receiving.cancel()
    if out is not None:
        out[:] = -5
    net.settle()
    assert sending.done()
    again = net.engines[1].recv(0, 0, np.zeros(MIB // 4, np.int32) if second_out else None)
    assert (again.result() == ramp(MIB)).all()
    if out is not None:
        assert (out == -5).all()


@pytest.mark.parametrize("end", ["cancel", "fail"])
def test_without_memory_for_its_rest_the_message_of_a_cancelled_receive_is_lost(
    net: Any, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next receive hears of it. Nothing is written to `out` any more."""
    out = np.full(MIB // 4, -1, np.int32)
    sending, receiving = start_transfer(net, out)

    def allocate(*_: Any, **__: Any) -> None:
        raise MemoryError("of a test")

    with monkeypatch.context() as patch:
        patch.setattr(Incoming, "allocate", allocate)
        if end == "cancel":
            assert receiving.cancel()
        else:
            net.engines[1].fail(receiving, ValueError("late"))
    assert receiving.done()
    out[:] = -5
    net.settle()
    assert sending.done() and (out == -5).all()
    assert receiving.cancelled() or receiving.exception() is not None
    kept = weakref.ref(out)
    del out, sending, receiving
    gc.collect()
    assert kept() is None  # though the error is kept for the next receive
    net.engines[0].send("later", 1)
    net.settle()
    with pytest.raises(MemoryError, match=r"1048576 bytes of rank 0 is lost"):
        net.engines[1].recv(0).result()
    assert net.engines[1].recv(0).result() == "later"
    net.loop.advance(1)
    net.settle()
    assert all(engine.idle for engine in net.engines)


def test_a_receive_fails_even_if_it_cannot_be_withdrawn(
    net: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiving = net.engines[1].recv(0)

    def withdraw(operation: Any) -> None:
        raise ValueError("of a test")

    with monkeypatch.context() as patch:
        patch.setattr(net.engines[1].receiver, "withdraw", withdraw)
        with pytest.raises(ValueError, match="of a test"):
            net.engines[1].fail(receiving, TimeoutError("late"))
    with pytest.raises(TimeoutError, match="late"):
        receiving.result()


def test_a_receive_takes_over_amid_the_transfer(net: Any) -> None:
    out, other = np.full(MIB // 4, -1, np.int32), np.zeros(MIB // 4, np.int32)
    _, receiving = start_transfer(net, out)
    second = net.engines[1].recv(0, 0, other)
    receiving.cancel()
    net.settle()
    assert second.result() is other and (other == ramp(MIB)).all()


def test_a_message_given_back_is_first_again(net: Any) -> None:
    _, receiving = start_transfer(net, None)
    net.engines[0].send("later", 1)
    receiving.cancel()
    net.settle()
    assert net.engines[1].recv(0).nbytes == MIB
    assert net.engines[1].recv(0).result() == "later"


def test_a_send_cancelled_amid_the_transfer_is_received_by_nobody(net: Any) -> None:
    out = np.full(MIB // 4, -1, np.int32)
    x = ramp(MIB)
    sending = net.engines[0].send(x, 1)
    receiving = net.engines[1].recv(0, 0, out)
    net.pipes[0, 1].flow()
    net.pipes[1, 0].flow()
    net.pipes[0, 1].leave(1000)  # the first piece is partly out
    assert sending.cancel()
    x[:] = -7
    net.settle()
    assert not receiving.done()
    assert not (out == -7).any()
    net.engines[0].send(ramp(MIB, 5), 1)
    net.settle()
    assert receiving.result() is out and (out == ramp(MIB, 5)).all()
    net.loop.advance(1)
    net.settle()
    assert all(engine.idle for engine in net.engines)


def test_a_send_cancelled_at_the_last_byte_is_received_by_nobody(net: Any) -> None:
    receiving = net.engines[1].recv(0)
    sending = net.engines[0].send(ramp(100_000), 1)
    net.pipes[0, 1].flow()
    net.pipes[1, 0].flow()
    net.pipes[0, 1].leave(99_999)
    sending.cancel()
    net.settle()
    assert not receiving.done()
    assert net.engines[1].iprobe(0) is None


def test_a_cancelled_send_in_the_line_lets_the_others_pass(net: Any) -> None:
    works = [net.engines[0].send(ramp(60_000, i), 1) for i in range(8)]
    pending = [i for i, work in enumerate(works) if not work.done()]
    works[pending[0]].cancel()
    net.settle()
    got = []
    for _ in range(7):
        work = net.engines[1].recv(0)
        net.settle()
        got.append(int(work.result()[0]))
    assert got == [i for i in range(8) if i != pending[0]]


def test_a_cancelled_send_in_the_line_makes_room_for_a_smaller_one(net: Any) -> None:
    for _ in range(4):
        net.engines[0].send(ramp(60_000), 1)
    large, small = net.engines[0].send(ramp(60_000), 1), net.engines[0].send(None, 1)
    assert not small.done()
    large.cancel()
    assert small.done()


def test_a_cancelled_transfer_lets_the_next_one_go_on(net: Any) -> None:
    first, second = net.engines[1].recv(0, 1), net.engines[1].recv(0, 2)
    cancelled = net.engines[0].send(ramp(4 * MIB), 1, 1)
    net.pipes[0, 1].flow()
    net.pipes[1, 0].flow()
    net.loop.turn()
    assert len(net.pipes[0, 1].queued) == 4
    net.engines[0].send(ramp(4 * MIB), 1, 2)
    # The announcement comes before the pieces, so that the second is pulled while these wait.
    announcement = net.pipes[0, 1].bulk.pop()
    net.pipes[0, 1].urgent.append(announcement)
    net.pipes[0, 1].leave(MIB)
    net.pipes[0, 1].arrive(MIB)
    net.pipes[1, 0].flow()
    cancelled.cancel()
    net.settle()
    assert not first.done() and (second.result() == ramp(4 * MIB)).all()


def test_a_send_cancelled_while_its_metadata_travels_is_received_by_nobody(net: Any) -> None:
    value = ["x" * 1000] * 100
    receiving = net.engines[1].recv(0, 1)
    sending = net.engines[0].send(value, 1, 1)
    net.pipes[0, 1].flow()
    net.pipes[1, 0].flow()
    net.pipes[0, 1].leave(1000)
    sending.cancel()
    net.settle()
    assert not receiving.done()
    # The link holds four pieces of the next transfer, no more.
    net.engines[1].recv(0, 2)
    net.engines[0].send(ramp(4 * MIB), 1, 2)
    net.pipes[0, 1].flow()
    net.pipes[1, 0].flow()
    net.pipes[0, 1].leave(MIB)
    for _ in range(5):
        net.loop.turn()
    assert len(net.pipes[0, 1].queued) == 4
    net.engines[0].send("next", 1, 1)
    net.settle()
    assert receiving.result() == "next"


def test_fail_withdraws_and_raises(net: Any) -> None:
    work = net.engines[1].recv(0)
    net.engines[1].fail(work, CollectiveTimeoutError("late", missing=[0]))
    assert isinstance(work.exception(), CollectiveTimeoutError)
    net.engines[0].send("kept", 1)
    net.settle()
    assert net.engines[1].recv(0).result() == "kept"
    assert net.engines[1].pending == []


# -- losses and ends ------------------------------------------------------------------------------


def test_a_lost_rank_fails_what_needs_it_and_nothing_else(make_net: Any) -> None:
    net = make_net(3)
    engine = net.engines[0]
    large = net.engines[1].send(ramp(MIB), 0, "large")
    net.engines[1].send("whole", 0, "small")
    net.engines[2].send("other", 0, "small")
    net.settle()
    needs = [
        engine.recv(1, "x"),
        engine.recv(ANY_SOURCE, "x"),
        engine.probe(1, "x"),
        engine.probe(ANY_SOURCE, "y"),
        engine.send(ramp(MIB), 1),
    ]
    fine = engine.recv(2, "x")
    net.lose(1)
    for work in needs:
        error = work.exception()
        assert isinstance(error, PeerLostError) and error.ranks == (1,)
        assert "rank 1 is lost: connection reset" in str(error)
    assert not fine.done()
    # What came whole is still there, also for any-source; what did not is not.
    assert engine.recv(1, "small").result() == "whole"
    assert engine.recv(ANY_SOURCE, "small").result() == "other"
    for work in (
        engine.recv(1),
        engine.recv(),
        engine.probe(),
        engine.send(1, 1),
        engine.recv(ANY_SOURCE, "small"),
    ):
        assert isinstance(work.exception(), PeerLostError)
    net.engines[2].send("fine", 0, "x")
    net.settle()
    assert fine.result() == "fine"
    large.cancel()


@pytest.mark.parametrize("source", [1, ANY_SOURCE, [1, 2]])
def test_a_program_that_polls_hears_of_a_loss(make_net: Any, source: Any) -> None:
    net = make_net(3)
    engine, asked = net.engines[0], list[int]()
    net.channels[0].ask = asked.append
    for _ in range(2):
        assert engine.iprobe(source, "x") is None
    assert asked == [1]  # so rank 1 tells this one when it leaves
    net.engines[1].send("whole", 0, "x")
    net.settle()
    net.lose(1)
    assert engine.iprobe(source, "x").source == 1
    assert engine.recv(source, "x").result() == "whole"
    with pytest.raises(PeerLostError, match="rank 1 is lost: connection reset") as caught:
        engine.iprobe(source, "x")
    assert (caught.value.ranks, caught.value.op, caught.value.tag) == ((1,), "iprobe", "x")
    assert engine.iprobe(2) is None
    engine.acknowledge_lost()
    if source != 1:
        assert engine.iprobe(source, "x") is None


def test_who_has_left_is_no_source_any_more(make_net: Any) -> None:
    """A receive from any source goes on for as long as anybody is there who could send."""
    net = make_net(4)
    engine = net.engines[0]
    named = engine.recv(1, "x")
    works = [engine.recv(ANY_SOURCE, "x"), engine.probe(ANY_SOURCE, "z"), engine.recv(tag="y")]
    net.engines[1].send("first", 0, "unread")
    net.settle()
    net.lose(1, LEFT)
    assert isinstance(named.exception(), PeerLostError)
    assert not any(work.done() for work in works)
    assert engine.recv(tag="unread").result() == "first"
    late = engine.recv(tag="late")
    net.engines[2].send("second", 0, "x")
    net.engines[2].send("seen", 0, "z")
    net.engines[3].send("third", 0, "late")
    net.settle()
    assert (works[0].result(), works[0].source) == ("second", 2)
    assert works[1].result().source == 2
    assert late.result() == "third"
    net.lose(3, CLOSED)
    assert not works[2].done()
    assert engine.recv(2, "z").result() == "seen"
    net.lose(2, LEFT)
    for work in (works[2], engine.recv(), engine.probe()):
        error = work.exception()
        assert isinstance(error, PeerLostError) and error.ranks == (1, 2, 3)
        assert "no rank is left that could send: rank 1 is lost: it left" in str(error)
    assert engine.idle


def test_after_an_acknowledgement_the_others_are_received_from(make_net: Any) -> None:
    net = make_net(4)
    engine = net.engines[0]
    net.lose(1, "killed")
    assert isinstance(engine.recv().exception(), PeerLostError)
    assert engine.acknowledge_lost() == (1,)
    works = [engine.recv(tag="x"), engine.probe(tag="y"), engine.recv([1, 2], "z")]
    assert isinstance(engine.recv(1).exception(), PeerLostError)  # by its name, for ever
    for tag in ("x", "y", "z"):
        net.engines[2].send(tag, 0, tag)
    net.settle()
    assert (works[0].result(), works[0].source, works[2].result()) == ("x", 2, "z")
    assert works[1].result().source == 2
    assert engine.recv(tag="y").result() == "y"
    pending = [engine.recv(), engine.recv([1, 2])]
    net.lose(2, "killed")  # that one is not acknowledged
    for work in pending:
        error = work.exception()
        assert isinstance(error, PeerLostError) and error.ranks == (2,)
    assert engine.acknowledge_lost() == (1, 2)
    assert not engine.recv([0, 1, 2]).done()  # it may send to itself
    net.lose(3, LEFT)
    assert engine.acknowledge_lost() == (1, 2)
    for work, ranks in ((engine.recv(), (1, 2, 3)), (engine.probe([1, 2]), (1, 2))):
        error = work.exception()
        assert isinstance(error, PeerLostError) and error.ranks == ranks
        assert "no rank is left that could send: rank 1 is lost: killed" in str(error)


def test_a_list_that_names_nobody_who_is_lost_hears_of_no_loss(make_net: Any) -> None:
    net = make_net(4)
    work = net.engines[0].recv([2, 3])
    net.lose(1)
    net.engines[3].send("fine", 0)
    net.settle()
    assert (work.result(), work.source) == ("fine", 3)


def test_a_loss_fails_who_waits_for_anybody_also_when_another_has_left(make_net: Any) -> None:
    net = make_net(4)
    engine = net.engines[0]
    work = engine.recv(tag="x")
    net.lose(1, LEFT)
    net.lose(2)
    for one in (work, engine.recv(tag="x")):
        error = one.exception()
        assert isinstance(error, PeerLostError) and error.ranks == (2,)


def test_a_large_message_of_who_left_is_lost_to_the_receive_that_had_it(make_net: Any) -> None:
    net = make_net(3)
    sending = net.engines[1].send(ramp(MIB), 0, "large")
    net.settle()
    # What was matched is under way; another receive waits for whoever is next.
    taken, waiting = net.engines[0].recv(tag="large"), net.engines[0].recv(tag="large")
    net.lose(1, LEFT)
    error = taken.exception()
    assert isinstance(error, PeerLostError) and error.ranks == (1,)
    assert not waiting.done()
    net.engines[0].close(GroupClosedError("the group was closed", group="sim"))
    assert isinstance(waiting.exception(), GroupClosedError)
    assert net.engines[0].idle
    sending.cancel()


def test_a_loss_amid_a_transfer_ends_all_writing(net: Any) -> None:
    out = np.full(MIB // 4, -1, np.int32)
    sending, receiving = start_transfer(net, out)
    pipe = net.pipes[0, 1]
    net.channels[1].losses[0] = "connection reset"
    net.engines[1].rank_lost(0, "rank 0 is lost: connection reset")
    assert isinstance(receiving.exception(), PeerLostError)
    assert pipe.landing is not None and pipe.memory is None
    out[:] = -5
    net.settle()
    assert (out == -5).all()
    sending.cancel()


def test_close_fails_everything(net: Any) -> None:
    engine = net.engines[1]
    out = np.full(MIB // 4, -1, np.int32)
    sending, receiving = start_transfer(net, out)
    works = [receiving, engine.recv(0, "x"), engine.probe(0, "x"), engine.send(ramp(MIB), 0, 3)]
    engine.close(GroupClosedError("the group was closed", group="sim"))
    for work in works:
        error = work.exception()
        assert isinstance(error, GroupClosedError) and error.op == work.op
    for call in (engine.recv, lambda: engine.send(1, 0), engine.iprobe):
        with pytest.raises(GroupClosedError):
            call()
    out[:] = -5
    net.settle()
    assert (out == -5).all()
    sending.cancel()


def test_a_message_that_was_lost_unseen_takes_those_behind_it_along(make_net: Any) -> None:
    net = make_net(2)
    large = net.engines[1].send(ramp(MIB), 0, "a")
    net.engines[1].send("behind it", 0, "a")
    another = net.engines[1].send(ramp(MIB), 0, "a")
    net.engines[1].send("another tag", 0, "b")
    net.settle()
    net.lose(1)
    engine = net.engines[0]
    assert engine.recv(1, "b").result() == "another tag"
    assert isinstance(engine.recv(1, "a").exception(), PeerLostError)
    assert engine.acknowledge_lost() == (1,)
    with pytest.raises(PeerLostError, match="no rank is left"):
        engine.iprobe()
    large.cancel()
    another.cancel()
