"""Conformance of links: frames, their order, their memory."""

from __future__ import annotations

import asyncio
import itertools
import random
from array import array
from collections.abc import Callable
from functools import partial

from aiodist.testing.links import LARGE, LinkPair, LinkTests, scenario
from aiodist.transports.base import Link
from aiodist.transports.framed import FramedLink
from aiodist.wire.frames import MAX_HEADER, MAX_PAYLOAD, prefix


class FrameTests(LinkTests):
    """Part of `LinkConformance`."""

    # ---- frames ----

    @scenario
    async def test_frames_arrive_whole_and_in_order_both_ways(self, ends: LinkPair) -> None:
        sizes = [0, 1, 2, 3, 7, 255, 4095, 4096, 4097, 16384, 65537, MAX_PAYLOAD - 1, MAX_PAYLOAD]
        noise = random.Random(1).randbytes(MAX_PAYLOAD)
        sent = [(f"frame {n}".encode(), noise[:size]) for n, size in enumerate(sizes * 2)]
        for header, payload in sent:
            ends.a.send(header, [memoryview(payload)])
            ends.b.send(header + b" back", [memoryview(payload)])
        await ends.until(lambda: len(ends.at_a.frames) == len(ends.at_b.frames) == len(sent))
        assert ends.at_b.frames == sent
        assert ends.at_a.frames == [(header + b" back", payload) for header, payload in sent]

    @scenario
    async def test_headers_of_all_lengths(self, ends: LinkPair) -> None:
        noise = random.Random(2).randbytes(MAX_HEADER)
        sent = [
            (noise[:size], noise[-extra:] if extra else b"")
            for size in (1, 2, 255, 4096, 16383, 16384, 16385, 40000, MAX_HEADER, 3)
            for extra in (0, 5, 5000)
        ]
        for header, payload in sent:
            ends.a.send(header, [memoryview(payload)])
        await ends.until(lambda: len(ends.at_b.frames) == len(sent))
        assert ends.at_b.frames == sent

    @scenario
    async def test_a_payload_of_many_views(self, ends: LinkPair) -> None:
        noise = random.Random(3).randbytes(6000)
        views = [memoryview(noise)[at : at + at % 11] for at in range(0, 6000, 3)]
        whole = b"".join(views)
        typed = memoryview(array("d", noise))
        for _ in range(3):
            ends.a.send(b"many", views)
        ends.a.send(b"typed", [typed, memoryview(b"end")])
        ends.a.send(b"none")
        await ends.until(lambda: len(ends.at_b.frames) == 5)
        assert ends.at_b.frames == [
            *[(b"many", whole)] * 3,
            (b"typed", noise + b"end"),
            (b"none", b""),
        ]

    @scenario
    async def test_a_frame_that_is_looked_for_comes_once(self, ends: LinkPair) -> None:
        a, b, at_b = ends.a, ends.b, ends.at_b
        if not (isinstance(a, FramedLink) and isinstance(b, FramedLink)):
            return
        b.send(b"first")
        a.send(b"first")
        await ends.until(lambda: bool(ends.at_a.frames and at_b.frames))
        sent = [b"payload %d" % n for n in range(9)]
        came: list[bytes] = []
        head, into = prefix(b"next", 9), memoryview(bytearray(9))
        for number, payload in enumerate(sent):
            if number % 2:
                a.send_copy(head, memoryview(payload))
            else:
                assert a.post(head, memoryview(payload), 9)
            at_b.frames.clear()
            if b.look_for(head, into):
                came.append(bytes(into))
            else:  # the link gives the frame to its receiver
                await ends.until(lambda: bool(at_b.frames or at_b.ends))
                came += [payload for _, payload in at_b.frames]
        assert came == sent
        assert b.received_bytes == 9 * 9

    @scenario
    async def test_copies_come_though_there_is_no_room(self, ends: LinkPair) -> None:
        a, at_b = ends.a, ends.at_b
        if not isinstance(a, FramedLink):
            return
        block = bytearray(MAX_PAYLOAD)
        count = 2 * LARGE // MAX_PAYLOAD
        for n in range(count):
            block[:] = bytes([n % 251]) * MAX_PAYLOAD
            a.send_copy(prefix(b"%d" % n, MAX_PAYLOAD), memoryview(block))
        await ends.until(lambda: len(at_b.frames) == count)
        for n, (header, payload) in enumerate(at_b.frames):
            assert header == b"%d" % n
            assert payload == bytes([n % 251]) * MAX_PAYLOAD

    @scenario
    async def test_an_empty_header_is_refused(self, ends: LinkPair) -> None:
        try:
            ends.a.send(b"", [memoryview(b"x")])
        except ValueError:
            return
        raise AssertionError("send() took an empty header")

    @scenario
    async def test_flooding_both_ways_does_not_deadlock(self, ends: LinkPair) -> None:
        block = random.Random(4).randbytes(MAX_PAYLOAD)
        count = 2 * LARGE // MAX_PAYLOAD
        finished: list[object] = []
        for n in range(count):
            for link in (ends.a, ends.b):
                link.send(b"%d" % n, [memoryview(block)], done=ends.done(finished, n))
        await ends.until(lambda: len(ends.at_a.frames) == len(ends.at_b.frames) == count)
        for recorder in (ends.at_a, ends.at_b):
            assert [header for header, _ in recorder.frames] == [b"%d" % n for n in range(count)]
            assert all(payload == block for _, payload in recorder.frames)
        assert sorted(finished, key=str) == sorted([*range(count), *range(count)], key=str)

    @scenario
    async def test_random_frames(self, ends: LinkPair) -> None:
        noise = memoryview(random.Random(5).randbytes(1 << 19))
        for seed in range(12):
            rng = random.Random(seed)
            expected: dict[tuple[Link, bool], list[tuple[bytes, bytes]]] = {}
            finished: list[object] = []
            before = len(ends.at_a.frames), len(ends.at_b.frames)
            count = 60
            for n in range(count):
                link = rng.choice((ends.a, ends.b))
                urgent = rng.random() < 0.3
                top = rng.choice((0, 10, 5000, 50_000, 200_000))
                cuts = sorted(rng.randrange(top + 1) for _ in range(rng.randrange(2, 6)))
                views = [noise[a:b] for a, b in itertools.pairwise(cuts)]
                header = b"%d %d" % (urgent, n) + noise[: rng.randrange(40)]
                expected.setdefault((link, urgent), []).append((header, b"".join(views)))
                link.send(header, views, urgent=urgent, done=ends.done(finished, n))
                for _ in range(rng.randrange(3)):
                    rng.choice((ends.a, ends.b)).poll()
                if rng.random() < 0.1:
                    await asyncio.sleep(0)
            await ends.until(partial(_have_come, ends, sum(before) + count))
            for link, recorder, old in (
                (ends.b, ends.at_a, before[0]),
                (ends.a, ends.at_b, before[1]),
            ):
                for urgent in (False, True):
                    came = [f for f in recorder.frames[old:] if f[0][:1] == b"%d" % urgent]
                    assert came == expected.get((link, urgent), []), f"seed {seed}"
            assert sorted(map(str, finished)) == sorted(map(str, range(count))), f"seed {seed}"
        assert ends.a.backlog == ends.b.backlog == 0

    # ---- urgency, done, backlog ----

    @scenario
    async def test_urgent_frames_overtake_queued_ones(self, ends: LinkPair) -> None:
        block = memoryview(bytes(MAX_PAYLOAD))
        gone: list[object] = []
        count = 2 * LARGE // MAX_PAYLOAD
        for n in range(count):
            ends.a.send(b"%d" % n, [block], done=ends.done(gone, n))
        left = len(gone)
        assert left < count - 1, "the link took everything at once"
        ends.a.send(b"first", [memoryview(b"!")], urgent=True)
        ends.a.send(b"second", urgent=True)
        await ends.until(lambda: len(ends.at_b.frames) == count + 2)
        headers = ends.at_b.headers
        at = headers.index(b"first")
        assert at <= left + 1, "an urgent frame waited for more than the frame under way"
        assert headers[at + 1] == b"second"
        assert headers[:at] + headers[at + 2 :] == [b"%d" % n for n in range(count)]

    @scenario
    async def test_done_is_called_once_and_the_buffer_is_free_then(self, ends: LinkPair) -> None:
        count = LARGE // MAX_PAYLOAD
        rng = random.Random(6)
        sent = [rng.randbytes(MAX_PAYLOAD - n) for n in range(count)]
        buffers = [bytearray(payload) for payload in sent]
        calls: list[int] = []

        def overwrite(n: int) -> Callable[[], None]:
            def done() -> None:
                calls.append(n)
                buffers[n][:] = b"\xff" * len(buffers[n])
                ends.news.set()

            return done

        for n, buffer in enumerate(buffers):
            ends.a.send(b"%d" % n, [memoryview(buffer)], done=overwrite(n))
        small = bytearray(b"abc")
        ends.a.send(b"small", [memoryview(small)], done=lambda: small.__setitem__(0, 0))
        await ends.until(lambda: len(ends.at_b.frames) == count + 1)
        await ends.until(lambda: len(calls) == count)
        assert calls == list(range(count))
        assert [payload for _, payload in ends.at_b.frames] == [*sent, b"abc"]

    @scenario
    async def test_done_may_send_again_and_again(self, ends: LinkPair) -> None:
        # `done` may be called inside `send`, and may send again. A link that just calls it would
        # recurse each time.
        count = 3000  # deeper than Python's stack

        def send(n: int) -> None:
            if n < count:
                ends.a.send(b"%d" % n, [memoryview(b"x" * (n % 7))], done=lambda: send(n + 1))

        send(0)
        await ends.until(lambda: len(ends.at_b.frames) == count)
        assert ends.at_b.headers == [b"%d" % n for n in range(count)]

    @scenario
    async def test_receivers_may_send(self, ends: LinkPair) -> None:
        count = 1500
        ends.at_b.on_payload = lambda: ends.b.send(ends.at_b.headers[-1], [memoryview(b"pong")])

        def again() -> None:
            if len(ends.at_a.frames) < count:
                ends.a.send(b"ping", [memoryview(b"ping")])

        ends.at_a.on_payload = again
        again()
        await ends.until(lambda: len(ends.at_a.frames) == count)
        assert len(ends.at_b.frames) == count

    @scenario
    async def test_backlog_and_counts(self, ends: LinkPair) -> None:
        assert ends.a.backlog == ends.a.sent_bytes == ends.a.received_bytes == 0
        block = memoryview(bytes(LARGE))
        ends.at_b.on_frame = lambda header, nbytes: None
        ends.a.send(b"large", [block])
        held = ends.a.backlog
        assert 0 < held <= LARGE + 100
        assert ends.a.sent_bytes == 0
        ends.a.send(b"more", [block[:1000]])
        assert 1000 < ends.a.backlog - held < 1100
        finished: list[object] = []
        ends.a.send(b"last", [block[:1]], done=ends.done(finished, 1))
        ends.at_b.on_payload = None
        await ends.until(lambda: bool(finished) and len(ends.at_b.headers) == 3)
        assert ends.a.backlog == 0
        assert ends.a.sent_bytes == ends.b.received_bytes == LARGE + 1001
        assert ends.a.received_bytes == ends.b.sent_bytes == 0

    # ---- poll ----

    @scenario
    async def test_poll_alone_moves_frames(self, ends: LinkPair) -> None:
        assert not ends.a.poll()
        assert not ends.b.poll()
        block = memoryview(bytes(MAX_PAYLOAD))
        for n in range(32):
            ends.a.send(b"%d" % n, [block])
        while len(ends.at_b.frames) < 32:
            ends.a.poll()
            ends.b.poll()
        assert not ends.b.poll()

    @scenario
    async def test_poll_moves_a_bounded_amount(self, ends: LinkPair) -> None:
        block = memoryview(bytes(8000))
        for n in range(LARGE // 8000):
            ends.a.send(b"%d" % n, [block])

        ends.at_b.on_payload = ends.a.poll  # there is always more
        assert ends.b.poll()
        assert 0 < ends.b.received_bytes <= 2 << 20, "one poll moved more than 2 MiB"

    @scenario
    async def test_poll_takes_a_bounded_number_of_frames(self, ends: LinkPair) -> None:
        # Small frames cost time instead of bytes. A bound on bytes alone would hold up the loop for
        # as long as a peer can send.
        for n in range(20_000):
            ends.a.send(b"%20d" % n)

        ends.at_b.on_payload = ends.a.poll  # there is always more
        assert ends.b.poll()
        assert 0 < len(ends.at_b.frames) <= 8192, "the loop waits for more than 8192 frames"
        await ends.until(lambda: len(ends.at_b.frames) == 20_000)

    @scenario
    async def test_poll_inside_a_callback_does_nothing(self, ends: LinkPair) -> None:
        results: list[bool] = []

        def poll() -> None:
            results.append(ends.b.poll())

        def frame(header: bytes, nbytes: int) -> memoryview:
            poll()
            return memoryview(bytearray(nbytes))

        ends.at_b.on_frame = frame
        ends.at_b.on_payload = poll
        for n in range(12):
            ends.a.send(b"%d" % n, [memoryview(b"x" * (n % 3 * 20_000))])
        await ends.until(lambda: len(ends.at_b.frames) == 12)
        assert results == [False] * 24
        assert ends.at_b.headers == [b"%d" % n for n in range(12)]

    @scenario
    async def test_send_calls_no_receiver(self, ends: LinkPair) -> None:
        ends.a.send(b"waiting")
        for _ in range(3):
            ends.b.send(b"x", [memoryview(b"y")])
            ends.a.send(b"x", [memoryview(b"y")])
        assert not ends.at_a.headers
        assert not ends.at_b.headers

    # ---- discard, landings, skip ----

    @scenario
    async def test_discarded_frames_do_not_travel(self, ends: LinkPair) -> None:
        block = memoryview(bytearray(b"\x01") * MAX_PAYLOAD)
        gone: list[object] = []
        while ends.a.backlog < 2 * MAX_PAYLOAD:  # fill what the operating system takes
            ends.a.send(b"fill", [block], done=ends.done(gone, "fill"))
        filled = ends.a.backlog
        ends.a.send(b"no 1", [block], token="t", done=ends.done(gone, "no"))
        ends.a.send(b"no 2", [block], token="t", done=ends.done(gone, "no"), urgent=True)
        ends.a.send(b"yes", [block], token="u", done=ends.done(gone, "yes"))
        before = ends.a.backlog
        ends.a.discard("t")
        assert before - ends.a.backlog > 2 * MAX_PAYLOAD
        assert ends.a.backlog > filled
        ends.a.discard(None)
        ends.a.discard("unknown")
        await ends.until(lambda: b"yes" in ends.at_b.headers and "yes" in gone)
        ends.a.discard("u")
        ends.a.send(b"end")
        await ends.until(lambda: ends.at_b.headers[-1] == b"end")
        assert set(ends.at_b.headers) == {b"fill", b"yes", b"end"}
        assert "no" not in gone
        assert ends.a.backlog == 0

    @scenario
    async def test_discarding_a_frame_that_is_partly_sent(self, ends: LinkPair) -> None:
        buffer = bytearray(b"\x01") * LARGE
        gone: list[object] = []
        ends.a.send(
            b"half",
            [memoryview(buffer)[:9], memoryview(buffer)[9:]],
            token=7,
            done=ends.done(gone, "half"),
        )
        if self.in_pieces:
            assert 0 < ends.a.backlog < LARGE
        ends.a.discard(7)
        # The frame has to be completed, because its header has promised so many bytes. But its
        # memory belongs to the user again, so the link copies the rest before `discard` returns.
        buffer[:] = b"\x02" * LARGE  # it is not read any more
        ends.a.send(b"after", [memoryview(b"ok")], done=ends.done(gone, "after"))
        await ends.until(lambda: ends.at_b.frames[-1:] == [(b"after", b"ok")] and bool(gone))
        assert gone == ["after"]
        if self.in_pieces:
            (header, payload), _ = ends.at_b.frames
            assert header == b"half"
            assert len(payload) == LARGE
            assert payload == b"\x01" * LARGE, "what was discarded was read after that"
        else:
            assert len(ends.at_b.frames) == 1

    async def _receive_a_part(self, ends: LinkPair, into: bytearray) -> tuple[bytes, int]:
        """Send a large payload, and receive some of it `into`. Returns the payload, and how much
        has come."""
        payload = random.Random(8).randbytes(len(into)).replace(b"\0", b"\1")
        ends.at_b.on_frame = lambda header, nbytes: memoryview(into)
        ends.a.send(b"large", [memoryview(payload)])
        while not ends.at_b.headers:
            ends.b.poll()
        ends.at_b.on_frame = None
        got = len(into.rstrip(b"\0"))
        assert into[:got] == payload[:got]
        if self.in_pieces:
            assert 0 < got < LARGE
        return payload, got

    @scenario
    async def test_a_landing_that_moves_to_other_memory(self, ends: LinkPair) -> None:
        old, new = bytearray(LARGE), bytearray(LARGE)
        payload, got = await self._receive_a_part(ends, old)
        landing = ends.at_b.landing
        assert landing is not None
        landing.memory = memoryview(new)
        old[:] = bytes(LARGE)
        ends.a.send(b"next", [memoryview(b"n")])
        await ends.until(lambda: len(ends.at_b.frames) == 2)
        assert new[got:] == payload[got:]
        assert not any(new[:got]), "what had come was written again"
        assert not any(old), "the old memory was written to after that"
        assert ends.at_b.frames[1] == (b"next", b"n")

    @scenario
    async def test_a_landing_that_nobody_wants_any_more(self, ends: LinkPair) -> None:
        old = bytearray(LARGE)
        _, got = await self._receive_a_part(ends, old)
        landing = ends.at_b.landing
        assert landing is not None
        landing.memory = None
        old[:] = bytes(LARGE)
        ends.a.send(b"next", [memoryview(b"n")])
        await ends.until(lambda: (b"next", b"n") in ends.at_b.frames)
        assert not any(old), "the old memory was written to after that"
        assert len(ends.at_b.frames) == (2 if got == LARGE else 1), "it was told all the same"
        assert ends.b.received_bytes == LARGE + 1

    @scenario
    async def test_skipped_payloads(self, ends: LinkPair) -> None:
        noise = random.Random(9).randbytes(MAX_PAYLOAD)
        ends.at_b.on_frame = lambda header, nbytes: (
            None if header == b"skip" else memoryview(bytearray(nbytes))
        )
        expected = []
        for size in (0, 1, 100, 20_000, MAX_PAYLOAD):
            ends.a.send(b"skip", [memoryview(noise)[:size]])
            ends.a.send(b"keep", [memoryview(noise)[:size]])
            expected.append((b"keep", noise[:size]))
        await ends.until(lambda: len(ends.at_b.frames) == len(expected))
        assert ends.at_b.frames == expected


def _have_come(ends: LinkPair, count: int) -> bool:
    return len(ends.at_a.frames) + len(ends.at_b.frames) == count
