"""The queues of a byte-stream link: order, gathering, partial writes, discarding."""

from __future__ import annotations

import random
from functools import partial

from aiodist.transports.base import Done
from aiodist.transports.outbox import GATHER, MOST_BUFFERS, Outbox, Outgoing


def frame(
    name: str, payload: bytes = b"", *, done: Done | None = None, token: object = None
) -> Outgoing:
    views = [memoryview(payload)] if payload else []
    return Outgoing(f"<{name}>".encode(), views, len(payload), done, token)


def take(outbox: Outbox, count: int) -> bytes:
    """Take `count` bytes at most, like the socket that would send them."""
    data = b"".join(outbox.gather())[:count]
    for sent in outbox.advance(len(data)):
        if sent.done is not None:
            sent.done()
    return data


def drain(outbox: Outbox, count: int = 1 << 30) -> bytes:
    data = b""
    while outbox.backlog:
        data += take(outbox, count)
    return data


def test_urgent_frames_come_first_and_in_order() -> None:
    outbox = Outbox()
    outbox.push(frame("a"), urgent=False)
    outbox.push(frame("b"), urgent=False)
    outbox.push(frame("1"), urgent=True)
    outbox.push(frame("2"), urgent=True)
    assert drain(outbox) == b"<1><2><a><b>"
    assert outbox.gather() == []


def test_urgent_frames_wait_for_the_frame_under_way() -> None:
    outbox = Outbox()
    outbox.push(frame("a", b"payload"), urgent=False)
    outbox.push(frame("b"), urgent=False)
    assert take(outbox, 1) == b"<"
    outbox.push(frame("1"), urgent=True)
    assert drain(outbox, 2) == b"a>payload<1><b>"


def test_a_frame_begun_elsewhere_goes_on_first() -> None:
    outbox = Outbox()
    begun = frame("a", b"payload")
    begun.trim(5)
    outbox.push_partial(begun)
    outbox.push(frame("1"), urgent=True)
    assert outbox.backlog == 5 + 3
    assert drain(outbox) == b"yload<1>"


def test_done_is_called_when_the_last_byte_is_out() -> None:
    outbox = Outbox()
    calls: list[str] = []
    outbox.push(frame("a", b"xy", done=lambda: calls.append("a")), urgent=False)
    outbox.push(frame("b", b"z", done=lambda: calls.append("b")), urgent=False)
    take(outbox, 4)
    assert calls == []
    assert outbox.sent_bytes == 0
    take(outbox, 1)
    assert calls == ["a"]
    assert outbox.sent_bytes == 2
    take(outbox, 100)
    assert calls == ["a", "b"]
    assert outbox.sent_bytes == 3


def test_any_chunking_gives_the_same_bytes() -> None:
    for seed in range(100):
        rng = random.Random(seed)
        outbox = Outbox()
        expected = b""
        for n in range(rng.randrange(1, 8)):
            parts = [rng.randbytes(rng.randrange(4)) for _ in range(rng.randrange(6))]
            head = b"[%d]" % n
            views = [memoryview(part) for part in parts]
            outbox.push(Outgoing(head, views, sum(map(len, parts)), None, None), urgent=False)
            expected += head + b"".join(parts)
        assert outbox.backlog == len(expected)
        data = b""
        while outbox.backlog:
            data += take(outbox, rng.randrange(1, 6))
            assert outbox.backlog == len(expected) - len(data)
        assert data == expected, f"seed {seed}"


def test_a_typed_view_may_be_cut_anywhere() -> None:
    words = memoryview(bytearray(range(16))).cast("I")
    outbox = Outbox()
    outbox.push(Outgoing(b"", [words], 16, None, None), urgent=False)
    assert drain(outbox, 3) == bytes(range(16))


def test_gather_is_bounded() -> None:
    outbox = Outbox()
    block = bytes(GATHER // 2)
    for _ in range(10):
        outbox.push(frame("a", block), urgent=False)
    assert GATHER <= sum(map(len, outbox.gather())) < GATHER + len(block) + 10
    outbox.clear()
    assert outbox.backlog == 0

    tiny = memoryview(b"xx")
    outbox.push(Outgoing(b"<", [tiny] * 3000, 6000, None, None), urgent=False)
    assert len(outbox.gather()) == MOST_BUFFERS
    assert drain(outbox) == b"<" + b"xx" * 3000


def test_discarding_queued_frames() -> None:
    outbox = Outbox()
    calls: list[str] = []
    for n, token in enumerate(["t", "u", "t", None]):
        done = partial(calls.append, str(n))
        outbox.push(frame(str(n), b"xy", token=token, done=done), urgent=n == 2)
    outbox.discard("t")
    assert outbox.backlog == 2 * 5
    outbox.discard(None)
    assert drain(outbox) == b"<1>xy<3>xy"
    assert calls == ["1", "3"]


def test_discarding_the_frame_under_way_sends_it_as_it_is() -> None:
    for sent in range(1, 9):
        outbox = Outbox()
        calls: list[int] = []
        whole = b"<a>" + b"payload"
        payload = bytearray(b"payload")
        outbox.push(frame("a", payload, token=5, done=partial(calls.append, 1)), urgent=False)
        outbox.push(frame("b"), urgent=False)
        data = take(outbox, sent)
        before = outbox.backlog
        outbox.discard(5)
        payload[:] = b"changed"
        assert outbox.backlog == before
        data += drain(outbox, 3)
        assert data == whole + b"<b>"
        assert not calls


def test_discarding_a_frame_that_comes_again_sends_it_as_it_is() -> None:
    """The peer may have a part of the first one, over an earlier connection, and of no other."""
    calls: list[int] = []
    payload = bytearray(b"payload")
    broken = Outbox()
    broken.push(frame("a", payload, token=5, done=partial(calls.append, 1)), urgent=False)
    broken.push(frame("b", token=5), urgent=False)
    take(broken, 4)
    outbox = Outbox()
    outbox.adopt(broken, [frame("0", payload, token=5)], object())
    outbox.discard(5)
    payload[:] = b"changed"
    assert outbox.backlog == 10
    assert drain(outbox) == b"<0>payload"
    assert not calls
