"""Conformance of links: limits, errors, and every way to end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NoReturn

from aiodist.errors import ProtocolError
from aiodist.testing.links import LARGE, LinkPair, LinkTests, RecordingReceiver, scenario


def failing(error: BaseException) -> Callable[..., NoReturn]:
    """Make a callback that raises `error`."""

    def fail(*_: object) -> NoReturn:
        raise error

    return fail


class EndTests(LinkTests):
    """Part of `LinkConformance`."""

    # ---- limits and errors ----

    @scenario
    async def test_frames_at_the_limits_pass(self, ends: LinkPair) -> None:
        ends.b.max_header, ends.b.max_payload = 10, 20
        ends.a.send(b"h" * 10, [memoryview(b"p" * 20)])
        await ends.until(lambda: len(ends.at_b.frames) == 1)
        assert ends.at_b.frames == [(b"h" * 10, b"p" * 20)]

    @scenario
    async def test_a_header_over_the_limit_closes(self, ends: LinkPair) -> None:
        ends.b.max_header = 10
        ends.a.send(b"h" * 11)
        await self._broken(ends, ProtocolError)

    @scenario
    async def test_a_payload_over_the_limit_closes(self, ends: LinkPair) -> None:
        ends.b.max_payload = 20
        ends.a.send(b"h", [memoryview(b"p" * 21)])
        await self._broken(ends, ProtocolError)
        assert not ends.at_b.headers

    async def _broken(self, ends: LinkPair, error: type[BaseException]) -> None:
        """Check that both ends close: `b` by `error`, `a` because the connection broke."""
        await ends.over()
        assert isinstance(ends.at_b.ends[0], error), ends.at_b.ends
        assert isinstance(ends.at_a.ends[0], OSError), ends.at_a.ends

    @scenario
    async def test_an_error_in_frame_closes(self, ends: LinkPair) -> None:
        ends.at_b.on_frame = failing(ProtocolError("no such operation"))
        ends.a.send(b"h", [memoryview(b"p")])
        ends.a.send(b"h", [memoryview(b"p")])
        await self._broken(ends, ProtocolError)
        assert len(ends.at_b.headers) == 1
        assert not ends.at_b.frames

    @scenario
    async def test_an_error_in_payload_closes(self, ends: LinkPair) -> None:
        ends.at_b.on_payload = failing(LookupError("a mistake"))
        ends.a.send(b"h", [memoryview(b"p")])
        ends.a.send(b"h", [memoryview(b"p")])
        await self._broken(ends, LookupError)
        assert len(ends.at_b.frames) == 1

    @scenario
    async def test_memory_of_a_wrong_size_closes(self, ends: LinkPair) -> None:
        ends.at_b.on_frame = lambda header, nbytes: memoryview(bytearray(nbytes + 1))
        ends.a.send(b"h", [memoryview(b"p")])
        await self._broken(ends, ValueError)
        assert not ends.at_b.frames

    @scenario
    async def test_an_error_in_done_closes(self, ends: LinkPair) -> None:
        ends.b.send(b"h", [memoryview(b"p")], done=failing(LookupError("a mistake")))
        await self._broken(ends, LookupError)

    @scenario
    async def test_an_error_in_done_of_a_queued_frame_closes(self, ends: LinkPair) -> None:
        ends.b.send(b"h", [memoryview(bytes(LARGE))])
        ends.b.send(b"h", done=failing(LookupError("a mistake")))
        await self._broken(ends, LookupError)

    async def _interrupted(self, ends: LinkPair, begin: Callable[[], None]) -> None:
        """Check that `begin` leads to an interrupt, which is passed on and closes both ends."""
        loop = asyncio.get_running_loop()
        passed_on: list[object] = []
        handler = loop.get_exception_handler()
        loop.set_exception_handler(lambda _, what: passed_on.append(what.get("exception")))
        try:
            begin()
        except asyncio.CancelledError as error:
            passed_on.append(error)
        await self._broken(ends, OSError)
        loop.set_exception_handler(handler)
        assert [type(error) for error in passed_on] == [asyncio.CancelledError]

    @scenario
    async def test_an_interrupt_in_frame_closes(self, ends: LinkPair) -> None:
        ends.at_b.on_frame = failing(asyncio.CancelledError())
        await self._interrupted(ends, lambda: ends.a.send(b"h", [memoryview(b"p")]))
        assert len(ends.at_b.headers) == 1

    @scenario
    async def test_an_interrupt_in_payload_closes(self, ends: LinkPair) -> None:
        ends.at_b.on_payload = failing(asyncio.CancelledError())
        await self._interrupted(ends, lambda: ends.a.send(b"h", [memoryview(b"p")]))
        assert len(ends.at_b.frames) == 1

    @scenario
    async def test_an_interrupt_in_done_closes(self, ends: LinkPair) -> None:
        done = failing(asyncio.CancelledError())
        await self._interrupted(ends, lambda: ends.b.send(b"h", done=done))

    @scenario
    async def test_an_interrupt_in_done_of_a_queued_frame_closes(self, ends: LinkPair) -> None:
        ends.b.send(b"h", [memoryview(bytes(LARGE))])
        done = failing(asyncio.CancelledError())
        await self._interrupted(ends, lambda: ends.b.send(b"h", done=done))

    # ---- the end ----

    @scenario
    async def test_finish_ends_in_order(self, ends: LinkPair) -> None:
        block = memoryview(bytes(LARGE))
        ends.a.send(b"large", [block])
        ends.a.send(b"last", [memoryview(b"!")])
        # The end is a frame like others: behind all that was sent, and with nothing behind it,
        # urgent or not. Otherwise a peer could not tell a goodbye from a broken connection.
        finishing = asyncio.ensure_future(ends.a.finish(60.0))
        await asyncio.sleep(0)
        ends.a.send(b"too late", urgent=True)
        await finishing
        assert ends.at_a.ends == [None]
        await ends.until(lambda: bool(ends.at_b.ends))
        assert ends.at_b.ends == [None]
        assert ends.at_b.headers == [b"large", b"last"]
        assert ends.a.sent_bytes == ends.b.received_bytes == LARGE + 1
        assert ends.a.is_closed
        assert ends.b.is_closed
        await ends.a.finish(60.0)  # and again

    @scenario
    async def test_both_ends_finish_at_once(self, ends: LinkPair) -> None:
        block = memoryview(bytes(LARGE))
        for link in (ends.a, ends.b):
            link.send(b"large", [block])
            link.send(b"last", [memoryview(b"!")])
        await asyncio.gather(ends.a.finish(60.0), ends.b.finish(60.0), ends.a.finish(60.0))
        for recorder in (ends.at_a, ends.at_b):
            assert recorder.ends == [None]
            assert recorder.headers == [b"large", b"last"]

    @scenario
    async def test_a_cancelled_finish_closes(self, ends: LinkPair) -> None:
        ends.a.send(b"large", [memoryview(bytes(LARGE))])
        finishing = asyncio.ensure_future(ends.a.finish(60.0))
        await asyncio.sleep(0)
        finishing.cancel()
        await asyncio.wait([finishing])
        assert finishing.cancelled()
        assert ends.a.is_closed
        await ends.until(lambda: bool(ends.at_b.ends))

    @scenario
    async def test_close_is_a_broken_connection_to_the_peer(self, ends: LinkPair) -> None:
        lost: list[object] = []
        ends.a.send(b"large", [memoryview(bytes(LARGE))], done=ends.done(lost, 1))
        ends.a.close()
        assert ends.a.is_closed
        assert ends.a.backlog == 0
        assert not ends.at_a.ends, "closed() was called inside close()"
        ends.a.close(RuntimeError("ignored"))
        await ends.over()
        assert ends.at_a.ends == [None]
        assert isinstance(ends.at_b.ends[0], OSError)
        assert not ends.at_b.frames
        assert not lost

    @scenario
    async def test_close_with_an_error_reports_it(self, ends: LinkPair) -> None:
        error = RuntimeError("enough")
        ends.a.close(error)
        ends.a.poll()
        assert ends.at_a.ends == [error]
        await ends.until(lambda: bool(ends.at_b.ends))

    @scenario
    async def test_frames_sent_before_the_end_are_received(self, ends: LinkPair) -> None:
        for n in range(100):
            ends.b.send(b"%d" % n, [memoryview(b"x" * n)])
        await ends.until(lambda: len(ends.at_a.frames) == 100)
        await ends.b.finish(60.0)
        ends.a.send(b"to nobody")
        await ends.until(lambda: bool(ends.at_a.ends))
        assert len(ends.at_a.frames) == 100

    @scenario
    async def test_closing_inside_frame(self, ends: LinkPair) -> None:
        def frame(header: bytes, nbytes: int) -> memoryview:
            ends.b.close()
            return memoryview(bytearray(nbytes))

        ends.at_b.on_frame = frame
        ends.a.send(b"1", [memoryview(b"x")])
        ends.a.send(b"2", [memoryview(b"x")])
        await ends.over()
        assert ends.at_b.headers == [b"1"]
        assert not ends.at_b.frames
        assert ends.at_b.ends == [None]

    @scenario
    async def test_closing_inside_payload(self, ends: LinkPair) -> None:
        ends.at_b.on_payload = ends.b.close
        ends.a.send(b"1", [memoryview(b"x")])
        ends.a.send(b"2", [memoryview(b"x")])
        await ends.over()
        assert ends.at_b.frames == [(b"1", b"x")]
        assert ends.at_b.headers == [b"1"]
        assert ends.at_b.ends == [None]

    @scenario
    async def test_closing_inside_done(self, ends: LinkPair) -> None:
        calls: list[object] = []

        def done() -> None:
            calls.append(1)
            ends.a.close()
            ends.a.send(b"2")

        ends.a.send(b"1", [memoryview(b"x")], done=done)
        await ends.over()
        assert calls == [1]
        assert ends.at_a.ends == [None]

    @scenario
    async def test_a_closed_link_does_nothing(self, ends: LinkPair) -> None:
        calls: list[object] = []
        ends.a.close()
        await ends.over()
        for link in (ends.a, ends.b):
            link.send(b"h", [memoryview(b"x")], done=ends.done(calls, 1), urgent=True)
            assert not link.poll()
            link.discard("t")
            link.close(RuntimeError("late"))
            await link.finish(60.0)
            assert link.backlog == 0
            assert link.is_closed
        assert not calls

    @scenario
    async def test_a_new_receiver_takes_over(self, ends: LinkPair) -> None:
        other = RecordingReceiver(ends.news)

        def replace() -> None:
            ends.b.receiver = other

        ends.at_b.on_payload = replace
        for n in range(3):
            ends.a.send(b"%d" % n, [memoryview(b"x")])
        await ends.until(lambda: len(other.frames) == 2)
        assert ends.at_b.headers == [b"0"]
        assert other.headers == [b"1", b"2"]
        ends.b.receiver = ends.at_b

    @scenario
    async def test_names(self, ends: LinkPair) -> None:
        assert ends.a.kind == ends.b.kind == self.transport().kind
        assert ends.a.peer_name
        assert ends.b.peer_name

    def test_dialling_where_nobody_listens(self) -> None:
        async def main() -> None:
            transport = self.transport()
            listener = await transport.listen(lambda link: None, host="127.0.0.1")
            listener.close()
            listener.close()
            try:
                await transport.dial(listener.address, RecordingReceiver(asyncio.Event()))
            except OSError:
                return
            raise AssertionError(f"{listener.address} is closed, but dial() reached it")

        self.run(main())
