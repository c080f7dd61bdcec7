"""What is kept of what was sent: acknowledged, copied, let go, sent again."""

from __future__ import annotations

import pytest

from aiodist.errors import ProtocolError
from aiodist.transports.base import STEADY
from aiodist.transports.outbox import Outbox, Outgoing
from aiodist.transports.retransmission import (
    COPIED,
    JOINED,
    MANY,
    MUCH,
    OWN,
    RetransmissionBuffer,
    own_frame,
    read_own,
)

LARGE = 2 * COPIED


def lend(kept: RetransmissionBuffer, name: bytes, token: object, size: int = LARGE) -> bytearray:
    memory = bytearray(name * (size // len(name)))
    kept.lend(b"<%s>" % name, (memoryview(memory),), len(memory), token)
    return memory


def again(kept: RetransmissionBuffer) -> bytes:
    outbox = Outbox()
    outbox.adopt(Outbox(), kept.again(), OWN)
    return b"".join(outbox.gather())


def test_what_was_acknowledged_is_not_sent_again() -> None:
    kept = RetransmissionBuffer()
    for name in (b"a", b"b", b"c"):
        kept.frames.append(name)
    assert kept.acknowledge(2) == []
    assert (kept.acknowledged, kept.sent) == (2, 3)
    assert again(kept) == b"c"


@pytest.mark.parametrize("count", [0, 4])
def test_an_acknowledgement_that_cannot_be(count: int) -> None:
    kept = RetransmissionBuffer()
    kept.frames += (b"a", b"b", b"c")
    kept.acknowledge(1)
    assert not kept.can_go_on(count)
    with pytest.raises(ProtocolError, match=f"{count} frames have come: expected 1 to 3"):
        kept.acknowledge(count)


def test_memory_is_read_until_it_is_settled() -> None:
    kept = RetransmissionBuffer()
    memory = lend(kept, b"x", "token")
    memory[:1] = b"y"
    assert again(kept)[:4] == b"<x>y"


@pytest.mark.parametrize("underway", [1, LARGE, None])
def test_what_may_be_lost_is_copied(underway: int | None) -> None:
    kept = RetransmissionBuffer()
    memory = lend(kept, b"x", "token")
    kept.settle("token", underway)
    memory[:] = bytes(len(memory))
    assert not kept.has_lent
    assert kept.can_go_on(0)
    assert again(kept) == b"<x>" + b"x" * LARGE


def test_what_the_system_of_the_peer_has_is_let_go() -> None:
    kept = RetransmissionBuffer()
    lend(kept, b"x", "token")
    second = lend(kept, b"y", "token")
    kept.frames.append(b"small")
    kept.settle("token", len(b"small") + 1)  # the end of the second one is on its way
    second[:] = bytes(len(second))
    assert not kept.can_go_on(0)
    assert kept.can_go_on(1)
    kept.acknowledge(1)
    assert again(kept) == b"<y>" + b"y" * LARGE + b"small"


def test_nothing_is_on_its_way() -> None:
    kept = RetransmissionBuffer()
    lend(kept, b"x", "token")
    kept.settle("token", 0)
    assert not kept.can_go_on(0)
    assert kept.can_go_on(1)


def test_a_little_is_copied_whatever_the_system_says() -> None:
    kept = RetransmissionBuffer()
    lend(kept, b"x", "token", COPIED)
    kept.settle("token", 0)
    assert kept.can_go_on(0)


def test_only_the_memory_of_the_token_is_settled() -> None:
    kept = RetransmissionBuffer()
    lend(kept, b"x", "one")
    other = lend(kept, b"y", "two")
    kept.settle("one", None)
    other[:1] = b"z"
    assert b"<y>zy" in again(kept)


def test_what_is_steady_is_kept_as_it_is_and_nobody_is_asked_for_it() -> None:
    kept = RetransmissionBuffer()
    memory = lend(kept, b"x", STEADY, MUCH)
    assert not kept.has_lent and kept.limit
    kept.settle(STEADY, None)
    assert kept.frames[0].views[0].obj is memory
    assert kept.can_go_on(0) and again(kept)[3:] == memory


def test_when_the_peer_is_asked() -> None:
    kept = RetransmissionBuffer()
    assert kept.limit == MANY
    kept.hold(bytes(MUCH - 1))
    assert kept.limit
    kept.hold(bytes(1))
    assert not kept.limit
    kept.asking()
    assert kept.limit == 2 + MANY


def test_who_waits_is_called_once_all_has_come() -> None:
    kept = RetransmissionBuffer()
    kept.frames.append(b"a")
    called: list[str] = []
    kept.wait(1, lambda: called.append("done"))
    assert kept.acknowledge(1) == []
    assert kept.is_awaited
    kept.frames.append(b"b")
    for done in kept.acknowledge(2):
        done()
    assert called == ["done"]
    assert not kept.is_awaited
    kept.wait(1, lambda: called.append("end"))
    for done in kept.end():
        done()
    assert called == ["done", "end"]


def test_frames_that_were_queued() -> None:
    kept = RetransmissionBuffer()
    small, large = bytes(JOINED), bytearray(b"l" * (JOINED + 1))
    kept.finished(Outgoing(b"<s>", (memoryview(small),), len(small), None, "t"))
    kept.finished(Outgoing(b"<l>", (memoryview(large),), len(large), None, "t"))
    kept.finished(Outgoing(own_frame(1), (), 0, None, OWN))
    assert kept.sent == 2
    assert again(kept) == b"<s>" + small + b"<l>" + large


def test_a_frame_that_was_begun_begins_anew() -> None:
    old, new = Outbox(), Outbox()
    frame = Outgoing(b"<a>", (memoryview(b"123"), memoryview(b"456")), 6, None, "t")
    frame.trim(5)
    old.push_partial(frame)
    old.push(Outgoing(b"<bulk>", (), 0, None, None), urgent=False)
    old.push(Outgoing(b"<urgent>", (), 0, None, None), urgent=True)
    old.push(Outgoing(own_frame(1), (), 0, None, OWN), urgent=True)
    new.adopt(old, [Outgoing(b"<again>", (), 0, None, None)], OWN)
    assert b"".join(new.gather()) == b"<again><a>123456<urgent><bulk>"
    assert new.backlog == len(b"<again><a>123456<urgent><bulk>")
    assert old.backlog == 0


def test_frames_of_the_link_itself() -> None:
    frame = own_frame(2, 2**40)
    assert read_own(frame, len(frame) - 9) == (2, 2**40)
