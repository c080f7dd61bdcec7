"""An event loop that several threads can be in, one at a time: whoever holds its lock.

It has a thread of its own, which holds the lock while it runs callbacks, and lets go of it while it
waits for events. Meanwhile another thread can take the lock and visit: call something, and run what
becomes ready by that. A visitor who wants to wait for a result can drive: it waits for events
itself, and runs what they bring, while the loop's own thread stands by. So what it waits for comes
without a detour by another thread.

A hand-over to another thread and back would cost more than a small collective takes. So a caller
that gets the lock starts its operation itself, runs what becomes ready by that, and often leaves
with the result. Otherwise it drives until it has its result, and waits for events without the lock
and without the GIL. Whoever finds a driver waits to be told.

**It is safe**, because everything on the loop is touched under the lock only. The selector gives
the lock back after each wait, and drops events whose registration has changed meanwhile. An
exception out of the midst of a callback, which is Ctrl-C in a main thread that drives, aborts all
groups.

**Somebody always watches.** The loop's own thread stands by for 2 ms after a visitor, and only
while nothing is pending but what the driver waits for. A visitor that comes more often than that
looks at events and the clock itself. A driver drives for at most 0.1 s. A visitor that leaves wakes
the loop's thread if anything is left to do, and the driver if its result is there.

**It is fair**, because a call runs what has become ready for at most 20 ms, and nobody waits for
the lock but those who come back from waiting for events.
"""

from __future__ import annotations

import asyncio
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable
from contextvars import Context
from typing import TYPE_CHECKING, TypeVarTuple

if TYPE_CHECKING:
    from _typeshed import FileDescriptorLike

Ts = TypeVarTuple("Ts")
Until = Callable[[], bool]
Events = list[tuple[selectors.SelectorKey, int]]

STANDBY = 0.002
"""Seconds for which the loop's own thread stands by after a visitor who waited for a result: he may
come back soon, and whenever they take turns, threads have to be woken. Nothing on the loop has to
wait for longer than that."""
LONGEST_VISIT = 0.02
"""Seconds after which what a call has made ready is left to the loop's own thread."""
LONGEST_DRIVE = 0.1
"""Seconds after which the loop's own thread takes over from a driver."""

_now = time.monotonic


def at_once() -> bool:
    """The `Until` of a visitor that waits for nothing: it is enough from the first."""
    return True


class Visit:
    """What a visitor is there for. `until`: what it waits for, if it drives."""

    __slots__ = ("is_known", "is_waiting", "limit", "until")

    def __init__(self, until: Until | None = None, limit: float = 0.0) -> None:
        self.until = until
        self.limit = limit
        self.is_known = False  # the loop's own thread has been told
        self.is_waiting = False


_CALLER = Visit()


class Selector(selectors.DefaultSelector):
    """Lets go of `lock` while it waits. Everything here but `call` is for who holds that lock.

    `write`: makes whoever waits for events return.
    """

    def __init__(self, lock: threading.Lock, write: Callable[[], None]) -> None:
        super().__init__()
        self.visit: Visit | None = None
        """Of the thread that holds the lock, if that is a visitor."""
        self.timers: list[asyncio.TimerHandle] = []
        """Timers that visitors have made since the loop's own thread last looked."""
        self.pending = 0
        """Operations that events may bring on."""
        self._lock = lock
        self._write = write
        self._is_woken = False  # by what was written since somebody last came back from waiting
        self._is_idle = False  # the loop's own thread waits, and had nothing else to do
        self._stands_by = False  # it does not wait for events, but to be called
        # Set to have the loop's own thread look, where it stands by.
        self._called = threading.Event()
        self._driver: Until | None = None  # what the driver waits for, while it waits for events
        self._registered = 0  # how often a file was registered so far
        self._numbers: dict[int, int] = {}  # the number of that registration, by file descriptor
        self._last_visit = -STANDBY  # when a thread of the program last worked in the loop

    # -- waiting ----------------------------------------------------------------------------------

    # Who is where, and what wakes whom. There is one lock, one selector, and two kinds of threads:
    #
    #     the loop's own thread                    threads of the program
    #
    #     runs callbacks       (has the lock)      `visit`: call, and run what is ready by that
    #     waits for events     (without it)        `drive`: wait for events in its place, run these
    #     stands by            (without it, and    wait at a gate, which a result opens
    #                          not for events)
    #
    # A thread that waits for events is woken by a byte in the loop's self-pipe (`wake`); one that
    # stands by, by an `Event` (`call`), which costs less, and does nothing where nobody stands by.
    #
    # The rule that keeps everybody honest: whoever lets go of the lock leaves nothing behind that
    # only he would have done. Callbacks that are ready, and timers that he has made, are told to
    # whoever waits for events, as that one has computed its timeout before they were there. A
    # result that a driver waits for is told to that driver. Nothing else needs to be told: a file
    # that becomes ready wakes whoever waits, and who stands by looks by himself after 2 ms.
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
            self._called.clear()
        return self._still_watched(events, registered)

    def _select_for(self, visit: Visit, timeout: float | None) -> Events:
        until = visit.until
        if until is None:
            return super().select(0)
        left = max(0.0, visit.limit - _now())
        timeout = left if timeout is None else min(timeout, left)
        # Both would wait on the same selector else, and an event would wake both: the loop's thread
        # for nothing, and just when the driver needs the lock and the GIL. One byte now saves that
        # for each event of this visit. Not where more than one operation is pending: then events
        # come that are none of the driver's, and two threads are right.
        if not visit.is_known and self._is_idle and not self._stands_by and self.pending <= 1:
            visit.is_known = True
            self.wake()  # and it will stand by from then on
        self._driver, self.visit, visit.is_waiting = until, None, True
        registered = self._registered
        self._lock.release()
        try:
            events = super().select(timeout)
            visit.is_waiting = False
        finally:
            self._lock.acquire()
            self._driver, self.visit, self._is_woken = None, visit, False
        return self._still_watched(events, registered)

    def _stand_by(self) -> None:
        while not self._called.wait(STANDBY) and _now() - self._last_visit < STANDBY:
            pass  # whoever comes that often gives the loop its turns

    def _is_driven(self) -> bool:
        if self._driver is not None:
            return self.pending <= 1  # there is more than what the driver waits for otherwise
        return self.pending == 0 and _now() - self._last_visit < STANDBY

    # Others may unregister a file, close it, and register another one that gets the same number,
    # while somebody waits::
    #
    #     who waits   ──> epoll_wait: 9 ────────────────────> key of 9 ───────────> lock ──> event
    #     a visitor           removes 9, opens another 9                changes 9
    #
    # What has happened to the old file must not be told of the new one: who watches whether a
    # process ends, or waits for one answer, would believe it. So an event counts if its file was
    # registered before the wait began, and its key is still the one that the wait has found. What
    # is dropped although it is true comes again with the next wait.
    def _still_watched(self, events: Events, registered: int) -> Events:
        """Those of `events` that are of files as they are watched now, and were when only so many
        had been registered."""
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

    # -- who is to wait, and who is to go on ------------------------------------------------------

    @property
    def has_driver(self) -> bool:
        """Whether a visitor waits for events."""
        return self._driver is not None

    def wake(self) -> None:
        """Have somebody come back from waiting for events, and look at what there is to do."""
        if not self._is_woken:
            self._is_woken = True
            self._write()

    def tell_driver(self) -> None:
        """Wake the driver if what it waits for is there. To be called before letting go of the
        lock, by whoever may have brought that about."""
        if self._driver is not None and self._driver():
            self.wake()

    def leave(self, *, is_ready: bool, has_result: bool) -> None:
        """A visitor leaves. `is_ready`: callbacks that somebody has to run; `has_result`: the
        visitor has waited for something, and has it."""
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
        """Let the loop's own thread stand by no longer if nobody waits for events in its place. For
        any thread: a driver sees what there is to do before it leaves."""
        if self._stands_by and self._driver is None:
            self._called.set()


if TYPE_CHECKING:

    class _Base(asyncio.SelectorEventLoop):
        """With what typeshed does not tell of."""

        _ready: deque[asyncio.Handle]

        def _run_once(self) -> None: ...
        def _write_to_self(self) -> None: ...

else:
    _Base = asyncio.SelectorEventLoop


class Loop(_Base):
    """The event loop. `visit` and `drive` are for threads that hold the lock.

    `upset`: called where an exception has ended a callback of a visitor half-way (KeyboardInterrupt
    can, in the main thread), and nobody may rely on what it has left.
    """

    def __init__(self, lock: threading.Lock, upset: Callable[[BaseException], None]) -> None:
        self.waiting = Selector(lock, self._write_to_self)
        self._upset = upset
        self._next_look = 0.0  # of visitors, at events and the clock
        super().__init__(self.waiting)
        # Debug mode takes calls from other threads for a mistake. Here they are none: the lock is
        # what asyncio means by being in the thread of the loop.
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

    def _write_to_self(self) -> None:
        super()._write_to_self()
        self.waiting.call()

    def visit(self, call: Callable[[], None], until: Until = at_once) -> None:
        """Make a call, and run what becomes ready until `until` says that this is enough; what is
        left then is the loop's own thread's."""
        outer = self._enter(_CALLER)
        waits = until is not at_once
        try:
            call()
            if waits:
                self._go_on(until)
        except BaseException as error:
            self._upset(error)
            raise
        finally:
            self._leave(outer, has_result=waits and until())

    def _go_on(self, until: Until) -> None:
        if self._ready:
            limit = _now() + LONGEST_VISIT
            while self._ready and not until() and _now() < limit:
                self._run_ready()
        if _now() >= self._next_look:
            # One who comes again and again may keep the loop's own thread out all the while.
            self._run_once()
            self._next_look = _now() + STANDBY
        elif self._ready and until():
            self._run_ready()  # the last callbacks run here: no need to wake the loop's thread

    def _run_ready(self) -> None:
        ready = self._ready
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle.cancelled():
                handle._run()

    def drive(self, until: Until, seconds: float) -> None:
        """Wait for events and run what they bring, until `until`; at most for `seconds`, and no
        longer than a while. While it waits, it holds neither the lock nor the GIL."""
        visit = Visit(until, _now() + min(seconds, LONGEST_DRIVE))
        outer = self._enter(visit)
        try:
            while not until() and _now() < visit.limit:
                self._run_once()
        except BaseException as error:
            # While it waits for events, nothing is half done, and Ctrl-C is simply passed on. Amid
            # a callback, a frame may be half sent, or a count taken and not given back: nobody can
            # tell, so all groups end, here and by that on the other ranks.
            if not visit.is_waiting:
                self._upset(error)
            raise
        finally:
            self._leave(outer, has_result=until())

    def _enter(self, visit: Visit) -> asyncio.AbstractEventLoop | None:
        outer = asyncio._get_running_loop()
        asyncio._set_running_loop(self)
        self.waiting.visit = visit
        return outer

    def _leave(self, outer: asyncio.AbstractEventLoop | None, *, has_result: bool) -> None:
        self.waiting.visit = None
        asyncio._set_running_loop(outer)
        self.waiting.leave(is_ready=bool(self._ready), has_result=has_result)
