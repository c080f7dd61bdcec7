"""The engine: one thread per process, and the event loop in it, on which all groups live.

Operations need no hand-over to it. A lock says who may touch the loop and what lives on it. The
engine's thread holds the lock whenever it runs callbacks, and lets go of it while it waits for
events. Meanwhile any other thread can take it and start an operation right there: small
collectives are done within the call then, as they are for callers in asyncio. Whoever finds the
lock taken leaves the call in a queue (flat combining: Hendler et al., SPAA 2010); who has the lock
next makes the calls in the queue first, so that those of one thread keep their order.
"""

from __future__ import annotations

import asyncio
import logging
import os
import selectors
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context
from multiprocessing import util as processes
from typing import Any, TypeVar

from aiodist import GroupClosedError

T = TypeVar("T")

EXIT_PATIENCE = 10.0
"""Seconds for which a process that exits waits for its groups to be left in good order."""

log = logging.getLogger("aiodist.torch")


class _Selector(selectors.DefaultSelector):
    """Lets go of `lock` while it waits."""

    def __init__(self, lock: threading.Lock) -> None:
        super().__init__()
        self._lock = lock

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self._lock.release()
        try:
            events = super().select(timeout)
        finally:
            self._lock.acquire()
        # Somebody may have changed what is watched between the event and the lock.
        known = self.get_map()
        return [(key, mask) for key, mask in events if known.get(key.fileobj) is key]


class _Loop(asyncio.SelectorEventLoop):
    """An event loop that notes whether it was given something to do: who does that from another
    thread has to wake it."""

    def __init__(self, lock: threading.Lock) -> None:
        self.stirred = False
        super().__init__(_Selector(lock))
        self.set_debug(False)  # debug mode takes other threads for a mistake

    def call_soon(
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        self.stirred = True
        return super().call_soon(callback, *args, context=context)

    def call_at(
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        self.stirred = True
        return super().call_at(when, callback, *args, context=context)


class Engine:
    """The thread, its loop, and the way in for other threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queue: deque[Callable[[], None]] = deque()
        self._loop = _Loop(self._lock)
        self._inherited = False
        self._endings: list[Callable[[], Coroutine[Any, Any, None]]] = []
        self._thread = threading.Thread(target=self._run, name="aiodist engine", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        with self._lock:
            self._loop.run_forever()

    def submit(self, call: Callable[[], None], later: Callable[[], None] | None = None) -> None:
        """Make a call on the loop: here and now, or soon, after those submitted before.

        The call must not wait and must not raise. If it cannot be made now, `later` is called
        first. Raises GroupClosedError in a forked child.
        """
        if self._inherited:
            raise GroupClosedError(
                "this process was forked from one that uses aiodist, whose groups stay there: "
                "call init_process_group here, after the fork"
            )
        if not self._lock.acquire(blocking=False):
            if later is not None:
                later()
            self._queue.append(call)
            self._loop.call_soon_threadsafe(self._drain)
            return
        loop = self._loop
        outer = asyncio._get_running_loop()
        try:
            asyncio._set_running_loop(loop)
            loop.stirred = False
            if self._queue:
                self._drain()
            call()
            if loop.stirred:
                loop.call_soon_threadsafe(_nothing)
        finally:
            asyncio._set_running_loop(outer)
            self._lock.release()

    def _drain(self) -> None:
        while self._queue:
            self._queue.popleft()()

    def wait_for(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop, and wait for its result."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # no effect unless the wait itself was interrupted
            raise

    # -- the end ----------------------------------------------------------------------------------

    def at_exit(self, ending: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Have `ending` awaited when the process exits, the latest first."""
        self._endings.append(ending)

    def forget(self, ending: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """It is not needed any more."""
        if ending in self._endings:
            self._endings.remove(ending)

    def end(self) -> None:
        """Await all endings; for the exit of the process."""

        async def end() -> None:
            async with asyncio.timeout(EXIT_PATIENCE):
                while self._endings:
                    await self._endings.pop()()

        if self._inherited:
            return
        try:
            self.wait_for(end())
        except TimeoutError:
            log.debug("the groups were not left in good order within %g s", EXIT_PATIENCE)

    def inherit(self) -> None:
        """This process is a fork of the one that has the engine's thread."""
        self._inherited = True


def _nothing() -> None:
    """What wakes the loop needs nothing more."""


_engine: Engine | None = None
_inherited: list[Engine] = []
_making = threading.Lock()


def engine() -> Engine:
    """The engine of this process, started when first needed."""
    global _engine
    with _making:
        if _engine is None:
            _engine = Engine()
            # A child of multiprocessing runs these finalizers, but no functions of atexit.
            processes.Finalize(None, _engine.end, exitpriority=100)
        return _engine


def _after_fork() -> None:
    global _engine, _making
    _making = threading.Lock()
    if _engine is not None:
        _engine.inherit()
        # Kept: closing its loop would take the parent's files out of the epoll set they share.
        _inherited.append(_engine)
        _engine = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
