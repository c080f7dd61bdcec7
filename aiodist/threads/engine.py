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
import math
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextvars import copy_context
from functools import partial
from multiprocessing import util as processes
from typing import Any, Generic, Protocol, TypeVar

from aiodist.errors import GroupClosedError, in_words
from aiodist.threads.loop import Loop, Until, at_once
from aiodist.threads.outcome import LoopOutcome, interrupted

T = TypeVar("T")

LOOK = 1.0
"""Seconds between two looks at the loop during a wait. Nothing tells a thread that it has ended."""

EXIT_PATIENCE = 10.0
"""Seconds for which an exiting process awaits its endings, and then its open groups."""

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


def _ended() -> GroupClosedError:
    return GroupClosedError(
        "the thread that runs the groups of this process has ended by an error, which was printed"
    )


def forked() -> GroupClosedError:
    """Return the error of a call in a forked child for what its parent made."""
    return GroupClosedError(
        "this process was forked from one that uses aiodist, and groups do not survive a fork: "
        "make new groups here, after the fork"
    )


class Engine:
    """The thread, its loop, and the way in for other threads."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # its holder may be in the loop
        # calls that other threads want made in the loop
        self._queue: deque[Callable[[], None]] = deque()
        self.loop = Loop(self._lock, self._abort_all)
        """The loop of all groups. Only the holder of the lock may touch it."""
        self.is_over = False
        """Whether its thread has ended, so that nothing goes on."""
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
        try:
            with self._lock:
                while True:
                    try:
                        self.loop.run_forever()
                    except (KeyboardInterrupt, SystemExit) as error:
                        # A callback may have raised it, such as an operator of the program.
                        self.loop.call_soon(self.loop.mend, error)
        finally:
            self.is_over = True

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

        Raises GroupClosedError in a forked child, and if the engine's thread has ended.
        """
        self._check()
        if asyncio._get_running_loop() is not None:
            until = at_once  # tasks of two loops do not mix in one thread

        def make() -> None:
            # The queue may hold calls of this thread, from when it found the lock taken. They come
            # first, because collectives are matched by the order of calls.
            if self._queue:
                self._drain()
            call()

        # If another thread is in the loop, we do not wait for it, because its callbacks may take
        # long; a call in the queue takes nothing. `later` comes first, because a call in the queue
        # may be made, and be over, in another thread at once.
        if not self.loop.visit(make, until):
            later()
            # In the context of this thread, because another thread will make the call.
            self._queue.append(partial(copy_context().run, call))
            self.loop.call_soon_threadsafe(self._drain)

    def _check(self) -> None:
        if self.is_inherited:
            raise forked()
        if self.is_over:
            raise _ended()

    def _drain(self) -> None:
        while self._queue:
            self._queue.popleft()()

    def drive(self, until: Until, seconds: float) -> None:
        """Do the loop's work until `until`, for at most `seconds`, unless another thread does it.

        Raises KeyboardInterrupt. If that came in the middle of a callback, all groups are aborted.
        Raises GroupClosedError in a forked child, and if the engine's thread has ended.
        """
        self._check()
        if asyncio._get_running_loop() is None:
            self.loop.drive(until, seconds)

    def _abort_all(self, error: BaseException | None) -> None:
        """End all groups, because `error` came in the middle of a callback. On the loop."""
        why = "an interrupt" if error is None else in_words(error)
        for group in list(self._groups):
            try:
                group.abort(f"{why} in the midst of an operation")
            except Exception:  # we do not know what it has left
                log.exception("a group could not be aborted in good order")
        # The callback may have been the one that makes queued calls.
        self.loop.call_soon_threadsafe(self._drain)

    def failure(self, disorders: int) -> GroupClosedError | None:
        """Return why a thread need not wait any more. None: what it waits for may still come.

        `disorders`: what `loop.disorders` was before it began.
        """
        if self.is_over:
            return _ended()
        # The call that it waits for may have been lost.
        return interrupted() if self.loop.disorders != disorders else None

    def adopt(self, group: Resident) -> None:
        """Take in a group that lives on the loop."""
        self._groups.add(group)

    def began(self) -> None:
        """Count an operation that waits for events. Call this on the loop."""
        self.loop.waiting.pending += 1

    def ended(self) -> None:
        """Count off an operation that `began`."""
        waiting = self.loop.waiting
        waiting.pending = max(0, waiting.pending - 1)  # it may have begun before a disorder

    def wait_for(self, coroutine: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        """Run a coroutine on the loop, and wait at most `timeout` seconds for its result.

        Raises GroupClosedError in a forked child, and if the engine's thread ends.
        """
        outcome: LoopOutcome[T] = LoopOutcome()
        tasks: list[asyncio.Task[None]] = []

        async def run() -> None:
            self.began()
            try:
                outcome.succeed(await coroutine)
            except BaseException as error:
                outcome.fail(error)
                if not isinstance(error, Exception):
                    raise
            finally:
                self.ended()

        def start() -> None:
            tasks.append(self.loop.create_task(run()))

        def cancel() -> None:
            for task in tasks:
                task.cancel()

        try:
            self._check()
        except GroupClosedError:
            coroutine.close()
            raise
        disorders = self.loop.disorders
        try:
            self.loop.call_soon_threadsafe(start)
            end = math.inf if timeout is None else time.monotonic() + timeout
            while not outcome.wait(max(0.0, min(LOOK, end - time.monotonic()))):
                if (failure := self.failure(disorders)) is not None:
                    raise failure
                if time.monotonic() >= end:
                    raise TimeoutError
        except BaseException:
            self.loop.call_soon_threadsafe(cancel)
            raise
        if outcome.error is not None:
            raise outcome.error
        return outcome.result

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

        async def left(what: object, leave: Callable[[], Awaitable[None]], seconds: float) -> None:
            try:
                async with asyncio.timeout(seconds):
                    await leave()
            except (Exception, asyncio.CancelledError) as error:
                text = "%r was not left in good order within %.2g s: %s"
                log.warning(text, what, seconds, in_words(error))

        async def end() -> None:
            until = self.loop.time() + EXIT_PATIENCE
            while self._endings:
                # An ending that hangs takes only its share, so that the others have time, too.
                share = (until - self.loop.time()) / len(self._endings)
                ending = self._endings.pop()
                await left(ending, ending, share)
            # Close the groups that the program has left open, because a process that just ends
            # looks to the others like one that has crashed. We do not close them one after the
            # other, because one may have to wait for a busy receiver.
            groups = [group for group in self._groups if not group.closed]
            await asyncio.gather(*(left(group, group.close, EXIT_PATIENCE) for group in groups))

        if self.is_inherited:
            return
        try:
            # This limit is for an engine that an interrupt has left in disorder.
            self.wait_for(end(), 2 * EXIT_PATIENCE + 1)
        except (TimeoutError, GroupClosedError) as error:
            log.warning("groups were not left in good order: %s", in_words(error))

    def inherit(self) -> None:
        """Hear that this process is a fork of the one with the engine's thread."""
        self.is_inherited = True


class EngineStream(Generic[T]):
    """An async generator on the engine, whose steps other threads and loops wait for.

    A step that is interrupted or cancelled ends on the engine a moment after it has ended for them,
    and a generator that still runs cannot be closed. So `close` waits for that.
    """

    def __init__(self, generator: AsyncGenerator[T, None]) -> None:
        self._generator = generator
        self._turn = asyncio.Lock()

    async def next(self, timeout: float | None) -> T | None:
        """Return the next item, or None after the last one. Raises TimeoutError."""
        async with self._turn, asyncio.timeout(timeout):
            return await anext(self._generator, None)

    async def close(self) -> None:
        async with self._turn:
            await self._generator.aclose()


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
            made = Engine()
            # Unlike atexit's, these functions run in children of multiprocessing, too.
            processes.Finalize(None, made.end, exitpriority=100)
            _here.append(made)
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
