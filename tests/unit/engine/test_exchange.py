"""The frames of an operation: where they land, and what becomes of that when it is given up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from aiodist.buffers.vector import Vector
from aiodist.engine.exchange import MAX_EARLY, Exchange
from aiodist.engine.phase import Phase, prepared
from aiodist.errors import ProtocolError
from aiodist.phases.memories import Regions
from aiodist.schedules import reduce_scatter_all_gather
from aiodist.transports.base import deliver


class Receiving:
    """An operation of rank 0 of two, that waits for rank 1."""

    def __init__(self, x: Any) -> None:
        self.work = SimpleNamespace(op="all_reduce")
        self.heard: set[int] = set()
        self.waiting_for = 1
        self.advanced = 0
        host: Any = SimpleNamespace(party=SimpleNamespace(why_lost=lambda peer: None))
        self.exchange: Exchange[Any] = Exchange(host, self, 2)
        made = prepared(reduce_scatter_all_gather.all_reduce, 0, 2, len(x), 1)
        vector = Vector.of(x)
        self.phase = Phase(made, Regions(vector, vector, made.plan.scratch))
        self.spans = made.receives[1][0].spans
        self.nbytes = sum(span.length for span in self.spans) * x.itemsize

    def advance(self) -> None:
        self.advanced += 1

    def begin(self) -> None:
        self.exchange.begin(self.phase)
        self.exchange._allowed[1] = 1  # what its plan grants


def test_a_frame_lands_in_the_memory_of_its_phase() -> None:
    op = Receiving(np.zeros(8))
    op.begin()
    landing = op.exchange.message(1, 0, op.nbytes)
    data = np.arange(op.nbytes // 8, dtype=float)
    deliver(landing, [data.view(np.uint8).data], op.nbytes)
    assert op.advanced == 1
    assert op.exchange.waiting(1) == 1
    (view,) = op.phase.memory.outgoing(op.spans)
    assert bytes(view) == data.tobytes()
    assert landing.memory is None


def test_a_frame_that_is_half_here_is_written_nowhere_once_it_is_given_up() -> None:
    op = Receiving(np.zeros(8))
    op.begin()
    landing = op.exchange.message(1, 0, op.nbytes)
    assert landing.memory is not None
    landing.memory[: op.nbytes // 2] = b"\1" * (op.nbytes // 2)
    op.exchange.close()
    assert landing.memory is None
    assert not op.advanced


def test_a_frame_for_a_later_phase_waits_for_it() -> None:
    op = Receiving(np.zeros(8))
    data = memoryview(bytes(range(op.nbytes)))
    deliver(op.exchange.message(1, 0, op.nbytes), [data], op.nbytes)
    assert not op.advanced
    op.begin()
    assert op.exchange.deliver_early() is None
    (view,) = op.phase.memory.outgoing(op.spans)
    assert bytes(view) == bytes(data)


def test_a_frame_of_a_wrong_size_or_slot_is_refused() -> None:
    op = Receiving(np.zeros(8))
    op.begin()
    with pytest.raises(ProtocolError, match="expected 0"):
        op.exchange.message(1, 1, op.nbytes)
    with pytest.raises(ProtocolError, match=f"has {op.nbytes - 1} bytes"):
        op.exchange.message(1, 0, op.nbytes - 1)


def test_memory_that_was_sent_is_settled_with_each_peer_once_all_has_left() -> None:
    """A link that breaks later must not read it: it is the user's again."""
    op = Receiving(np.zeros(8))
    settled: list[tuple[list[int], object]] = []
    op.exchange._party = cast(
        Any, SimpleNamespace(settle_all=lambda to, token: settled.append(([*to], token)))
    )
    op.exchange._to.add(1)
    op.exchange._unsent[1] = 1
    assert not op.exchange.is_drained
    op.exchange.left(1)
    assert settled == []
    assert op.exchange.is_drained and op.exchange.is_drained
    assert settled == [([1], op)]
    op.exchange._to.add(1)
    op.exchange.close()
    assert op.exchange.is_drained
    assert settled == [([1], op)]


def far(op: Receiving) -> list[str]:
    """Have `op` send to a rank that is far: what it sends."""
    sent: list[str] = []
    to = SimpleNamespace(
        link=None, send=lambda *_, **how: sent.append("grant" if how.get("urgent") else "frame")
    )
    host: Any = op.exchange._host
    host.party = op.exchange._party = cast(
        Any, SimpleNamespace(peers={1: to}, id=b"", why_lost=lambda peer: None)
    )
    host.pushes = 100
    host.may_push = lambda op, peer, nbytes: nbytes <= 100
    cast(Any, op).tag, cast(Any, op).seq, cast(Any, op).call = None, 0, b""
    cast(Any, op).sent = lambda peer: None
    return sent


def test_a_frame_that_is_not_granted_yet_is_kept_until_it_is() -> None:
    op = Receiving(np.zeros(8))
    far(op)
    op.exchange.begin(op.phase)
    data = bytes(range(op.nbytes))
    (view,) = op.phase.memory.outgoing(op.spans)
    view[:] = bytes(op.nbytes)  # it may have anything, even the data of an earlier test
    deliver(op.exchange.message(1, 0, op.nbytes), [memoryview(data)], op.nbytes)
    assert bytes(view) != data and not op.advanced
    op.exchange.grant(1, 1)
    assert bytes(view) == data
    assert op.exchange.take(1, op.spans)


def test_a_frame_that_is_granted_while_it_comes_goes_to_its_place() -> None:
    op = Receiving(np.zeros(8))
    far(op)
    op.exchange.begin(op.phase)
    data = bytes(range(op.nbytes))
    landing = op.exchange.message(1, 0, op.nbytes)
    op.exchange.grant(1, 1)
    deliver(landing, [memoryview(data)], op.nbytes)
    (view,) = op.phase.memory.outgoing(op.spans)
    assert bytes(view) == data and op.advanced == 1


def test_what_comes_before_its_time_is_limited() -> None:
    op = Receiving(np.zeros(8))
    piece = 1 << 20
    for slot in range(MAX_EARLY // piece):
        deliver(op.exchange.message(1, slot, piece), [memoryview(bytes(piece))], piece)
    with pytest.raises(ProtocolError, match="too early"):
        op.exchange.message(1, MAX_EARLY // piece, piece)


def test_frames_for_who_is_far_go_before_they_are_granted() -> None:
    op = Receiving(np.zeros(8))
    sent = far(op)
    op.exchange.begin(op.phase)
    assert op.exchange.may_send(1)
    assert op.exchange.send(1, [memoryview(bytes(100))])
    assert op.exchange.awaits_grant(1)
    assert not op.exchange.send(1, [memoryview(bytes(101))])  # no more than there is leave for
    assert op.exchange.granted(1, 2) and not op.exchange.awaits_grant(1)
    op.heard.add(1)
    assert op.exchange.send(1, [memoryview(bytes(101))])
    assert sent == ["frame", "frame"]


def test_no_more_frames_than_the_plan_says_go_before_they_are_granted() -> None:
    """The plan may write again what it has sent."""
    op = Receiving(np.zeros(8))
    far(op)
    made = op.phase.prepared
    limited = made._replace(plan=made.plan._replace(pushes=1))
    for granted in (0, 2):  # a phase, and one after it
        op.exchange.begin(op.phase._replace(prepared=limited))
        assert op.exchange.may_send(1)
        assert op.exchange.send(1, [memoryview(bytes(100))])
        assert not op.exchange.may_send(1)
        assert op.exchange.granted(1, granted + 2) and op.exchange.may_send(1)
        op.heard.add(1)
        assert op.exchange.send(1, [memoryview(bytes(100))])


def test_near_ranks_wait_for_their_grants() -> None:
    op = Receiving(np.zeros(8))
    far(op)
    cast(Any, op.exchange._host).pushes = 0
    op.exchange.begin(op.phase)
    assert not op.exchange.may_send(1)
