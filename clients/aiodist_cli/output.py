"""The output of ranks: cut into lines, prefixed by rank, written without blocking the loop."""

from __future__ import annotations

import asyncio
import os
import queue
import threading
from collections.abc import Iterable
from typing import TypeVar

from aiodist.files import write_all

T = TypeVar("T")

MAX_LINE = 64 * 1024
"""The most bytes of a line: longer lines are cut."""

_COLOURS = (36, 33, 32, 35, 34, 31)
"""SGR codes of the prefixes on a terminal, rank by rank."""


class LineSplitter:
    """Cuts a stream of bytes into lines, for any chunking; lines come without their end.

    A newline, a carriage return, or both together end a line, so that progress bars show while they
    move.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._after_return = False

    def feed(self, chunk: bytes) -> list[bytes]:
        if self._after_return and chunk:
            chunk = chunk.removeprefix(b"\n")
            self._after_return = False
        self._after_return = chunk.endswith(b"\r") or (self._after_return and not chunk)
        text = (self._rest + chunk).replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *lines, self._rest = text.split(b"\n")
        while len(self._rest) > MAX_LINE:
            lines.append(self._rest[:MAX_LINE])
            self._rest = self._rest[MAX_LINE:]
        return lines

    def flush(self) -> list[bytes]:
        """The last line, if the stream did not end with a line's end."""
        rest, self._rest = self._rest, b""
        return [rest] if rest else []


def prefix(rank: int, *, colour: bool) -> bytes:
    text = f"[{rank}]"
    if colour:
        text = f"\x1b[{_COLOURS[rank % len(_COLOURS)]}m{text}\x1b[0m"
    return f"{text} ".encode()


def joined(lines: Iterable[bytes], before: bytes) -> bytes:
    return b"".join(before + line + b"\n" for line in lines)


def wants_colour(fd: int) -> bool:
    """Whether `fd` is a terminal, and NO_COLOR is not set (https://no-color.org)."""
    return os.isatty(fd) and not os.environ.get("NO_COLOR")


class Writer:
    """Writes to file descriptors from a thread of its own, in the order of the calls.

    So a slow reader, such as a pager, holds up the rank whose output waits, but not the event loop
    with the coordinator. Bytes that cannot be written are dropped.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[int, bytes, asyncio.Future[None]] | None]
        self._queue = queue.SimpleQueue()
        self._loop = asyncio.get_running_loop()
        self.broken: asyncio.Future[OSError] = self._loop.create_future()
        """Its result is the error of the first write that failed."""
        # A daemon on raw descriptors, because a stuck write must not keep the process alive.
        threading.Thread(target=self._work, name="output", daemon=True).start()

    async def write(self, fd: int, data: bytes) -> None:
        """Write all of `data`; returns when that is done."""
        if data:
            done = self._loop.create_future()
            self._queue.put((fd, data, done))
            await done

    def close(self) -> None:
        """End the thread. Do not call `write` after this."""
        self._queue.put(None)

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            fd, data, done = job
            try:
                write_all(fd, data)
            except OSError as error:
                self._loop.call_soon_threadsafe(_settle, self.broken, error)
            self._loop.call_soon_threadsafe(_settle, done, None)


def _settle(future: asyncio.Future[T], result: T) -> None:
    if not future.done():
        future.set_result(result)
