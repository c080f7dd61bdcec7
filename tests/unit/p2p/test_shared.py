"""Messages whose data is read where it lies, over the simulated network: in a heap that is plain
memory of this process, or in memory of the sender's process, which is this one, too."""

from __future__ import annotations

import ctypes
import os
from typing import Any

import numpy as np
import pytest

from aiodist.errors import GroupClosedError, MismatchError, PeerLostError, ProtocolError
from aiodist.links.moved import Moved
from aiodist.p2p import frames as wire
from aiodist.p2p import shared
from aiodist.p2p.point_to_point import PointToPoint
from aiodist.p2p.shared import MessageMemory
from aiodist.shared_memory.heap import address_of
from aiodist.transports import polling, remote

MIB = 1024 * 1024


class FakeHeap:
    """The arrays of all ranks in one piece of memory, which all of them see."""

    def __init__(self) -> None:
        self.memory = np.zeros(16 * MIB, np.uint8)

    def place_of(self, parts: Any) -> int:
        starts = [address_of(part) - address_of(self.memory) for part in parts]
        return starts[0] + 1 if len(starts) == 1 and 0 <= starts[0] < len(self.memory) else 0

    def find(self, peer: int, place: int, nbytes: int) -> Any:
        if place + nbytes > len(self.memory):
            raise ProtocolError(f"rank {peer} names shared memory that it does not share")
        return self.memory[place - 1 : place - 1 + nbytes]


def read(pid: int, address: int, into: memoryview) -> None:
    """As the system does it for this process, also where it is forbidden."""
    assert pid == os.getpid()
    into[:] = ctypes.string_at(address, into.nbytes)


def build(make_net: Any, kind: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(shared, "WORTH_IT", 50_000)
    monkeypatch.setattr(wire, "MOST_PUSHED", 50_000)
    monkeypatch.setattr(remote, "read", read)
    monkeypatch.setattr(polling, "others_compute", lambda: False)  # whatever else this machine does
    net = make_net(2)
    net.heap = FakeHeap()
    net.is_mapped = kind == "mapped"
    net.moved = [Moved(), Moved()]
    process = 0 if net.is_mapped else os.getpid()
    net.engines = [
        PointToPoint(channel, net.loop, shared=MessageMemory(net.heap, moved, lambda rank: process))
        for channel, moved in zip(net.channels, net.moved, strict=True)
    ]
    return net


@pytest.fixture(params=["mapped", "remote"])
def net(make_net: Any, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    return build(make_net, request.param, monkeypatch)


@pytest.fixture
def reading(make_net: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Ranks that read memory of each other's process."""
    return build(make_net, "remote", monkeypatch)


def ramp(net: Any, nbytes: int, first: int = 0) -> Any:
    """An array that the other rank can read."""
    if not net.is_mapped:
        return np.arange(first, first + nbytes // 4, dtype=np.int32)
    array = net.heap.memory[4096 : 4096 + nbytes].view(np.int32)
    array[:] = np.arange(first, first + nbytes // 4)
    return array


def receive(net: Any, nbytes: int, **options: Any) -> tuple[Any, Any]:
    out = np.full(nbytes // 4, -1, np.int32)
    return net.engines[1].recv(0, 0, out, **options), out


def assert_idle(net: Any) -> None:
    net.loop.advance(1)
    net.settle()
    assert all(engine.idle for engine in net.engines)


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("nbytes", [100_000, 5 * MIB])
def test_data_is_read_where_it_lies(net: Any, waits: bool, nbytes: int) -> None:
    x = ramp(net, nbytes, 3)
    if waits:
        receiving, out = receive(net, nbytes)
    sending = net.engines[0].send(x, 1)
    if not waits:
        net.settle()
        assert not sending.done()
        receiving, out = receive(net, nbytes)
    net.settle()
    assert sending.done() and receiving.result() is out and (out == x).all()
    # A proof says that it was right: nobody has to.
    assert net.kinds(0, 1) == [wire.RTS, wire.FIN] if net.is_mapped else [wire.RTS]
    assert net.kinds(1, 0)[0] == wire.PULL
    assert (net.moved[0].sent, net.moved[1].received) == (nbytes, nbytes)
    assert_idle(net)


@pytest.mark.parametrize("kind", ["not mapped", "small", "many", "nowhere"])
def test_what_cannot_be_read_or_is_not_worth_it_is_sent(
    net: Any, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "nowhere":
        monkeypatch.setattr(remote, "_read", None)
    if kind == "small":
        monkeypatch.setattr(shared, "WORTH_IT", MIB)
    value: Any = np.arange(MIB // 4, dtype=np.int32)
    if kind == "many":
        value = list(np.split(value, 32))
    elif kind == "not mapped" and not net.is_mapped:
        net.engines[0].sender._shared = None
    receiving = net.engines[1].recv(0)
    net.engines[0].send(value, 1)
    net.settle()
    assert (np.concatenate(receiving.result() if kind == "many" else [receiving.result()])).sum()
    assert wire.DATA in net.kinds(0, 1)
    assert net.moved[0].sent == 0


def test_little_that_is_mapped_is_pushed_where_receives_wait(
    make_net: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To wait for nobody saves more than one copy of it."""
    net = build(make_net, "mapped", monkeypatch)
    monkeypatch.setattr(wire, "MOST_PUSHED", MIB)
    for number in range(3):
        receiving, out = receive(net, 100_000)
        sending = net.engines[0].send(ramp(net, 100_000, number), 1)
        net.settle()
        assert sending.done() and receiving.result() is out
        assert (out == ramp(net, 100_000, number)).all()
    first = [wire.RTS, wire.DATA, wire.FIN]
    assert net.kinds(0, 1) == first + [wire.PUSH, wire.DATA, wire.FIN] * 2
    net.engines[0].send(ramp(net, 100_000), 1)  # pushed, and nobody waits: no leave for the next
    net.settle()
    net.engines[0].send(ramp(net, 100_000), 1)
    net.settle()
    for _ in range(2):
        receiving, out = receive(net, 100_000)
        net.settle()
        assert receiving.result() is out and (out == ramp(net, 100_000)).all()
    assert net.kinds(0, 1)[-2:] == [wire.RTS, wire.FIN]
    assert_idle(net)


def test_a_tree_of_arrays_is_read(reading: Any) -> None:
    sizes = [4, 3 * MIB, 100, 2 * MIB + 4]
    value = [ramp(reading, size, size) for size in sizes]
    receiving = reading.engines[1].recv()
    reading.engines[0].send(value, 1)
    reading.settle()
    for got, size in zip(receiving.result(), sizes, strict=True):
        assert (got == ramp(reading, size, size)).all()
    assert wire.DATA not in reading.kinds(0, 1)


@pytest.mark.parametrize("why", ["forbidden", "another process", "amid"])
def test_a_process_that_cannot_be_read(
    reading: Any, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    def fail(pid: int, address: int, into: memoryview) -> None:
        tried.append(into.nbytes)
        if why == "forbidden" or (why == "amid" and len(tried) > 3):
            raise PermissionError("forbidden")
        read(pid, address, into)
        if why == "another process" and into.nbytes == remote.PROOF:
            into[0] ^= 1

    monkeypatch.setattr(remote, "read", fail)
    for number in range(2):
        receiving, out = receive(reading, 5 * MIB)
        sending = reading.engines[0].send(ramp(reading, 5 * MIB, number), 1)
        reading.settle()
        assert receiving.result() is out and (out == ramp(reading, 5 * MIB, number)).all()
        assert sending.done()
    assert len(tried) == {"forbidden": 1, "another process": 1, "amid": 4}[why]
    # Its sender knows, and pushes where it may.
    assert reading.engines[0].sender._shared.where(1, [memoryview(bytes(MIB))]) is None
    assert reading.kinds(0, 1).count(wire.FIN) == 2
    assert_idle(reading)


def test_what_is_withdrawn_while_the_last_of_it_is_read(
    reading: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = ramp(reading, MIB, 1)
    receiving, out = receive(reading, MIB)
    sending = reading.engines[0].send(x, 1)

    def amid(pid: int, address: int, into: memoryview) -> None:
        if into.nbytes > remote.PROOF:
            assert sending.cancel()
            x[:] = -7  # the user's again
        read(pid, address, into)

    monkeypatch.setattr(remote, "read", amid)
    reading.settle()
    assert not receiving.done()
    monkeypatch.setattr(remote, "read", read)
    reading.engines[0].send(ramp(reading, MIB, 5), 1)  # of which the same process is read again
    reading.settle()
    assert receiving.result() is out and (out == ramp(reading, MIB, 5)).all()
    assert reading.kinds(0, 1) == [wire.RTS, wire.WITHDRAW, wire.RTS]
    assert_idle(reading)


@pytest.mark.parametrize("ends", ["cancelled", "lost", "closed"])
def test_what_was_read_is_received_though_its_send_ends(reading: Any, ends: str) -> None:
    x = ramp(reading, MIB, 1)
    receiving, out = receive(reading, MIB)
    sending = reading.engines[0].send(x, 1)
    reading.pipes[0, 1].flow()  # and nobody has told the sender
    if ends == "cancelled":
        assert sending.cancel()
    elif ends == "lost":
        reading.lose(1)
    else:
        reading.engines[0].close(GroupClosedError("closed"))
    x[:] = -7
    reading.settle()
    assert sending.done()
    assert receiving.result() is out and (out == ramp(reading, MIB, 1)).all()


def test_offers_use_the_same_memory_again(reading: Any) -> None:
    for _ in range(3):
        known = len(remote._proofs)
        receives = [receive(reading, MIB)[0] for _ in range(3)]
        for _ in range(3):
            reading.engines[0].send(ramp(reading, MIB), 1)
        reading.settle()
        assert all(receiving.done() for receiving in receives)
    assert len(remote._proofs) == known


def test_one_turn_copies_no_more_than_it_may(net: Any) -> None:
    nbytes = 5 * MIB
    x = ramp(net, nbytes, 1)
    receiving, out = receive(net, nbytes)
    net.engines[0].send(x, 1)
    net.pipes[0, 1].flow()
    for turn in range(1, 3):
        assert (out != -1).sum() == turn * shared.AT_ONCE // 4
        assert not net.pipes[1, 0].queued
        net.loop.turn()
    assert (out == x).all() and receiving.done() is not net.is_mapped
    net.settle()
    assert receiving.done()


def test_without_an_out(net: Any) -> None:
    receiving = net.engines[1].recv()
    net.engines[0].send({"a": ramp(net, 3 * MIB, 2)}, 1)
    net.settle()
    assert (receiving.result()["a"] == ramp(net, 3 * MIB, 2)).all()


def read_for_a_while(net: Any, turns: int, nbytes: int = 7 * MIB) -> tuple[Any, Any, Any, Any]:
    """A message is read so many turns of the loop: its array, its send, its receive, and where
    that puts it."""
    x = ramp(net, nbytes, 1)
    receiving, out = receive(net, nbytes)
    sending = net.engines[0].send(x, 1)
    net.pipes[0, 1].flow()
    for _ in range(turns):
        net.loop.turn()
    return x, sending, receiving, out


@pytest.mark.parametrize("turns", [0, 1, 2])
@pytest.mark.parametrize("second_out", [True, False])
def test_a_receive_cancelled_while_it_reads(net: Any, turns: int, second_out: bool) -> None:
    x, sending, receiving, out = read_for_a_while(net, turns)
    nbytes = x.nbytes
    assert receiving.cancel()
    out[:] = -5
    net.settle()
    assert (out == -5).all()
    other = np.zeros(nbytes // 4, np.int32) if second_out else None
    again = net.engines[1].recv(0, 0, other)
    net.settle()
    assert (again.result() == x).all() and sending.done()
    assert_idle(net)


def test_a_receive_takes_over_while_another_reads(net: Any) -> None:
    nbytes = 5 * MIB
    receiving, out = receive(net, nbytes)
    other, kept = receive(net, nbytes)
    net.engines[0].send(ramp(net, nbytes, 1), 1)
    net.pipes[0, 1].flow()
    receiving.cancel()
    out[:] = -5
    net.settle()
    assert other.done() and (kept == ramp(net, nbytes, 1)).all() and (out == -5).all()


@pytest.mark.parametrize("turns", [0, 1, 2])
def test_a_send_cancelled_while_it_is_read(net: Any, turns: int) -> None:
    x, sending, receiving, out = read_for_a_while(net, turns)
    nbytes = x.nbytes
    assert sending.cancel()
    x[:] = -7  # the user's again, and read by the other side all the same
    net.settle()
    assert not receiving.done()
    net.engines[0].send(np.full(nbytes // 4, 9, np.int32), 1)
    net.settle()
    assert receiving.result() is out and (out == 9).all()
    assert_idle(net)


@pytest.mark.parametrize("turns", [0, 2])
def test_a_sender_lost_while_it_is_read(net: Any, turns: int) -> None:
    receiving, out = receive(net, 7 * MIB)
    net.engines[0].send(ramp(net, 7 * MIB, 1), 1)
    net.pipes[0, 1].flow()
    for _ in range(turns):
        net.loop.turn()
    net.lose(0)
    out[:] = -5
    net.settle()
    with pytest.raises(PeerLostError, match="rank 0 is lost"):
        receiving.result()
    assert (out == -5).all()


def test_an_out_that_does_not_fit(net: Any) -> None:
    receiving, out = receive(net, 80)
    net.engines[0].send(ramp(net, MIB), 1)
    net.settle()
    with pytest.raises(MismatchError):
        receiving.result()
    assert (out == -1).all()
    net.engines[1].recv(0)
    net.settle()
    assert_idle(net)


def test_what_one_sends_to_oneself_takes_the_ordinary_way(net: Any) -> None:
    sending = net.engines[0].send(ramp(net, 5 * MIB), 0)
    receiving = net.engines[0].recv(0)
    net.settle()
    assert sending.done() and (receiving.result() == ramp(net, 5 * MIB)).all()
    assert net.moved[0].sent == 0


# -- with a second thread -------------------------------------------------------------------------


class Helper:
    """Does all steps itself, in an order of its own; where there is `no_core` for a second thread,
    those that the first one may do. `runs`: how many in each call."""

    def __init__(self) -> None:
        self.runs: list[int] = []
        self.no_core = False

    def run(self, step: Any, steps: int, mine: int) -> int:
        self.runs.append(min(steps, mine) if self.no_core else steps)
        for number in reversed(range(self.runs[-1])):
            step(number)
        return self.runs[-1]


@pytest.fixture
def mapped(make_net: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Ranks that have their arrays in memory that both map."""
    return build(make_net, "mapped", monkeypatch)


@pytest.fixture
def helper(mapped: Any) -> Helper:
    made = Helper()
    for engine in mapped.engines:
        engine.receiver._shared._helper = made
    return made


def test_two_threads_read_twice_as_much_in_a_turn(mapped: Any, helper: Helper) -> None:
    nbytes = 3 * shared.AT_ONCE + 5 * 4
    x, sending, receiving, out = read_for_a_while(mapped, 0, nbytes)
    assert (out != -1).sum() == 2 * shared.AT_ONCE // 4
    assert not receiving.done()
    mapped.settle()
    assert sending.done() and receiving.result() is out and (out == x).all()
    whole = 2 * shared.AT_ONCE // shared.STEP
    assert helper.runs == [whole, whole // 2 + 1]


def test_where_the_second_thread_comes_late_a_turn_reads_no_more(
    mapped: Any, helper: Helper
) -> None:
    helper.no_core = True
    nbytes = 2 * shared.AT_ONCE + 4
    x, sending, receiving, out = read_for_a_while(mapped, 0, nbytes)
    assert (out != -1).sum() == shared.AT_ONCE // 4
    mapped.settle()
    assert sending.done() and receiving.result() is out and (out == x).all()
    assert helper.runs == [shared.AT_ONCE // shared.STEP] * 2


def test_what_is_soon_read_is_read_by_one(
    mapped: Any, helper: Helper, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, receiving, _ = read_for_a_while(mapped, 0, shared.WORTH_HELP - 4)
    mapped.settle()
    assert receiving.done()
    # Where others compute there is no core for it, and to wait for it takes a time slice of theirs.
    monkeypatch.setattr(polling, "others_compute", lambda: True)
    _, _, receiving, _ = read_for_a_while(mapped, 1, 2 * shared.AT_ONCE)
    mapped.settle()
    assert receiving.done()
    assert not helper.runs


# -- with a sender whose loop turns ---------------------------------------------------------------


class Sleeper:
    """The link to a rank that gives a sign at the `n`-th look after a knock; 0: at none."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.looks = 0

    def knock(self) -> None:
        self.looks = 0

    def answers(self) -> bool:
        self.looks += 1
        return self.looks == self.n


def with_partner(net: Any, looks: int) -> None:
    net.engines[1].receiver._shared._partner = lambda rank: Sleeper(looks)


def go_on(net: Any, times: int) -> None:
    """The pull gets there, and some of the rest comes back."""
    for _ in range(times):
        net.pipes[1, 0].flow()
        net.pipes[0, 1].leave(400_000)
        net.pipes[0, 1].arrive(300_000)


@pytest.mark.parametrize("buffers", [1, 3])
@pytest.mark.parametrize("looks", [1, 2, 9])
def test_a_sender_that_gives_a_sign_sends_the_rest(reading: Any, looks: int, buffers: int) -> None:
    with_partner(reading, looks)
    x = np.arange(1, 6 * MIB // 4 + 1, dtype=np.int32)
    value: Any = x if buffers == 1 else np.split(x, buffers)
    receiving = reading.engines[1].recv(0)
    sending = reading.engines[0].send(value, 1)
    reading.settle()
    got = receiving.result()
    assert ((got if buffers == 1 else np.concatenate(got)) == x).all()
    assert sending.done()
    # In each turn it knocks anew, and there are eight steps in one.
    read = looks * shared.STEP
    if looks > 8:
        assert wire.DATA not in reading.kinds(0, 1)
        assert reading.moved[0].sent == reading.moved[1].received == x.nbytes
    else:
        assert reading.kinds(0, 1)[-1] == wire.FIN
        assert reading.moved[0].sent == reading.moved[1].received == read
    reading.engines[0].send(value, 1)  # it is asked for a sign again
    again = reading.engines[1].recv(0)
    reading.settle()
    assert again.done()
    assert_idle(reading)


@pytest.mark.parametrize("others", [True, False])
def test_what_is_soon_read_or_beside_others_is_read_to_its_end(
    reading: Any, others: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(polling, "others_compute", lambda: others)
    with_partner(reading, 1)
    nbytes = 6 * MIB if others else shared.WORTH_A_WORD + shared.STEP - 4
    receiving, out = receive(reading, nbytes)
    reading.engines[0].send(ramp(reading, nbytes, 1), 1)
    reading.settle()
    assert receiving.result() is out and (out == ramp(reading, nbytes, 1)).all()
    assert reading.kinds(0, 1) == [wire.RTS]


@pytest.mark.parametrize("times", [0, 1, 2, 3, 5])
def test_a_receive_cancelled_while_the_rest_comes(reading: Any, times: int) -> None:
    with_partner(reading, 1)
    x, sending, receiving, out = read_for_a_while(reading, 0)
    go_on(reading, times)
    assert receiving.cancel()
    out[:] = -5
    again, other = receive(reading, x.nbytes)
    reading.settle()
    assert (out == -5).all() and again.result() is other and (other == x).all()
    assert sending.done()
    assert_idle(reading)


@pytest.mark.parametrize("times", [0, 1, 2, 3, 5])
def test_a_send_cancelled_while_the_rest_goes(reading: Any, times: int) -> None:
    with_partner(reading, 1)
    x, sending, receiving, out = read_for_a_while(reading, 0)
    go_on(reading, times)
    assert sending.cancel()
    x[:] = -7
    reading.settle()
    assert not receiving.done()
    reading.engines[0].send(np.full(x.size, 9, np.int32), 1)
    reading.settle()
    assert receiving.result() is out and (out == 9).all()
    assert_idle(reading)


def test_a_step_that_cannot_be_read(reading: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    left = 20
    with_partner(reading, 0)

    def fail(pid: int, address: int, into: memoryview) -> None:
        nonlocal left
        left -= 1
        if not left:
            raise PermissionError("forbidden")
        read(pid, address, into)

    monkeypatch.setattr(remote, "read", fail)
    x, sending, receiving, out = read_for_a_while(reading, 0)
    reading.settle()
    assert not left and wire.DATA in reading.kinds(0, 1)
    assert sending.done() and receiving.result() is out and (out == x).all()


# -- frames that nobody sends ---------------------------------------------------------------------


def test_a_place_that_is_not_shared(net: Any) -> None:
    with pytest.raises(ProtocolError, match="names shared memory that it does not share"):
        net.engines[1].frame(0, (wire.RTS, 0, False, 0, 5, 100, 1 << 40), 5)


PROOF = bytes(remote.PROOF)


@pytest.mark.parametrize("where", [
    0, -1, 1 << 64, 1.5, True, "x", [], [1, PROOF], [1, PROOF, 1], [1, PROOF[1:], 1, 100],
    [1, "x", 1, 100], [1, PROOF, 1, 99], [1, PROOF, 0, 100], [0, PROOF, 1, 100],
    [1, PROOF, 1, 100, 1], [1, PROOF, 1, 101, 1, -1], [1, PROOF, 1.5, 100],
    [1, PROOF, *[1, 1] * 100],
])  # fmt: skip
def test_what_says_nowhere(net: Any, where: Any) -> None:
    with pytest.raises(ProtocolError, match="malformed"):
        net.engines[1].frame(0, (wire.RTS, 0, False, 0, 5, 100, where), 5)


def test_a_place_of_nothing(net: Any) -> None:
    with pytest.raises(ProtocolError, match="malformed"):
        net.engines[1].frame(0, (wire.RTS, 0, False, 0, 5, 0, 1), 5)


def test_nobody_has_read_what_lies_elsewhere(net: Any) -> None:
    net.engines[0].sender._shared = None
    net.engines[0].send(np.zeros(MIB, np.uint8), 1)
    with pytest.raises(ProtocolError, match="pulled part 4 of message 65536, which was not due"):
        net.engines[0].frame(1, (wire.PULL, wire.FIRST_SID, wire.READ), 0)


@pytest.mark.parametrize("fields", [
    (wire.PULL, 0, wire.REST), (wire.PULL, 0, wire.REST, 0), (wire.PULL, 0, wire.BODY, 5),
    (wire.PULL, 0, wire.REST, 5, 5), (wire.PULL, 0, wire.REST, -1), (wire.PULL, 0),
])  # fmt: skip
def test_pulls_that_nobody_sends(reading: Any, fields: tuple[int, ...]) -> None:
    reading.engines[0].send(ramp(reading, MIB), 1)
    with pytest.raises(ProtocolError, match="malformed"):
        reading.engines[0].frame(1, fields, 0)


@pytest.mark.parametrize("start", [MIB, MIB + 1])
def test_there_is_no_rest_behind_the_end(reading: Any, start: int) -> None:
    reading.engines[0].send(ramp(reading, MIB), 1)
    with pytest.raises(ProtocolError, match="pulled part 6 of message 65536, which was not due"):
        reading.engines[0].frame(1, (wire.PULL, wire.FIRST_SID, wire.REST, start), 0)
