"""An event loop for tests of deadlines: real sockets and threads, and time that waits for them.

Where a test has a deadline of 0.2 seconds pass, a machine that is slow, or busy, may not be done by
then with what is to come first. Here time stands still while anything is to be done, and goes on
when nothing is: so a deadline passes when all that can happen before it has happened.
"""

from __future__ import annotations

import asyncio
import functools
import selectors
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

IDLE = 0.1
"""Seconds: nothing is to be done where nothing has come for so long. What a process sends to itself
is there at once, however long it has to wait for a processor: its own system brings it."""


class IdleTime(asyncio.SelectorEventLoop):
    """Such a loop, for programs that are all in its thread. What threads do for it is waited for as
    well; what other processes do is not."""

    is_virtual = True
    """So the library renews leases by timers of the loop, and polls for nothing by the clock."""

    def __init__(self) -> None:
        self._now = 0.0
        self._in_threads = 0  # calls that threads carry out
        super().__init__(_Idle(self))

    def time(self) -> float:
        return self._now

    def idle(self, seconds: float) -> None:
        """Nothing has come for so long."""
        if not self._in_threads:
            self._now += seconds

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:
        self._in_threads += 1
        call = super().run_in_executor(executor, func, *args)
        call.add_done_callback(self._called)
        return call

    def _called(self, _: object) -> None:
        self._in_threads -= 1


class _Idle(selectors.DefaultSelector):
    """Sees when the loop has nothing to do."""

    def __init__(self, loop: IdleTime) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> Any:
        found = super().select(None if timeout is None else min(timeout, IDLE))
        if timeout and not found:
            self._loop.idle(timeout)
        return found


on_idle_time = pytest.mark.parametrize("run", ["idle time"], indirect=True)
"""For tests whose fixture `run` is to run them on such a loop."""


def idle_time(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """`test`, a coroutine function, on such a loop."""

    @functools.wraps(test)
    def on_loop(*args: Any, **kwargs: Any) -> None:
        with asyncio.Runner(loop_factory=IdleTime) as runner:
            runner.run(test(*args, **kwargs))

    return on_loop
