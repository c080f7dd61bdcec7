"""A phase of a program that waits for a coroutine on this rank."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from aiodist.engine.operation import Pause


class Awaited(Pause):
    """A phase that lasts until a coroutine is done. Closing the phase cancels the coroutine."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, Any]
    ) -> None:
        self._task = loop.create_task(coroutine, name="aiodist phase")
        self._task.add_done_callback(self._done)
        self._closed = False

    def _done(self, task: asyncio.Task[Any]) -> None:
        if not self._closed:
            self.resume()
        elif not task.cancelled():
            task.exception()  # mark it as seen: no one will ask

    def run(self) -> bool:
        return self._task.done()

    def result(self) -> Any:
        """Return the result of the coroutine, or raise its exception."""
        # Some programs cancel all tasks of their loop. An operation fails by Exceptions only.
        if self._task.cancelled():
            raise RuntimeError("the program has cancelled the task of this operation")
        return self._task.result()

    def close(self) -> None:
        self._closed = True
        self._task.cancel()
