"""An event loop that several threads can be in, one at a time: the holder of its lock.

The loop has a thread of its own. It holds the lock while it runs callbacks, and releases it while
it waits for events. Meanwhile another thread can take the lock and *visit*: make a call, and run
what becomes ready by that. A visitor that wants a result can *drive*: it waits for events itself
and runs their callbacks, while the loop's own thread stands by. So the result comes without a
detour through another thread.

Handing an operation to another thread and back would cost more than a small collective. So a caller
that gets the lock starts its operation itself, runs what becomes ready, and often leaves with the
result. Otherwise it drives, and waits for events without the lock and without the GIL. If another
thread drives already, the caller waits to be told.

**It is safe**, because everything on the loop is touched under the lock only. The selector takes
the lock back after each wait, and drops events of files whose registration has changed meanwhile.

**An interrupt does no harm that stays.** An exception that a signal handler raises, such as
KeyboardInterrupt, may come after any call of the main thread. While a driver waits for events,
nothing is half done, and the exception is just passed on. At any other moment of a visit, the state
of the loop is unknown, so all groups are aborted. `Selector.visit` tells the two apart. A visitor
resets it as the last thing, so the next thread that takes the lock finds out if it did not, and
aborts the groups then. `Loop._stay` explains why the lock is always released.

**There is always a thread that watches.** The loop's own thread stands by for 2 ms after a visitor,
and only if nothing is pending but what the driver waits for. A visitor that comes more often than
that looks at events and the clock itself. A driver drives for at most 0.1 s. A visitor that leaves
wakes the loop's thread if work is left, and the driver if its result has come.

**It is fair**, because a call runs what has become ready for at most 20 ms, and only threads that
come back from waiting for events wait for the lock.
"""

from __future__ import annotations

import asyncio
import selectors
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextvars import Context
from typing import TYPE_CHECKING, Any, Protocol, TypeVarTuple

if TYPE_CHECKING:
    from _typeshed import FileDescriptorLike

Ts = TypeVarTuple("Ts")
Until = Callable[[], bool]
Events = list[tuple[selectors.SelectorKey, int]]


class Lock(Protocol):
    """A `threading.RLock`: only its owner can release it."""

    def acquire(self, blocking: bool = ...) -> bool: ...
    def release(self) -> None: ...


STANDBY = 0.002
"""Seconds for which the loop's own thread stands by after a visitor that waited for a result.

The visitor may come back soon, and taking turns would mean waking threads. Nothing on the loop has
to wait longer than this.
"""
LONGEST_VISIT = 0.02
"""Seconds after which a call leaves what is ready to the loop's own thread."""
LONGEST_DRIVE = 0.1
"""Seconds after which the loop's own thread takes over from a driver."""

_now = time.monotonic


def at_once() -> bool:
    """The `Until` of a visitor that waits for nothing."""
    return True


_OUTSIDE = "_came_outside_of_aiodist"
"""The attribute of interrupts that came while their thread was not in the loop."""


def _interrupt_in(error: BaseException | None) -> KeyboardInterrupt | None:
    """Return the interrupt that `error` is, or was raised during."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    return error


class Visit:
    """One stay of a visitor, which wants `until` to become true.

    `limit`: how long it may wait for events, on the clock; 0: it does not drive.
    """

    __slots__ = ("is_known", "limit", "until")

    def __init__(self, until: Until, limit: float = 0.0) -> None:
        self.until = until
        self.limit = limit
        self.is_known = False  # the loop's own thread has been told


class Selector(selectors.DefaultSelector):
    """A selector that releases `lock` while it waits. Only `call` may be used without that lock.

    `write` makes a thread that waits for events return. `mend` is called if a visitor has left in
    the middle of something.
    """

    def __init__(
        self, lock: Lock, write: Callable[[], None], mend: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__()
        self.visit: Visit | None = None
        """The visit of the thread that holds the lock; None if that is the loop's own.

        If a thread takes the lock and finds one, an interrupt has ended that visit half-way.
        """
        self.driver: Visit | None = None
        """The visit of the driver, from before it releases the lock until it has it back."""
        self.timers: list[asyncio.TimerHandle] = []
        """Timers that visitors have made since the loop's own thread last looked."""
        self.pending = 0
        """How many operations wait for events."""
        self._lock = lock
        self._write = write
        self._mend = mend
        self._is_woken = False  # a byte was written since a thread last came back from waiting
        self._is_idle = False  # the loop's own thread waits, because it has nothing to do
        self._stands_by = False  # it waits to be called, and not for events
        # Released to end the standby of the loop's own thread. Not an Event: see `outcome`.
        self._called = threading.Lock()
        self._called.acquire()
        self._registered = 0  # how often a file was registered so far
        self._numbers: dict[int, int] = {}  # the number of that registration, by file descriptor
        self._last_visit = -STANDBY  # when a thread of the program last worked in the loop

    # -- waiting ----------------------------------------------------------------------------------

    # There is one lock, one selector, and two kinds of threads::
    #
    #     the loop's own thread                    threads of the program
    #
    #     runs callbacks       (has the lock)      `visit`: call, and run what is ready by that
    #     waits for events     (without it)        `drive`: wait for events in its place, run these
    #     stands by            (without it, and    wait at a gate, which a result opens
    #                          not for events)
    #
    # A byte in the loop's self-pipe wakes a thread that waits for events (`wake`). An `Event` wakes
    # one that stands by (`call`). That is cheaper, and does nothing if no thread stands by.
    #
    # The rule: a thread that releases the lock leaves no work that only it would have done. It
    # wakes the thread that waits for events if callbacks are ready or if it has made timers,
    # because that thread computed its timeout before they were there. It wakes the driver if the
    # driver's result has come. Nothing else needs a wake: a file that becomes ready wakes the
    # thread that waits, and a thread that stands by looks by itself after 2 ms.
    def select(self, timeout: float | None = None) -> Events:
        if self.visit is not None:
            return self._select_for(self.visit, timeout)
        self.tell_driver()
        self.timers.clear()
        self._is_idle = timeout is None or timeout > 0
        self._stands_by = self._is_idle and self._is_driven()
        registered = self._registered
        self._lock.release()
        try:
            if self._stands_by:
                self._stand_by()
                timeout = 0
            events = super().select(timeout)
        finally:
            self._lock.acquire()
            self._is_idle = self._stands_by = self._is_woken = False
            self._called.acquire(False)
        if self.visit is not None:
            self._mend()
        return self._still_watched(events, registered)

    def _select_for(self, visit: Visit, timeout: float | None) -> Events:
        if not visit.limit:
            return super().select(0)
        left = max(0.0, visit.limit - _now())
        timeout = left if timeout is None else min(timeout, left)
        # Without this, both threads would wait on one selector, and each event would wake both: the
        # loop's thread for nothing, just when the driver needs the lock and the GIL. One byte now
        # prevents that for all events of this visit. If several operations are pending, two threads
        # are right, because events come that are not the driver's.
        if not visit.is_known and self._is_idle and not self._stands_by and self.pending <= 1:
            visit.is_known = True
            self.wake()  # it will stand by from then on
        registered = self._registered
        # An exception may come in these lines, with or without the lock. `Loop._stay` releases the
        # lock if this thread has it. Until `driver` is reset, nothing is half done.
        self.driver = visit
        self.visit = None
        self._lock.release()
        events = super().select(timeout)
        self._lock.acquire()
        self.visit = visit
        self.driver = None
        self._is_woken = False
        return self._still_watched(events, registered)

    def _stand_by(self) -> None:
        while not self._called.acquire(True, STANDBY) and _now() - self._last_visit < STANDBY:
            pass  # a visitor that comes that often gives the loop its turns

    def _is_driven(self) -> bool:
        if self.driver is not None:
            return self.pending <= 1  # else more is pending than what the driver waits for
        return self.pending == 0 and _now() - self._last_visit < STANDBY

    # While a thread waits, another one may unregister a file, close it, and register a new file
    # that gets the same number::
    #
    #     it waits    ──> epoll_wait: 9 ────────────────────> key of 9 ───────────> lock ──> event
    #     a visitor           removes 9, opens another 9                changes 9
    #
    # An event of the old file must not be taken for one of the new file, because a handler that
    # watches for the end of a process would believe it. So an event counts only if its file was
    # registered before the wait began, and if its key is still the one that the wait has found. A
    # true event that is dropped comes again with the next wait.
    def _still_watched(self, events: Events, registered: int) -> Events:
        """Return those of `events` whose files are still watched, and were before the wait
        began."""
        known, numbers = self.get_map(), self._numbers
        return [
            (key, mask)
            for key, mask in events
            if known.get(key.fileobj) is key and numbers[key.fd] <= registered
        ]

    def register(
        self, fileobj: FileDescriptorLike, events: int, data: object = None
    ) -> selectors.SelectorKey:
        key = super().register(fileobj, events, data)
        self._registered += 1
        self._numbers[key.fd] = self._registered
        return key

    # -- which thread waits, and which goes on
    # ------------------------------------------------------

    def wake(self) -> None:
        """Make a thread return from waiting for events, to look for work."""
        if not self._is_woken:
            self._write()  # first, because an interrupt may come before the next line
            self._is_woken = True

    def tell_driver(self) -> None:
        """Wake the driver if its result has come. Call this before you release the lock."""
        driver = self.driver  # which ends its wait without the lock if it is interrupted
        if driver is not None and driver.until():
            self.wake()

    def leave(self, *, is_ready: bool, has_result: bool) -> None:
        """Hear that a visitor leaves.

        `is_ready`: callbacks are left to run. `has_result`: the visitor has waited for a result and
        has it.
        """
        if has_result:
            self._last_visit = _now()
        if self.timers:
            self.timers = [timer for timer in self.timers if not timer.cancelled()]
        if self._stands_by and has_result and not self.pending:
            pass  # nothing that could not wait until it looks by itself
        elif is_ready or self.timers:
            if self._is_idle:  # else it comes to that anyway
                self.wake()
        elif self.pending:
            self.call()
        self.tell_driver()

    def call(self) -> None:
        """End the standby of the loop's own thread, unless a driver waits for events. For any
        thread.

        A driver needs no call, because it looks for work before it leaves.
        """
        if self._stands_by and self.driver is None:
            try:  # noqa: SIM105 an interrupt may come before `suppress` is entered
                self._called.release()
            except RuntimeError:  # it was called already
                pass


if TYPE_CHECKING:

    class _Base(asyncio.SelectorEventLoop):
        """Declares what typeshed leaves out."""

        _ready: deque[asyncio.Handle]

        def _run_once(self) -> None: ...
        def _write_to_self(self) -> None: ...

else:
    _Base = asyncio.SelectorEventLoop


class Loop(_Base):
    """The event loop. Other threads come in by `visit` and `drive`.

    `upset` is called if an exception has ended a visit half-way. The state that it has left is then
    unknown. It gets None if the exception is not known.
    """

    def __init__(self, lock: Lock, upset: Callable[[BaseException | None], None]) -> None:
        self.waiting = Selector(lock, self._write_to_self, self.mend)
        self.disorders = 0
        """How often a visit has ended half-way."""
        self._lock = lock
        self._upset = upset
        self._next_look = 0.0  # when visitors look at events and the clock next
        super().__init__(self.waiting)
        # Debug mode takes calls from other threads for mistakes. Here they are none, because the
        # holder of the lock counts as the thread of the loop.
        self.set_debug(False)

    def call_at(
        self,
        when: float,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        timer = super().call_at(when, callback, *args, context=context)
        if self.waiting.visit is not None:
            self.waiting.timers.append(timer)
        return timer

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        # Code that an interrupt leaves half done may fail in its `finally`. Then only that error
        # gets here.
        cause = _interrupt_in(context.get("exception"))
        if cause is not None and not hasattr(cause, _OUTSIDE):
            lock: Any = self._lock
            if lock._is_owned():
                self.mend(cause)
            else:  # a Work was dropped elsewhere
                self.call_soon_threadsafe(self.mend, cause)
        super().call_exception_handler(context)

    def _write_to_self(self) -> None:
        super()._write_to_self()
        self.waiting.call()

    def visit(self, call: Callable[[], None], until: Until = at_once) -> bool:
        """Make a call, and run what becomes ready until `until` is true.

        The loop's own thread runs the rest. Returns False if another thread is in the loop.
        """

        def work() -> None:
            call()
            if until is not at_once:
                self._go_on(until)

        return self._stay(Visit(until), work)

    def _go_on(self, until: Until) -> None:
        if self._ready:
            limit = _now() + LONGEST_VISIT
            while self._ready and not until() and _now() < limit:
                self._run_ready()
        if _now() >= self._next_look:
            # A thread that visits again and again may keep the loop's own thread out all the while.
            self._run_once()
            self._next_look = _now() + STANDBY
        elif self._ready and until():
            # run the last callbacks here, so that the loop's thread need not wake
            self._run_ready()

    def _run_ready(self) -> None:
        ready = self._ready
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle.cancelled():
                handle._run()

    def drive(self, until: Until, seconds: float) -> None:
        """Wait for events and run their callbacks until `until`, for at most `seconds`.

        Ends after `LONGEST_DRIVE` in any case, and at once if another thread is in the loop or
        drives. It waits without the lock and without the GIL.
        """
        visit = Visit(until, _now() + min(seconds, LONGEST_DRIVE))

        def work() -> None:
            if self.waiting.driver is None:
                while not until() and _now() < visit.limit:
                    self._run_once()

        self._stay(visit, work)

    # An exception of a signal handler comes after a call, at the first line of a Python function,
    # or at the end of a turn of a loop. So it never comes between the `finally` of a ``try`` and
    # the return of the first call in there, if that is a function of C. That is why two functions
    # below are always called. One releases the lock if this thread has it, and the other one gives
    # the thread back the loop that it had.
    #
    # `RLock.release` raises if the lock is another thread's. So it need not be known whether the
    # exception came before or after this thread took it. A visitor never takes it twice, because
    # the thread counts as one of the loop even before it has the lock.
    def _stay(self, visit: Visit, work: Callable[[], None]) -> bool:
        """Do `work` as a visitor. Returns False if another thread is in the loop."""
        outer = asyncio._get_running_loop()
        if outer is self:
            return False
        waiting = self.waiting
        # If the program handles an interrupt now, errors in here carry it, though it did no harm.
        handled = _interrupt_in(sys.exc_info()[1])
        if handled is not None:
            setattr(handled, _OUTSIDE, True)
        try:
            asyncio._set_running_loop(self)
            try:
                if not self._lock.acquire(False):
                    return False
                if waiting.visit is not None:
                    self.mend()
                waiting.visit = visit
                try:
                    work()
                    until = visit.until
                    waiting.leave(
                        is_ready=bool(self._ready), has_result=until is not at_once and until()
                    )
                    waiting.visit = None  # last: now nothing is half done
                except BaseException as error:
                    if waiting.driver is visit:
                        waiting.driver = None
                        self._write_to_self()  # this thread may have made timers
                    else:
                        self.mend(error)
                    raise
            finally:
                try:  # noqa: SIM105 see above
                    self._lock.release()
                except RuntimeError:
                    pass
        finally:
            asyncio._set_running_loop(outer)
        return True

    def mend(self, error: BaseException | None = None) -> None:
        """Go on after a visit that has ended half-way. For the holder of the lock."""
        self.disorders += 1
        self.waiting.pending = 0  # the end of some may be lost
        self._upset(error)
        self.waiting.visit = None  # last, because this may be interrupted, too
