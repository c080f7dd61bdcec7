"""Tests over two connected links in one event loop, with receivers that record what came."""

from __future__ import annotations

import asyncio
import functools
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, ClassVar, TypeVar

from aiodist.transports.base import Landing, Link, Transport
from aiodist.wire.frames import MAX_HEADER

PATIENCE = 30.0
"""Seconds after which something that should have happened counts as hanging."""

LARGE = 16 * 1024 * 1024
"""More bytes than any operating system keeps in the buffers of a connection."""

_Self = TypeVar("_Self", bound="LinkTests")


class Taken:
    """The landing of one frame at a `RecordingReceiver`. Its memory may be changed."""

    def __init__(self, recorder: RecordingReceiver, header: bytes, memory: memoryview) -> None:
        self.header = header
        self.memory: memoryview | None = memory
        self._recorder = recorder

    def landed(self) -> None:
        """Tell the recorder that the frame is complete."""
        self._recorder.complete(self)


class RecordingReceiver:
    """A receiver that keeps all that a link brings.

    `frames` has (header, payload) of complete frames, in order. `ends` has the errors given to
    `closed`, and `mistakes` what a link must not do. `landing` is that of the last frame. The
    hooks, if set, are called inside the callbacks. `on_frame(header, nbytes)` returns memory for
    the payload, instead of new memory, or None to skip it.
    """

    def __init__(self, news: asyncio.Event) -> None:
        self.frames: list[tuple[bytes, bytes]] = []
        self.headers: list[bytes] = []
        self.ends: list[BaseException | None] = []
        self.on_frame: Callable[[bytes, int], memoryview | None] | None = None
        self.on_payload: Callable[[], object] | None = None
        self._news = news
        self.mistakes: list[str] = []
        self._inside = False  # a callback is running, and no other may be called
        self.landing: Taken | None = None

    def frame(self, link: Link, header: bytes, nbytes: int) -> Landing | None:
        """Note the header, and give memory for the payload."""
        with self._callback():
            self.headers.append(header)
            if self.on_frame is None:
                memory: memoryview | None = memoryview(bytearray(nbytes))
            else:
                memory = self.on_frame(header, nbytes)
            self.landing = None if memory is None else Taken(self, header, memory)
            return self.landing

    def complete(self, taken: Taken) -> None:
        """Note that the frame is complete."""
        with self._callback():
            self.frames.append((taken.header, bytes(taken.memory or b"")))
            if taken is not self.landing:
                self.mistakes.append("a landing was told of a frame that was not the last one")
            if self.on_payload is not None:
                self.on_payload()

    def closed(self, link: Link, error: BaseException | None) -> None:
        """Note the end."""
        with self._callback():
            self.ends.append(error)
            if not link.is_closed:
                self.mistakes.append("closed() was called on a link that is open")

    # Checks of every callback. A link that calls a receiver inside of its own callback would have
    # the engine enter itself half-way. One that calls after `closed` would make it touch what it
    # has given back. Neither shows in what arrives, so it is noted, and checked at the end
    # (`connected`).
    @contextmanager
    def _callback(self) -> Iterator[None]:
        if self._inside:
            self.mistakes.append("a receiver was called from inside its own callback")
        if self.ends:
            self.mistakes.append("a receiver was called after closed()")
        self._inside = True
        self._news.set()
        try:
            yield
        finally:
            self._inside = False


class LinkPair:
    """Both ends of a connection in this loop: link `a` was dialled, link `b` accepted."""

    def __init__(self) -> None:
        self.news = asyncio.Event()
        self.at_a = RecordingReceiver(self.news)
        self.at_b = RecordingReceiver(self.news)
        self.a: Link
        self.b: Link

    async def until(self, condition: Callable[[], bool]) -> None:
        """Let the loop run until `condition()` holds.

        It is checked whenever a receiver or a `done` of `self.done` was called.
        """
        async with asyncio.timeout(PATIENCE):
            while not condition():
                self.news.clear()
                await self.news.wait()

    async def over(self) -> None:
        """Let the loop run until both receivers were told of the end."""
        await self.until(lambda: bool(self.at_a.ends and self.at_b.ends))

    def done(self, calls: list[object], value: object) -> Callable[[], None]:
        """Make a `done` that appends `value` to `calls`."""

        def call() -> None:
            calls.append(value)
            self.news.set()

        return call


@asynccontextmanager
async def connected(transport: Transport) -> AsyncIterator[LinkPair]:
    """Connect two links of `transport` by loopback, and close them at the end.

    Then check that the receivers were called correctly.
    """
    ends = LinkPair()

    def accept(link: Link) -> None:
        link.receiver = ends.at_b
        ends.b = link
        ends.news.set()

    listener = await transport.listen(accept, host="127.0.0.1")
    try:
        ends.a = await transport.dial(listener.address, ends.at_a)
        await ends.until(lambda: hasattr(ends, "b"))
    finally:
        listener.close()
    for link in (ends.a, ends.b):
        link.max_header = MAX_HEADER
        link.max_payload = 1 << 30
    try:
        yield ends
    finally:
        ends.a.close()
        ends.b.close()
        await ends.over()
    assert not ends.at_a.mistakes + ends.at_b.mistakes, ends.at_a.mistakes + ends.at_b.mistakes


def scenario(
    test: Callable[[_Self, LinkPair], Coroutine[Any, Any, None]],
) -> Callable[[_Self], None]:
    """Make a plain test method of a coroutine over two connected links."""

    @functools.wraps(test)
    def run(self: _Self) -> None:
        async def main() -> None:
            async with connected(self.transport()) as ends:
                await test(self, ends)

        self.run(main())

    del run.__dict__["__wrapped__"]  # because pytest would take its parameters for fixtures
    return run


class LinkTests(ABC):
    """Base of tests over two connected links of `transport`."""

    in_pieces: ClassVar[bool] = True
    """Whether large payloads travel in pieces, so that one may be under way."""

    @abstractmethod
    def transport(self) -> Transport:
        """The transport to be tested."""

    def new_loop(self) -> asyncio.AbstractEventLoop:
        """The event loop of a test."""
        return asyncio.new_event_loop()

    def run(self, main: Awaitable[None]) -> None:
        """Run `main` in a new loop. Errors that only reach the loop's handler count as well."""
        lost: list[dict[str, Any]] = []

        async def watched() -> None:
            asyncio.get_running_loop().set_exception_handler(lambda _, what: lost.append(what))
            async with asyncio.timeout(PATIENCE):
                await main

        # Each test has a loop of its own, so that it finds nothing of another test.
        with asyncio.Runner(loop_factory=self.new_loop) as runner:
            runner.run(watched())
        assert not lost, f"unhandled errors: {lost}"
