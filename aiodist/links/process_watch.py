"""Watch a peer's process on this host, to see its end at once.

A process that ends closes its connections, and peers on other hosts notice that. But a child that
it forked in C, past Python's hooks, keeps them open. So we also watch a pidfd.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable

from aiodist.transports.base import Link


class ProcessWatch:
    """Calls `ended` from the loop, once, when the process behind `file` (a pidfd) has ended.

    `close` prevents that.
    """

    __slots__ = ("_ended", "_file", "_loop")

    def __init__(
        self, loop: asyncio.AbstractEventLoop, file: io.FileIO, ended: Callable[[], None]
    ) -> None:
        self._loop = loop
        self._file = file
        self._ended = ended
        loop.add_reader(file.fileno(), self._readable)

    @classmethod
    def over(
        cls, link: Link, loop: asyncio.AbstractEventLoop, ended: Callable[[], None]
    ) -> ProcessWatch | None:
        """Watch the process at the other end of `link`; None if that is not possible.

        Call this only when that process has just shown that it lives.
        """
        file = link.open_process()
        return None if file is None else cls(loop, file, ended)

    def _readable(self) -> None:
        self.close()
        self._ended()

    def close(self) -> None:
        """Stop watching. Idempotent."""
        if not self._file.closed:
            if not self._loop.is_closed():
                self._loop.remove_reader(self._file.fileno())
            self._file.close()

    def close_in_child(self) -> None:
        """After a fork, in the child: close its copy without touching the loop."""
        self._file.close()
