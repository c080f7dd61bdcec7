"""Memory that other ranks read and write, for threads."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from aiodist.blocking.calls import BlockingWork, Home
from aiodist.windows.window import Window

P = ParamSpec("P")
R = TypeVar("R")


def _waiting(
    operation: Callable[Concatenate[Window, P], Awaitable[R]],
) -> Callable[Concatenate[BlockingWindow, P], R]:
    """The method of a `BlockingWindow` that calls `operation` and waits for its result."""

    @wraps(operation)
    def method(self: BlockingWindow, /, *args: P.args, **options: P.kwargs) -> R:
        call = partial(operation, self._window, *args, **options)
        return BlockingWork[R](self._home, call).run()

    return method


class BlockingWindow:
    """`Window` for threads: every call waits for its result."""

    def __init__(self, home: Home, window: Window) -> None:
        self._home = home
        self._window = window

    get = _waiting(Window.get)
    put = _waiting(Window.put)
    accumulate = _waiting(Window.accumulate)
    fence = _waiting(Window.fence)
    close = _waiting(Window.close)

    def __enter__(self) -> BlockingWindow:
        return self

    def __exit__(self, *reason: Any) -> None:
        BlockingWork[None](self._home, partial(self._window.__aexit__, *reason)).run()
