"""What a user sees of point to point, over a simulated network."""

from __future__ import annotations

import asyncio
import enum
import re
from typing import Any

import numpy as np
import pytest

from aiodist.buffers import arrays
from aiodist.buffers.encoding import encode
from aiodist.errors import MessageTooLargeError, MismatchError, PeerLostError, ProtocolError
from aiodist.p2p import delivery
from aiodist.p2p import frames as wire
from aiodist.p2p.credit import EAGER, WINDOW
from aiodist.testing.history import digest_of
from aiodist.transports.base import STEADY
from aiodist.types import ANY_SOURCE, ANY_TAG
from aiodist.wire.frames import MAX_PAYLOAD

MIB = 1024 * 1024


def ramp(nbytes: int, first: int = 0) -> Any:
    return np.arange(first, first + nbytes // 4, dtype=np.int32)


# -- one message ----------------------------------------------------------------------------------


def test_a_small_send_is_complete_at_once_and_its_memory_may_be_reused(net: Any) -> None:
    x = ramp(32)
    work = net.engines[0].send(x, 1, 7)
    assert work.result() is None
    assert (work.op, work.tag, work.nbytes) == ("send", 7, 32)
    x[:] = -1
    net.settle()
    received = net.engines[1].recv(0, 7)
    assert (received.result() == ramp(32)).all()
    assert (received.op, received.source, received.tag, received.nbytes) == ("recv", 0, 7, 32)


def test_a_receive_may_be_first_and_gets_the_tag_and_source(net: Any) -> None:
    work = net.engines[1].recv()
    assert work.tag is ANY_TAG and work.source is None
    net.engines[0].send({"a": 1}, 1, "x")
    net.settle()
    assert (work.result(), work.source, work.tag) == ({"a": 1}, 0, "x")


def test_large_data_goes_straight_into_out(net: Any) -> None:
    x, out = ramp(MIB), np.zeros(MIB // 4, np.int32)
    sending = net.engines[0].send(x, 1)
    receiving = net.engines[1].recv(0, 0, out)
    pipe = net.pipes[0, 1]
    straight = 0
    net.loop.turn()
    while pipe.leave(MIB) or pipe.arrive(MIB) or net.pipes[1, 0].leave(1):
        net.pipes[1, 0].arrive(1)
        straight += pipe.memory is not None and np.shares_memory(np.asarray(pipe.memory), out)
        net.loop.turn()
    assert straight
    assert sending.result() is None
    assert receiving.result() is out and (out == x).all()
    assert wire.DATA in net.kinds(0, 1)


def test_a_large_send_is_pending_until_its_data_has_left(net: Any) -> None:
    sending = net.engines[0].send(ramp(MIB), 1)
    net.settle()
    assert not sending.done()
    receiving = net.engines[1].recv()
    net.settle()
    assert sending.done() and (receiving.result() == ramp(MIB)).all()


def test_many_arrays_share_pieces(net: Any) -> None:
    value = {"big": ramp(MIB), "small": [ramp(400, i) for i in range(1000)], "empty": ramp(0)}
    receiving = net.engines[1].recv()
    net.engines[0].send(value, 1)
    net.settle()
    got = receiving.result()
    assert (got["big"] == value["big"]).all() and got["empty"].shape == (0,)
    assert all((a == b).all() for a, b in zip(got["small"], value["small"], strict=True))
    assert net.kinds(0, 1).count(wire.DATA) < 10


def test_long_metadata_is_pulled_too(net: Any) -> None:
    value = ["x" * 1000] * 1000
    receiving = net.engines[1].recv()
    net.engines[0].send(value, 1)
    net.settle()
    assert receiving.result() == value


def test_pieces_leave_room_for_others(net: Any) -> None:
    """A link never holds more than a MiB: a small message waits for that at most."""
    net.engines[1].recv(0, 1)
    net.engines[0].send(ramp(16 * MIB), 1, 1)
    net.pipes[0, 1].flow()
    net.pipes[1, 0].flow()
    for _ in range(10):
        net.loop.turn()
        assert len(net.pipes[0, 1].queued) == 4
    assert all(frame.nbytes <= 256 * 1024 for frame in net.pipes[0, 1].queued)


def test_a_long_message_goes_in_the_longest_frames(make_net: Any) -> None:
    net = make_net(2)
    receiving = net.engines[1].recv(0)
    net.engines[0].send(ramp(16 * MIB), 1)
    net.pipes[0, 1].flow()
    net.pipes[1, 0].flow()
    assert [frame.nbytes for frame in net.pipes[0, 1].queued] == [MAX_PAYLOAD]
    net.settle()
    assert (receiving.result() == ramp(16 * MIB)).all()
    assert net.kinds(0, 1).count(wire.DATA) == 16


@pytest.mark.parametrize("steady", [True, False])
def test_a_link_may_keep_what_nobody_writes_again(net: Any, steady: bool) -> None:
    net.engines[1].recv(0)
    sending = net.engines[0].send(ramp(4 * MIB), 1, steady=steady)
    net.pipes[0, 1].flow()
    net.pipes[1, 0].flow()
    assert [frame.token is STEADY for frame in net.pipes[0, 1].queued] == [steady] * 4
    # It need not be taken back, but no more of it is sent.
    sending.cancel()
    assert sum(frame.nbytes for frame in net.pipes[0, 1].queued) == (MIB if steady else 0)
    again = net.engines[0].send(ramp(MIB), 1)
    net.settle()
    assert again.done() and net.kinds(0, 1).count(wire.DATA) == 8


def test_who_waits_for_much_need_not_poll(net: Any) -> None:
    little, much = net.engines[1].recv(0), net.engines[1].recv(0)
    net.engines[0].send(ramp(MIB), 1)
    net.engines[0].send(ramp(MIB + 4), 1)
    assert not net.engines[1].takes_long(much)  # nobody knows it yet
    net.pipes[0, 1].flow()
    net.pipes[0, 1].flow()
    assert not net.engines[1].takes_long(little) and net.engines[1].takes_long(much)
    net.settle()
    assert much.done() and not net.engines[1].takes_long(much)


def test_two_transfers_alternate(net: Any) -> None:
    first, second = net.engines[1].recv(0, 1), net.engines[1].recv(0, 2)
    net.engines[0].send(ramp(16 * MIB), 1, 1)
    net.engines[0].send(ramp(MIB), 1, 2)
    while not second.done():
        net.loop.turn()
        net.pipes[0, 1].flow()
        net.pipes[1, 0].flow()
    assert not first.done()
    net.settle()
    assert (first.result() == ramp(16 * MIB)).all()


# -- order ----------------------------------------------------------------------------------------


def test_messages_of_a_tag_keep_their_order_even_when_some_are_large(net: Any) -> None:
    sizes = [8, MIB, 16, 2 * MIB, 8]
    for size in sizes:
        net.engines[0].send(ramp(size, size), 1, "t")
    net.settle()
    for size in sizes:
        work = net.engines[1].recv(0, "t")
        net.settle()
        assert (work.result() == ramp(size, size)).all()


def test_any_tag_takes_the_oldest(net: Any) -> None:
    for tag in [3, "1", 1, 3]:
        net.engines[0].send(None, 1, tag)
    net.settle()
    assert [net.engines[1].recv(0).tag for _ in range(4)] == [3, "1", 1, 3]


def test_a_str_and_an_int_are_different_tags(net: Any) -> None:
    work = net.engines[1].recv(0, "1")
    net.engines[0].send("int", 1, 1)
    net.settle()
    assert not work.done()
    net.engines[0].send("str", 1, "1")
    net.settle()
    assert work.result() == "str" and net.engines[1].recv(0, 1).result() == "int"


def test_any_source_takes_turns(make_net: Any) -> None:
    net = make_net(4)
    for _ in range(3):
        for src in (1, 3):
            net.engines[src].send(src, 0)
    net.engines[2].send(2, 0)
    net.settle()
    assert [net.engines[0].recv().result() for _ in range(7)] == [1, 2, 3, 1, 3, 1, 3]


def test_the_source_that_was_served_the_longest_ago_is_next(make_net: Any) -> None:
    """Also if receives of another tag, or of some sources, are served in between."""
    net = make_net(4)
    for src in (1, 2, 3):
        for _ in range(4):
            net.engines[src].send(src, 0, "b")
    for _ in range(4):
        net.engines[2].send(2, 0, "a")
    net.settle()
    engine = net.engines[0]
    served = []
    for _ in range(4):
        assert engine.recv(tag="a").result() == 2
        served.append(engine.recv(tag="b").result())
        served.append(engine.recv([2, 1], "b").result())
    assert served == [1, 2, 3, 1, 3, 1, 3, 1]


def test_several_sources(make_net: Any) -> None:
    """Receives and probes that name a list of ranks, among others, in the order of their calls."""
    net = make_net(4)
    engine = net.engines[0]
    works = [
        engine.recv((1, 2), "a"),
        engine.recv(tag="a"),
        engine.recv([2, 3, 2]),
        engine.recv(range(1, 3), ANY_TAG),
    ]
    probing = engine.probe([1, 3], "a")
    for src, tag in ((3, "a"), (3, "b"), (1, "a"), (2, "a")):
        net.engines[src].send(f"{src} {tag}", 0, tag)
        net.settle()
    assert [work.result() for work in works] == ["1 a", "3 a", "3 b", "2 a"]
    assert not probing.done()
    assert engine.iprobe([1, 3]) is None
    net.engines[2].send("not for it", 0, "a")
    net.engines[3].send("for it", 0, "a")
    net.settle()
    assert probing.result().source == 3
    assert engine.iprobe([0, 2]).source == 2
    work = engine.recv([0, 1])
    assert work.cancel()
    assert engine.recv([1, 2]).result() == "not for it"
    assert engine.recv([3]).result() == "for it"
    net.loop.advance(1)
    assert engine.idle


@pytest.mark.parametrize(
    ("src", "error", "text"),
    [
        ([], ValueError, "an empty list"),
        ([0, 4], ValueError, "each of src"),
        ([0, "1"], TypeError, "each of src"),
        ("01", TypeError, "src"),
        (None, TypeError, "src"),
    ],
)
def test_what_is_no_source(make_net: Any, src: Any, error: type[Exception], text: str) -> None:
    for call in (make_net(4).engines[0].recv, make_net(4).engines[0].iprobe):
        with pytest.raises(error, match=text):
            call(src)


def test_a_flood_of_unwanted_messages_does_not_hold_up_a_list(make_net: Any) -> None:
    """The sender's credit is used up, so the receiver has to ask for the tag that it waits for."""
    net = make_net(3)
    for number in range(20_000):
        net.engines[1].send(number, 0, f"{number % 100}")
    net.engines[1].send("wanted", 0, "x")
    net.settle()
    work = net.engines[0].recv([1, 2], "x")
    net.settle()
    assert work.result() == "wanted"


def test_the_oldest_matching_receive_gets_the_message(net: Any) -> None:
    engine = net.engines[1]
    works = [engine.recv(0, "a"), engine.recv(), engine.recv(0, "a"), engine.recv(ANY_SOURCE, "a")]
    for number in range(4):
        net.engines[0].send(number, 1, "a")
    net.settle()
    assert [work.result() for work in works] == [0, 1, 2, 3]


# -- to oneself -----------------------------------------------------------------------------------


def test_a_send_to_oneself_copies(make_net: Any) -> None:
    engine = make_net(1).engines[0]
    x = ramp(64)
    assert engine.send(x, 0).done()
    x[:] = 0
    assert (engine.recv(0).result() == ramp(64)).all()


def test_a_large_send_to_oneself_waits_for_the_receive_and_takes_turns(make_net: Any) -> None:
    net = make_net(1)
    engine = net.engines[0]
    x, out = ramp(4 * MIB), np.zeros(MIB, np.int32)
    sending = engine.send(x, 0)
    net.settle()
    assert not sending.done()
    receiving = engine.recv(0, 0, out)
    turns = 0
    while net.loop.turn():
        turns += 1
    assert turns >= 3
    assert receiving.result() is out and (out == x).all() and sending.done()


def test_sends_to_oneself_have_credit_too(make_net: Any) -> None:
    net = make_net(1)
    engine = net.engines[0]
    works = [engine.send(ramp(50_000, i), 0) for i in range(20)]
    assert 0 < sum(work.done() for work in works) < 20
    for i in range(20):
        assert (engine.recv(0).result() == ramp(50_000, i)).all()
    assert all(work.done() for work in works)
    net.loop.advance(1)
    assert engine.idle


# -- flow control ---------------------------------------------------------------------------------


def test_a_rank_that_does_not_receive_holds_the_sender_back(net: Any) -> None:
    works = [net.engines[0].send(ramp(10_000, i), 1) for i in range(100)]
    net.settle()
    done = sum(work.done() for work in works)
    assert done * 10_000 < WINDOW
    assert net.kinds(0, 1).count(wire.EAGER) == done
    for i in range(100):
        work = net.engines[1].recv()
        net.settle()
        assert (work.result() == ramp(10_000, i)).all()
    assert all(work.done() for work in works)


def test_tiny_messages_have_a_cost(net: Any) -> None:
    works = [net.engines[0].send(None, 1) for _ in range(2000)]
    net.settle()
    assert sum(work.done() for work in works) <= WINDOW // 256


@pytest.mark.parametrize("wildcards", [(), (ANY_SOURCE,), (0, ANY_TAG)])
@pytest.mark.parametrize("nbytes", [8, 60_000, MIB])
def test_unreceived_tags_never_block_one_that_is_waited_for(
    net: Any, nbytes: int, wildcards: tuple[Any, ...]
) -> None:
    for number in range(150):
        net.engines[0].send(ramp(60_000), 1, number)
    net.settle()
    assert net.kinds(0, 1).count(wire.EAGER) < 100
    works = [net.engines[0].send(ramp(nbytes, i), 1, "wanted") for i in range(5)]
    net.settle()
    assert not any(work.done() for work in works)
    source = wildcards[0] if wildcards else 0
    for i in range(5):
        receiving = net.engines[1].recv(source, "wanted")
        net.settle()
        assert (receiving.result() == ramp(nbytes, i)).all()
    assert all(work.done() for work in works)


def test_a_receive_posted_first_is_served_however_much_is_unreceived(net: Any) -> None:
    receiving = net.engines[1].recv(0, "wanted")
    probing = net.engines[1].probe(0, "probed")
    for number in range(150):
        net.engines[0].send(ramp(60_000), 1, number)
    net.engines[0].send("it", 1, "wanted")
    net.engines[0].send("too", 1, "probed")
    net.settle()
    assert receiving.result() == "it"
    assert probing.result() == (0, "probed", 0)


def test_polling_with_iprobe_sees_what_the_total_holds_back(net: Any) -> None:
    for number in range(150):
        net.engines[0].send(ramp(60_000), 1, number)
    net.engines[0].send("it", 1, "polled")
    net.settle()
    assert net.engines[1].iprobe(0, "polled") is None
    net.settle()
    assert net.engines[1].iprobe(0, "polled") == (0, "polled", 0)


def crowd(net: Any) -> None:
    """Rank 0 has used up its total at rank 1, and has more."""
    for number in range(150):
        net.engines[0].send(ramp(60_000), 1, number)
    net.settle()


def test_a_probe_sees_what_the_total_holds_back(net: Any) -> None:
    crowd(net)
    net.engines[0].send("it", 1, "probed")
    probing = net.engines[1].probe(0, "probed")
    net.settle()
    assert probing.result() == (0, "probed", 0)


def test_a_want_is_said_again_when_it_was_taken_back_too_early(net: Any) -> None:
    crowd(net)
    net.engines[1].recv(0, "x").cancel()
    again = net.engines[1].recv(0, "x")
    net.settle()
    assert net.kinds(1, 0) == [wire.WANT, wire.UNWANT, wire.WANT]
    net.engines[0].send("it", 1, "x")
    net.settle()
    assert again.result() == "it"


def test_a_want_is_taken_back_if_the_receive_fails_by_the_loss_of_another(make_net: Any) -> None:
    net = make_net(3)
    crowd(net)
    receiving = net.engines[1].recv(tag="x")
    net.settle()
    assert net.kinds(1, 0) == [wire.WANT]
    net.lose(2)
    net.settle()
    assert isinstance(receiving.exception(), PeerLostError)
    assert net.kinds(1, 0) == [wire.WANT, wire.UNWANT]


def test_wants_beyond_their_number_are_said_when_others_were_answered(
    net: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aiodist.p2p.credit.MAX_WANTS", 2)
    crowd(net)
    a, b, c, d = (net.engines[1].recv(0, tag) for tag in "abcd")
    net.settle()
    net.engines[0].send("c", 1, "c")
    net.settle()
    assert not c.done()
    a.cancel()
    net.settle()
    assert c.result() == "c"
    for tag in "bd":
        net.engines[0].send(tag, 1, tag)
    net.settle()
    assert b.done() and d.done()


def test_wants_that_are_taken_back_leave_nothing_behind(net: Any) -> None:
    for number in range(100):
        net.engines[0].send(ramp(60_000), 1, number)
    net.settle()
    for number in range(50):
        net.engines[1].recv(0, f"none {number}").cancel()
        net.engines[1].iprobe(ANY_SOURCE, f"never {number}")
    net.settle()
    assert net.kinds(0, 1).count(wire.NOWANT) == 100
    for _ in range(100):
        net.engines[1].recv(0)
        net.settle()
    net.loop.advance(1)
    net.settle()
    assert all(engine.idle for engine in net.engines)


def test_no_state_stays_for_tags_that_were_matched(net: Any) -> None:
    for number in range(3000):
        work = net.engines[1].recv(0, f"request {number}")
        net.engines[0].send(number, 1, f"request {number}")
        net.settle()
        assert work.result() == number
    net.loop.advance(1)
    net.settle()
    assert all(engine.idle for engine in net.engines)
    assert net.kinds(1, 0).count(wire.CREDIT) < 150


# -- out ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [80, MIB])
def test_a_mismatching_out_raises_and_the_message_stays(net: Any, nbytes: int) -> None:
    out = np.full(3, 7.0)
    sending = net.engines[0].send(ramp(nbytes), 1, "t")
    net.settle()
    wrong = net.engines[1].recv(0, "t", out)
    error = wrong.exception()
    assert isinstance(error, MismatchError)
    assert error.calls == {1: "recv(out=float64[3])", 0: f"send(int32[{nbytes // 4}])"}
    assert error.group == "sim" and error.op == "recv" and error.tag == "t"
    assert (out == 7).all()
    assert net.engines[1].iprobe(0) == (0, "t", nbytes)
    right = net.engines[1].recv(0, "t", np.zeros(nbytes // 4, np.int32))
    net.settle()
    assert (right.result() == ramp(nbytes)).all() and sending.done()


def test_the_next_receive_takes_a_message_that_did_not_fit(net: Any) -> None:
    wrong = net.engines[1].recv(0, 0, np.zeros(3))
    right = net.engines[1].recv()
    net.engines[0].send(ramp(MIB), 1)
    net.settle()
    assert isinstance(wrong.exception(), MismatchError)
    assert (right.result() == ramp(MIB)).all()


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("value", [ramp(80), ramp(MIB), [ramp(80)] * 2, "x" * MIB])
def test_a_message_for_which_there_is_no_memory_stays(
    net: Any, monkeypatch: pytest.MonkeyPatch, value: Any, waits: bool
) -> None:
    def fail(*args: object) -> Any:
        raise MemoryError("no more")

    sender, receiver = net.engines[:2]
    works = [receiver.recv(0, "t")] if waits else []
    with monkeypatch.context() as patch:
        if isinstance(value, str):  # all of it is metadata
            patch.setattr(delivery, "bytearray", fail, raising=False)
        else:
            patch.setattr(arrays, "empty", fail)
        sending = sender.send(value, 1, "t")
        net.settle()
        works.append(receiver.recv(0, "t"))
        net.settle()
        for work in works:
            error = work.exception()
            assert type(error) is MemoryError
            text = "no memory for a message of [0-9]+ bytes from rank 0: no more. The message stays"
            assert re.match(text, str(error))
    right = receiver.recv(0, "t")
    net.settle()
    assert digest_of(right.result()) == digest_of(value)
    assert sending.result() is None
    net.loop.advance(1)
    net.settle()
    assert all(engine.idle for engine in net.engines)


@pytest.mark.parametrize("listed", [False, True])
def test_a_read_only_out_is_refused_at_the_call(net: Any, listed: bool) -> None:
    out = np.zeros(2, np.int32)
    out.flags.writeable = False
    with pytest.raises(ValueError, match="out: int32\\[2\\] is read-only"):
        net.engines[1].recv(0, 0, [np.zeros(2), out] if listed else out)
    net.engines[0].send("first", 1)
    net.settle()
    assert net.engines[1].recv(0, 0).result() == "first"


# -- messages that cannot be taken ----------------------------------------------------------------


def test_too_large_a_message_fails_both_and_is_dropped(make_net: Any) -> None:
    net = make_net(2, max_message_bytes=100_000)
    sending = net.engines[0].send(ramp(200_000), 1, "t")
    net.engines[0].send("next", 1, "t")
    net.settle()
    receiving = net.engines[1].recv(0, "t")
    net.settle()
    for work in (sending, receiving):
        error = work.exception()
        assert isinstance(error, MessageTooLargeError) and error.tag == "t"
        assert "max_message_bytes" in str(error)
    assert net.engines[1].recv(0, "t").result() == "next"
    net.loop.advance(1)
    net.settle()
    assert all(engine.idle for engine in net.engines)


def test_a_small_message_may_be_too_large_as_well(make_net: Any) -> None:
    net = make_net(2, max_message_bytes=1000)
    net.engines[0].send(ramp(2000), 1)
    net.engines[0].send("next", 1)
    net.settle()
    assert isinstance(net.engines[1].recv(0).exception(), MessageTooLargeError)
    assert net.engines[1].recv(0).result() == "next"


@pytest.mark.parametrize("nbytes", [8, MIB])
def test_pickled_values_are_dropped_where_they_are_not_allowed(net: Any, nbytes: int) -> None:
    net.channels[0].allow_pickle = True
    receiving = net.engines[1].recv(0)
    sending = net.engines[0].send([{1, 2, 3}, ramp(nbytes)], 1)
    net.settle()
    error = receiving.exception()
    assert isinstance(error, ProtocolError) and "allow_pickle" in str(error)
    if nbytes == MIB:
        assert isinstance(sending.exception(), ProtocolError)
    net.loop.advance(1)
    net.settle()
    assert all(engine.idle for engine in net.engines)


class Cancels:
    """Unpickling it raises what `except Exception` does not catch."""

    def __reduce__(self) -> Any:
        return _cancel, ()


def _cancel() -> None:
    raise asyncio.CancelledError("of a test")


def test_a_value_whose_unpickling_is_cancelled_fails_its_receive_alone(net: Any) -> None:
    for channel in net.channels:
        channel.allow_pickle = True
    failing, after = net.engines[1].recv(0), net.engines[1].recv(0)
    for value in (Cancels(), "after"):
        net.engines[0].send(value, 1)
    net.settle()
    with pytest.raises(ProtocolError, match="unpickling raised CancelledError: of a test"):
        failing.result()
    assert after.result() == "after"


# -- probes ---------------------------------------------------------------------------------------


def test_probe_tells_of_a_message_and_leaves_it(net: Any) -> None:
    probing = net.engines[1].probe()
    assert net.engines[1].iprobe() is None
    net.engines[0].send(ramp(MIB), 1, "t")
    net.settle()
    envelope = probing.result()
    assert (envelope.source, envelope.tag, envelope.nbytes) == (0, "t", MIB)
    assert net.engines[1].iprobe(0, "t") == envelope
    assert net.engines[1].probe(0).result() == envelope
    receiving = net.engines[1].recv(0, "t")
    net.settle()
    assert receiving.done() and net.engines[1].iprobe() is None


def test_a_receive_that_waits_comes_before_a_probe(net: Any) -> None:
    probing, receiving = net.engines[1].probe(0), net.engines[1].recv(0)
    net.engines[0].send(1, 1)
    net.settle()
    assert receiving.done() and not probing.done()
    assert probing.cancel()


# -- arguments ------------------------------------------------------------------------------------


class Color(enum.IntEnum):
    RED = 5


class Name(enum.StrEnum):
    A = "a"


@pytest.mark.parametrize(
    ("tag", "plain"), [(Color.RED, 5), (Name.A, "a"), (np.int64(3), 3), (-(2**63), -(2**63))]
)
def test_tags_that_are_like_str_or_int(net: Any, tag: Any, plain: Any) -> None:
    net.engines[0].send(None, 1, tag)
    net.settle()
    work = net.engines[1].recv(0, plain)
    assert work.done() and type(work.tag) is type(plain)


@pytest.mark.parametrize("tag", [True, None, 1.0, b"x", (1,)])
def test_other_tags_are_type_errors(net: Any, tag: Any) -> None:
    for call in (lambda: net.engines[0].send(1, 1, tag), lambda: net.engines[0].recv(1, tag)):
        with pytest.raises(TypeError, match="a tag is a str or an int, not"):
            call()


@pytest.mark.parametrize("tag", [2**63, -(2**63) - 1, "x" * 1025, "é" * 513])
def test_too_large_tags_are_value_errors(net: Any, tag: Any) -> None:
    with pytest.raises(ValueError, match="tag"):
        net.engines[0].send(1, 1, tag)


@pytest.mark.parametrize(("rank", "error"), [(2, ValueError), (-1, ValueError), (True, TypeError)])
def test_ranks_are_checked(net: Any, rank: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="dst"):
        net.engines[0].send(1, rank)
    with pytest.raises(error, match="src"):
        net.engines[0].recv(rank)


def test_a_value_that_does_not_travel_raises_at_once(net: Any) -> None:
    with pytest.raises(TypeError):
        net.engines[0].send(object(), 1)
    assert net.engines[0].idle


def test_the_limit_between_eager_and_pulled(net: Any) -> None:
    meta = len(encode(np.zeros(EAGER, np.uint8)).meta)
    fits = net.engines[0].send(np.zeros(EAGER - meta, np.uint8), 1)
    assert fits.done()
    above = net.engines[0].send(np.zeros(EAGER, np.uint8), 1)
    assert not above.done()
    above.cancel()
