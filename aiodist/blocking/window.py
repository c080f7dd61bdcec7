"""Memory that other ranks read and write, for threads."""

from __future__ import annotations

from functools import partial
from typing import Any

from aiodist.blocking.calls import Blocking, BlockingWork, waiting
from aiodist.windows.window import Window


class BlockingWindow(Blocking[Window]):
    """`Window` for threads: every call waits for its result."""

    get = waiting(Window.get)
    put = waiting(Window.put)
    accumulate = waiting(Window.accumulate)
    fence = waiting(Window.fence)
    close = waiting(Window.close)

    def __enter__(self) -> BlockingWindow:
        return self

    def __exit__(self, *reason: Any) -> None:
        if not self._home.is_inherited:
            BlockingWork[None](self._home, partial(self._behind.__aexit__, *reason)).run()
