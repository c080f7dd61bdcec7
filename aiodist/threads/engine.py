"""The engine: one thread per process, and the event loop in it, on which all groups live.

Operations need no hand-over to it. A lock says who may touch the loop and what lives on it; while
the engine's thread waits for events, any other thread can take it and start an operation right
there (see `loop`): small collectives are done within the call then, as they are for callers in
asyncio, and who waits for one does the loop's work meanwhile. Whoever finds the lock taken leaves
the call in a queue (flat combining: Hendler et al., SPAA 2010); who has the lock next makes the
calls in the queue first, so that those of one thread keep their order.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import copy_context
from functools import partial
from multiprocessing import util as processes
from typing import Any, Protocol, TypeVar

from aiodist.errors import GroupClosedError, in_words
from aiodist.threads.loop import Loop, Until, at_once

T = TypeVar("T")

EXIT_PATIENCE = 10.0
"""Seconds for which a process that exits waits for its groups to be left in good order."""

log = logging.getLogger("aiodist.threads")


class Resident(Protocol):
    """A group that lives on the loop."""

    @property
    def closed(self) -> bool:
        """Whether it has ended."""
        ...

    def abort(self, reason: str = ...) -> None:
        """Ends it at once."""
        ...

    async def close(self) -> None:
        """Ends it in good order."""
        ...


def _nothing() -> None:
    """Nothing needs to be done."""


class Engine:
    """The thread, its loop, and the way in for other threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # who holds it may be in the loop
        self._queue: deque[Callable[[], None]] = deque()  # what other threads want done in the loop
        self.loop = Loop(self._lock, self._abort_all)
        """On which all groups live. Touched by nobody but who holds the lock."""
        # Those that are to be aborted, should the engine fail, and closed when the process exits.
        self._groups: weakref.WeakSet[Resident] = weakref.WeakSet()
        self._inherited = False  # this process was forked, and the thread is not here
        # What is to be done before the process ends.
        self._endings: list[Callable[[], Coroutine[Any, Any, None]]] = []
        # Turns the loop while no thread of the program does.
        self._thread = threading.Thread(target=self._run, name="aiodist engine", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        with self._lock:
            self.loop.run_forever()

    def submit(
        self,
        call: Callable[[], None],
        *,
        later: Callable[[], None] = _nothing,
        until: Until = at_once,
    ) -> None:
        """Make a call on the loop: here and now, or soon, after those submitted before.

        The call must not wait and must not raise. Made here, it is gone on with until `until` says
        that this is enough; what is left is the loop's. If it cannot be made now, `later` is called
        first. Raises GroupClosedError in a forked child.
        """
        if self._inherited:
            raise GroupClosedError(
                "this process was forked from one that uses aiodist, whose groups stay there: "
                "make groups of its own here, after the fork"
            )
        # Somebody is in the loop. To wait for the lock could take as long as his callbacks do; to
        # leave the call in the queue takes nothing. `later` comes before that: from the moment the
        # call is in the queue it may be made, and be over, in another thread.
        if not self._lock.acquire(blocking=False):
            later()
            # In the context of this thread, because another one will make it.
            self._queue.append(partial(copy_context().run, call))
            self.loop.call_soon_threadsafe(self._drain)
            return
        if asyncio._get_running_loop() is not None:
            until = at_once  # tasks of two loops do not mix in one thread
        try:
            # Calls of this very thread may be among them, from when it found the lock taken.
            # Collectives are matched by the order of calls, so these have to be made first.
            if self._queue:
                self.loop.visit(self._drain)
            self.loop.visit(call, until)
        finally:
            self._lock.release()

    def _drain(self) -> None:
        while self._queue:
            self._queue.popleft()()

    def drive(self, until: Until, seconds: float) -> None:
        """Do the loop's work until `until`; for at most `seconds`, and not if somebody does. Raises
        KeyboardInterrupt; if that was in the midst of the work, all groups are aborted."""
        if self._inherited or asyncio._get_running_loop() is not None:
            return
        if not self._lock.acquire(blocking=False):
            return
        try:
            if not self.loop.waiting.has_driver:
                self.loop.drive(until, seconds)
        finally:
            self._lock.release()

    def _abort_all(self, error: BaseException) -> None:
        for group in list(self._groups):
            group.abort(f"{in_words(error)} in the midst of an operation")

    def adopt(self, group: Resident) -> None:
        """A group lives on the loop."""
        self._groups.add(group)

    def began(self) -> None:
        """An operation waits for events; to be called on the engine."""
        self.loop.waiting.pending += 1

    def ended(self) -> None:
        """An operation that had `began` waits for no events any more."""
        self.loop.waiting.pending -= 1

    def wait_for(self, coroutine: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        """Run a coroutine on the loop, and wait for its result; at most `timeout` seconds."""

        async def run() -> T:
            self.began()
            try:
                return await coroutine
            finally:
                self.ended()

        future = asyncio.run_coroutine_threadsafe(run(), self.loop)
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
        """Await `ending` no more: it was done before the process exits."""
        if ending in self._endings:
            self._endings.remove(ending)

    def end(self) -> None:
        """Await all endings; for the exit of the process."""

        async def end() -> None:
            async with asyncio.timeout(EXIT_PATIENCE):
                while self._endings:
                    await self._endings.pop()()
                # What the program has not closed itself: to the others, a process that just ends is
                # one that has crashed.
                for group in list(self._groups):
                    if not group.closed:
                        await group.close()

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
# Held over a fork, so that no child begins with a lock that a thread holds which is not there. An
# RLock, for the thread that forks may have it already.


def engine() -> Engine:
    """The engine of this process, started when first needed."""
    with _making:
        if not _here:
            _here.append(Engine())
            # Unlike atexit's, these functions run in children of multiprocessing, too.
            processes.Finalize(None, _here[0].end, exitpriority=100)
        return _here[0]


def engine_of(loop: asyncio.AbstractEventLoop) -> Engine | None:
    """The engine of this process, if `loop` is its loop."""
    return next((engine for engine in _here if engine.loop is loop), None)


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
