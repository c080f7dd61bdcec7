"""The pipes that ranks write to. Not on Windows."""

from __future__ import annotations

import array
import asyncio
import contextlib
import fcntl
import os
import termios
from collections.abc import AsyncIterator, Sequence
from typing import Any

_LINGER = 0.1
"""Seconds between two checks of pipes that stay open after their writer has ended."""


class Pipe:
    """The output of one process.

    `stream`: to read it. `theirs`: the end for the process, to be closed here once the process has
    it.
    """

    def __init__(
        self, stream: asyncio.StreamReader, transport: asyncio.ReadTransport, ours: int, theirs: int
    ) -> None:
        self.stream = stream
        self.theirs = theirs
        self._transport = transport
        self._ours = ours

    @classmethod
    async def open(cls) -> Pipe:
        """Raises OSError."""
        loop = asyncio.get_running_loop()
        ours, theirs = os.pipe()
        file = os.fdopen(ours, "rb", buffering=0)
        try:
            stream = asyncio.StreamReader()
            transport, _ = await loop.connect_read_pipe(
                lambda: asyncio.StreamReaderProtocol(stream), file
            )
        except BaseException:
            try:
                with contextlib.suppress(OSError):  # uvloop has closed the descriptor already
                    file.close()
            finally:
                os.close(theirs)
            raise
        return cls(stream, transport, ours, theirs)

    def close_if_empty(self) -> None:
        """End the stream if all of it has been read."""
        if not self._transport.is_closing():
            there = array.array("i", [0])
            fcntl.ioctl(self._ours, termios.FIONREAD, there)
            if not there[0]:
                self.close()

    def close(self) -> None:
        self._transport.close()


@contextlib.asynccontextmanager
async def outputs() -> AsyncIterator[tuple[Pipe, Pipe]]:
    """Pipes for stdout and stderr of a process that is started meanwhile. Raises OSError."""
    pipes: list[Pipe] = []
    try:
        pipes.append(await Pipe.open())
        pipes.append(await Pipe.open())
        yield pipes[0], pipes[1]
    except BaseException:
        for pipe in pipes:
            pipe.close()
        raise
    finally:
        for pipe in pipes:
            os.close(pipe.theirs)


async def rest(output: asyncio.Future[Any], pipes: Sequence[Pipe]) -> None:
    """Wait until `output` has read all of `pipes`, whose writer has ended.

    All of its output is in the pipes by then. But a process that it started in another session may
    hold the pipes open for ever, so later output is dropped.
    """
    while not output.done():
        await asyncio.wait([output], timeout=_LINGER)
        for pipe in pipes:
            pipe.close_if_empty()
    await output
