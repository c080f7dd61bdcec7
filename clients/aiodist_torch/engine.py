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
from typing import Any, TypeVar, TypeVarTuple

from aiodist import GroupClosedError
from aiodist_torch.completions import Completions

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

EXIT_PATIENCE = 10.0
"""Seconds for which a process that exits waits for its groups to be left in good order."""

LONGEST_VISIT = 0.02
"""Seconds for which one thread may be in the loop; then its own thread goes on."""

log = logging.getLogger("aiodist.torch")


class _Selector(selectors.DefaultSelector):
    """Lets go of `lock` while it waits. `idle`: there was nothing else to do for the loop."""

    def __init__(self, lock: threading.Lock) -> None:
        super().__init__()
        self.idle = False
        self._lock = lock

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.idle = timeout is None or timeout > 0
        self._lock.release()
        try:
            events = super().select(timeout)
        finally:
            self._lock.acquire()
        # Somebody may have changed what is watched between the event and the lock.
        known = self.get_map()
        return [(key, mask) for key, mask in events if known.get(key.fileobj) is key]


class _Loop(asyncio.SelectorEventLoop):
    """An event loop that other threads, too, can be in, one at a time, while it waits for events.

    What is to be called soon by then is called by that thread, before it leaves, so that the loop's
    own need not be woken for it.
    """

    def __init__(self, lock: threading.Lock) -> None:
        self._visited = False
        self._aside: deque[asyncio.Handle] = deque()
        self._timers: list[asyncio.TimerHandle] = []
        self._waiting = _Selector(lock)
        super().__init__(self._waiting)
        self.set_debug(False)  # debug mode takes other threads for a mistake

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        if not self._visited:
            return super().call_soon(callback, *args, context=context)
        handle = asyncio.Handle(callback, args, self, context)
        self._aside.append(handle)
        return handle

    def call_at(
        self,
        when: float,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        timer = super().call_at(when, callback, *args, context=context)
        if self._visited:
            self._timers.append(timer)
        return timer

    def visit(self, call: Callable[[], None], until: Callable[[], bool]) -> None:
        """Make a call from another thread, which holds the lock. What it wants called soon is
        called here, too, until that is done."""
        outer = asyncio._get_running_loop()
        aside = self._aside
        asyncio._set_running_loop(self)
        # Where callbacks wait already, later ones have to come after them.
        self._visited = self._waiting.idle
        try:
            call()
            if aside:
                limit = self.time() + LONGEST_VISIT
                while aside and not until() and self.time() < limit:
                    _run(aside.popleft())
        finally:
            self._visited = False
            asyncio._set_running_loop(outer)
            timers, self._timers = self._timers, []
            if self._waiting.idle and (aside or not all(timer.cancelled() for timer in timers)):
                self.call_soon_threadsafe(_nothing)  # a call to look at its queue and its clock
                self._waiting.idle = False
            while aside:
                self.call_soon(_run, aside.popleft())


def _run(handle: asyncio.Handle) -> None:
    if not handle.cancelled():
        handle._run()


def at_once() -> bool:
    """It is enough."""
    return True


def _nothing() -> None:
    """What wakes the loop needs nothing more."""


class Engine:
    """The thread, its loop, and the way in for other threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queue: deque[Callable[[], None]] = deque()
        self._loop = _Loop(self._lock)
        self.completions = Completions()
        self._inherited = False
        self._endings: list[Callable[[], Coroutine[Any, Any, None]]] = []
        self._thread = threading.Thread(target=self._run, name="aiodist engine", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        with self._lock:
            self._loop.run_forever()

    def submit(
        self,
        call: Callable[[], None],
        *,
        later: Callable[[], None] = _nothing,
        until: Callable[[], bool] = at_once,
    ) -> None:
        """Make a call on the loop: here and now, or soon, after those submitted before.

        The call must not wait and must not raise. Made here, it is gone on with until `until` says
        that this is enough; what is left is the loop's. If it cannot be made now, `later` is called
        first. Raises GroupClosedError in a forked child.
        """
        if self._inherited:
            raise GroupClosedError(
                "this process was forked from one that uses aiodist, whose groups stay there: "
                "call init_process_group here, after the fork"
            )
        if not self._lock.acquire(blocking=False):
            later()
            self._queue.append(call)
            self._loop.call_soon_threadsafe(self._drain)
            return
        try:
            if self._queue:
                self._loop.visit(self._drain, at_once)
            self._loop.visit(call, until)
        finally:
            self._lock.release()

    def _drain(self) -> None:
        while self._queue:
            self._queue.popleft()()

    def wait_for(self, coroutine: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        """Run a coroutine on the loop, and wait for its result; at most `timeout` seconds."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result(timeout)
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
            # The second limit is for an engine that an interrupt has left in disorder.
            self.wait_for(end(), EXIT_PATIENCE + 1)
        except TimeoutError:
            log.debug("the groups were not left in good order within %g s", EXIT_PATIENCE)

    def inherit(self) -> None:
        """This process is a fork of the one that has the engine's thread."""
        self._inherited = True


_here: list[Engine] = []
"""The engine of this process, once there is one."""
_inherited: list[Engine] = []
"""Kept: closing such a loop would take the parent's files out of the epoll set they share."""
_making = threading.RLock()


def engine() -> Engine:
    """The engine of this process, started when first needed."""
    with _making:
        if not _here:
            _here.append(Engine())
            # Unlike atexit's, these functions run in children of multiprocessing, too.
            processes.Finalize(None, _here[0].end, exitpriority=100)
        return _here[0]


def _after_fork() -> None:
    for engine in _here:
        engine.inherit()
    _inherited.extend(_here)
    _here.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_making.acquire, after_in_parent=_making.release, after_in_child=_making.release
    )
    os.register_at_fork(after_in_child=_after_fork)
