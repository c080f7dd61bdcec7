"""The engine: one thread per process with the event loop of all groups.

Handing an operation to another thread would cost more than a small collective. So a lock says which
thread may touch the loop. While the engine's thread waits for events, any thread can take the lock
and start an operation itself (see `loop`). Small collectives are then done within the call, as in
asyncio, and a thread that waits for a result does the loop's work meanwhile.

A thread that finds the lock taken leaves its call in a queue (flat combining: Hendler et al., SPAA
2010). The next holder of the lock makes the queued calls first, so that the calls of each thread
keep their order.
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
"""Seconds that an exiting process waits until it has left its groups in good order."""

log = logging.getLogger("aiodist.threads")


class Resident(Protocol):
    """A group that lives on the loop."""

    @property
    def closed(self) -> bool:
        """Whether the group has ended."""
        ...

    def abort(self, reason: str = ...) -> None:
        """End the group at once."""
        ...

    async def close(self) -> None:
        """End the group in good order."""
        ...


def _nothing() -> None:
    """Do nothing."""


def forked() -> GroupClosedError:
    """Return the error of a call in a forked child for what its parent made."""
    return GroupClosedError(
        "this process was forked from one that uses aiodist, and groups do not survive a fork: "
        "make new groups here, after the fork"
    )


class Engine:
    """The thread, its loop, and the way in for other threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # its holder may be in the loop
        # calls that other threads want made in the loop
        self._queue: deque[Callable[[], None]] = deque()
        self.loop = Loop(self._lock, self._abort_all)
        """The loop of all groups. Only the holder of the lock may touch it."""
        # Aborted if the engine fails, and closed when the process exits.
        self._groups: weakref.WeakSet[Resident] = weakref.WeakSet()
        self.is_inherited = False
        """Whether this process is a fork of the one with the thread."""
        # Awaited before the process ends.
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
        """Make a call on the loop, now or soon, after all calls that were submitted before.

        The call must not wait and must not raise. If it is made now, the loop's work goes on until
        `until` is true, and the loop's own thread does the rest. If it cannot be made now, `later`
        is called first.

        Raises GroupClosedError in a forked child.
        """
        if self.is_inherited:
            raise forked()
        # Another thread is in the loop. We do not wait for the lock, because its callbacks may take
        # long; a call in the queue takes nothing. `later` comes first, because a call in the queue
        # may be made, and be over, in another thread at once.
        if not self._lock.acquire(blocking=False):
            later()
            # In the context of this thread, because another thread will make the call.
            self._queue.append(partial(copy_context().run, call))
            self.loop.call_soon_threadsafe(self._drain)
            return
        if asyncio._get_running_loop() is not None:
            until = at_once  # tasks of two loops do not mix in one thread
        try:
            # The queue may hold calls of this thread, from when it found the lock taken. They come
            # first, because collectives are matched by the order of calls.
            if self._queue:
                self.loop.visit(self._drain)
            self.loop.visit(call, until)
        finally:
            self._lock.release()

    def _drain(self) -> None:
        while self._queue:
            self._queue.popleft()()

    def drive(self, until: Until, seconds: float) -> None:
        """Do the loop's work until `until`, for at most `seconds`, unless another thread does it.

        Raises KeyboardInterrupt. If that came in the middle of a callback, all groups are aborted.
        Raises GroupClosedError in a forked child.
        """
        if self.is_inherited:
            raise forked()
        if asyncio._get_running_loop() is not None:
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
        """Take in a group that lives on the loop."""
        self._groups.add(group)

    def began(self) -> None:
        """Count an operation that waits for events. Call this on the loop."""
        self.loop.waiting.pending += 1

    def ended(self) -> None:
        """Count off an operation that `began`."""
        self.loop.waiting.pending -= 1

    def wait_for(self, coroutine: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        """Run a coroutine on the loop, and wait at most `timeout` seconds for its result.

        Raises GroupClosedError in a forked child.
        """
        if self.is_inherited:
            coroutine.close()
            raise forked()

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
        """Await `ending` when the process exits, the latest first."""
        self._endings.append(ending)

    def forget(self, ending: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Do not await `ending` any more, because it was done before the exit."""
        if ending in self._endings:
            self._endings.remove(ending)

    def end(self) -> None:
        """Await all endings, because the process exits."""

        async def end() -> None:
            async with asyncio.timeout(EXIT_PATIENCE):
                while self._endings:
                    await self._endings.pop()()
                # Close the groups that the program has left open, because a process that just ends
                # looks to the others like one that has crashed.
                for group in list(self._groups):
                    if not group.closed:
                        await group.close()

        if self.is_inherited:
            return
        try:
            # The second limit is for an engine that an interrupt has left in disorder.
            self.wait_for(end(), EXIT_PATIENCE + 1)
        except TimeoutError:
            log.debug("the groups were not left in good order within %g s", EXIT_PATIENCE)

    def inherit(self) -> None:
        """Hear that this process is a fork of the one with the engine's thread."""
        self.is_inherited = True


_here: list[Engine] = []
"""The engine of this process, once there is one."""
_inherited: list[Engine] = []
"""Kept, because closing such a loop would take the parent's files out of the epoll set they
share."""
_making = threading.RLock()
# Held during a fork, so that no child begins with a lock whose holder is a thread that it does not
# have. An RLock, because the thread that forks may hold it already.


def engine() -> Engine:
    """Return the engine of this process, started when first needed."""
    with _making:
        if not _here:
            _here.append(Engine())
            # Unlike atexit's, these functions run in children of multiprocessing, too.
            processes.Finalize(None, _here[0].end, exitpriority=100)
        return _here[0]


def engine_of(loop: asyncio.AbstractEventLoop) -> Engine | None:
    """Return the engine of this process if `loop` is its loop."""
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
