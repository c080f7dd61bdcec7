"""How a thread makes a call on the loop of a group, and waits for its result.

There are two kinds of loops. A loop that runs in another thread of the program (`asyncio.run`)
takes the call, and the calling thread sleeps until it is told. On the loop of `aiodist.threads` the
calling thread makes the call itself and does the loop's work while it waits, so that no other
thread has to be woken.

**Why an interrupt is safe.** Ctrl-C raises KeyboardInterrupt in the main thread, at any line. A
program that catches it may reuse its arrays. So we first withdraw the operation on the loop,
between two callbacks, and only then raise. The other ranks see a cancelled Work. If it has just
made a group, we leave that group, because the program has no handle of it. A second Ctrl-C does not
wait for that. If the interrupted thread was doing the loop's work, nothing is known about the state
of the loop, so all of its groups are aborted (see `aiodist.threads.loop`).

**No message is lost.** If a message has come for an interrupted receive, it goes back to its queue.
If it cannot, all groups are aborted. `BlockingWork.wait` makes no call after it has begun to hand
over a result, because an exception of a signal handler comes only after a call (see `Loop._stay`).
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
import weakref
from collections.abc import Awaitable, Callable
from functools import partial, wraps
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, cast

from aiodist.errors import GroupClosedError, in_words
from aiodist.threads.engine import LOOK, Engine, Resident, engine_of, forked
from aiodist.threads.loop import Until, at_once
from aiodist.threads.outcome import LoopOutcome
from aiodist.timeouts import check_wait
from aiodist.work import RECEIVES, Work

T = TypeVar("T")
P = ParamSpec("P")
R = TypeVar("R")

LONGEST = threading.TIMEOUT_MAX
"""Seconds of a wait without a deadline."""

_MAKERS = frozenset({"subgroup", "split", "dup", "expose", "shrink", "rendezvous"})
"""Operations that make a group, or a window, which has one."""


class Home:
    """The loop of a group, as other threads see it: a loop that some thread runs by itself."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._pid = os.getpid()
        self._groups: weakref.WeakSet[Resident] = weakref.WeakSet()

    @staticmethod
    def of(loop: asyncio.AbstractEventLoop) -> Home:
        """Return the home of groups on `loop`."""
        engine = engine_of(loop)
        return Home(loop) if engine is None else OwnLoop(loop, engine)

    def adopt(self, group: Resident) -> None:
        """Hear that threads use a group that lives there."""
        self._groups.add(group)

    def upset(self, error: BaseException) -> None:
        """On the loop: abort the groups, because a call was lost by `error`."""
        for group in list(self._groups):
            group.abort(f"{in_words(error)} lost a message")

    @property
    def disorders(self) -> int:
        """How often an interrupt has left the loop in the middle of its work."""
        return 0

    def submit(self, call: Callable[[], None], until: Until = at_once) -> None:
        """Make `call` on the loop, now or soon, after the earlier calls of this thread.

        Raises GroupClosedError in a forked child, and if the loop is closed.
        """
        self._check_process()
        try:
            self._loop.call_soon_threadsafe(call)
        except RuntimeError:
            if not self._loop.is_closed():
                raise
            raise _closed() from None

    def wait(
        self, until: Callable[[float], bool], disorders: int, seconds: float = LONGEST
    ) -> None:
        """Wait until `until(seconds)` is true, which waits that long itself, or until `seconds` are
        over.

        Raises GroupClosedError if the loop is closed meanwhile, or if there were more than
        `disorders`.
        """
        end = time.monotonic() + seconds
        while not until(max(0.0, min(LOOK, end - time.monotonic()))):
            failure = self._failure(disorders)
            # Look again after that, because it may have become true just before the loop ended.
            if failure is not None and not until(0.0):
                raise failure
            if time.monotonic() >= end:
                return

    def _failure(self, disorders: int) -> GroupClosedError | None:
        return _closed() if self._loop.is_closed() else None

    def help(self, until: Until, seconds: float) -> None:
        """Do some of the loop's work if that helps `until` to become true.

        Raises GroupClosedError in a forked child.
        """
        self._check_process()

    @property
    def is_inherited(self) -> bool:
        """Whether this process is a fork of the one with the loop. Then there is nothing to
        leave."""
        return os.getpid() != self._pid

    def _check_process(self) -> None:
        if self.is_inherited:
            raise forked()

    def began(self) -> None:
        """On the loop: hear that a thread waits for an operation."""

    def ended(self) -> None:
        """On the loop: hear that the operation has ended."""


class OwnLoop(Home):
    """The loop of this process for programs that have none (`aiodist.threads`)."""

    def __init__(self, loop: asyncio.AbstractEventLoop, engine: Engine) -> None:
        super().__init__(loop)
        self._engine = engine

    def adopt(self, group: Resident) -> None:
        # On the loop, because an interrupt there goes through all groups.
        self._engine.submit(lambda: self._engine.adopt(group))

    def upset(self, error: BaseException) -> None:
        self._engine.loop.mend(error)

    @property
    def disorders(self) -> int:
        return self._engine.loop.disorders

    def _failure(self, disorders: int) -> GroupClosedError | None:
        return super()._failure(disorders) or self._engine.failure(disorders)

    def submit(self, call: Callable[[], None], until: Until = at_once) -> None:
        self._engine.submit(call, until=until)

    def help(self, until: Until, seconds: float) -> None:
        self._engine.drive(until, seconds)

    def began(self) -> None:
        self._engine.began()

    def ended(self) -> None:
        self._engine.ended()


def _closed() -> GroupClosedError:
    return GroupClosedError(
        "the event loop of the group is closed: make calls while it runs, and close the group in it"
    )


def _check_thread() -> None:
    if asyncio._get_running_loop() is not None:
        raise RuntimeError(
            "a blocking call would stop the event loop that runs in this thread: await the "
            "group's own method here, or call this one in a thread (asyncio.to_thread)"
        )


class BlockingWork(Generic[T]):
    """An operation that goes on while its thread does something else.

    `start`, `isend` and `irecv` of a `BlockingGroup` return it. Use it in any thread that runs no
    event loop. If it fails, and the program never calls `wait` or `cancel`, asyncio reports the
    error.

    For example::

        def in_a_thread(group):
            work = group.isend("a", group.rank, tag="t")
            value = group.recv(tag="t")
            work.wait()
            return value

        assert await asyncio.to_thread(in_a_thread, group.blocking()) == "a"
    """

    def __init__(
        self, home: Home, call: Callable[[], Any], discard: Callable[[T], object] | None = None
    ) -> None:
        """`call` is made on the loop of `home`. It returns a Work, a coroutine, or a plain value.
        `discard` is called there with the result of a coroutine if no thread gets it, because an
        interrupt came just when it was there."""
        _check_thread()
        self._home = home
        self._call = call
        self._discard = discard
        self._disorders = home.disorders  # before the call, which an interrupt may lose
        self._outcome: LoopOutcome[T] = LoopOutcome()
        self._made: LoopOutcome[None] | None = None  # for a thread that waits only for the call
        # what the call returned, unless that is a plain value
        self._work: asyncio.Future[T] | None = None
        self._is_seen = False  # the program has asked for its end

    # -- for its owner ----------------------------------------------------------------------------

    def wait(self, timeout: float | None = None) -> T:
        """Wait for the result at most `timeout` seconds, and return it or raise its error.

        Raises TimeoutError if it is still pending then; the operation goes on. After `cancel` this
        raises asyncio.CancelledError, and ``except Exception`` does not catch that. Raises
        GroupClosedError if the group's event loop is closed. An exception that interrupts the wait,
        as KeyboardInterrupt does, cancels the operation. Raises RuntimeError if it is pending and
        an event loop runs in this thread.
        """
        check_wait(timeout)
        outcome = self._outcome
        if not outcome.is_there:
            _check_thread()
        try:
            self._see()
            if not outcome.is_there:
                limit = LONGEST if timeout is None else min(timeout, LONGEST)
                begun = time.monotonic()
                self._home.help(outcome.done, limit)
                limit -= time.monotonic() - begun
                self._home.wait(outcome.wait, self._disorders, limit)
        except BaseException as error:
            self._give_up(error)
            raise
        if not outcome.is_there:
            raise TimeoutError(f"not done within {timeout} s: it goes on")
        # Without a call from here on, see the module.
        outcome.is_taken = True
        if outcome.error is not None:
            raise outcome.error
        return outcome.result

    result = wait
    """The same under the name of `concurrent.futures.Future`."""

    def done(self) -> bool:
        """Tell whether it has ended, well or not. Never waits."""
        return self._outcome.is_there

    def cancel(self) -> bool:
        """Withdraw it. When this returns, its arrays are not touched any more.

        Returns False if it was done already. Raises RuntimeError if it is pending and an event loop
        runs in this thread.
        """
        self._see()
        if self.done():
            return False
        _check_thread()
        return self._on_loop(lambda: self._work is not None and self._work.cancel())

    @property
    def op(self) -> str:
        """The name of the operation."""
        return self._as_work().op

    @property
    def tag(self) -> Any:
        """Its tag; of a completed receive, that of the message."""
        return self._as_work().tag

    @property
    def nbytes(self) -> int:
        """Bytes of the value; of a completed receive, those of the message."""
        return self._as_work().nbytes

    @property
    def source(self) -> int | None:
        """The rank that a completed receive came from."""
        return self._as_work().source

    @property
    def elapsed(self) -> float:
        """Seconds from the call to the completion, or to now while pending."""
        return self._as_work().elapsed

    def __repr__(self) -> str:
        return f"<BlockingWork of {self._work!r}>"

    # -- for the blocking group -------------------------------------------------------------------

    def start(self) -> BlockingWork[T]:
        """Make the call. Raises what the call raises."""
        # An interrupt may come at any line here, also when the call is already on its way.
        try:
            self._made = made = LoopOutcome[None]()
            self._home.submit(self._make, self._outcome.done)
            self._home.wait(made.wait, self._disorders)
        except BaseException as error:
            self._give_up(error)
            raise
        if self._work is None and self._outcome.error is not None:
            self._outcome.is_taken = True
            raise self._outcome.error
        return self

    def run(self) -> T:
        """Make the call, and wait for its result."""
        try:
            self._home.submit(self._make, self._outcome.done)
            return self.wait()
        except BaseException as error:
            self._give_up(error)
            raise

    def _make(self) -> None:
        """Make the call. Runs on the loop."""
        try:
            given = self._call()
            if not isinstance(given, asyncio.Future) and not asyncio.iscoroutine(given):
                self._outcome.succeed(given)
                return
            self._work = work = cast("asyncio.Future[T]", asyncio.ensure_future(given))
            if work.done():
                self._pass_on(work)
            else:
                if isinstance(work, Work) and work.op in RECEIVES:
                    work.take_back = None  # its message may go back
                self._home.began()
                work.add_done_callback(self._ended)
        except BaseException as error:
            self._outcome.fail(error)
            if not isinstance(error, Exception):
                raise  # the loop must know that it was interrupted
        finally:
            if self._made is not None:
                self._made.succeed(None)

    def _ended(self, work: asyncio.Future[T]) -> None:
        self._home.ended()
        self._pass_on(work)

    def _pass_on(self, work: asyncio.Future[T]) -> None:
        if work.cancelled():
            self._outcome.fail(asyncio.CancelledError())
        elif (error := work._exception) is not None:
            self._outcome.fail(error)
            if self._is_seen:
                work.exception()
        else:
            self._outcome.succeed(work.result())

    def _see(self) -> None:
        """Keep asyncio from reporting an error, because the program asks for it."""
        # Another thread may end the operation meanwhile. It sets the outcome first and looks at
        # `_is_seen` after that, so one of the two threads retrieves the error.
        self._is_seen = True
        if self.done() and self._work is not None and not self._work.cancelled():
            self._work.exception()

    def _give_up(self, error: BaseException) -> None:
        """Leave nothing that goes on, and lose no message, because `error` ends the wait."""
        if self._outcome.is_taken:
            return  # `error` is its own

        def undo() -> None:
            try:
                if not self._undo(error):
                    self._home.upset(error)
            except Exception:  # an interrupt has left it half done
                self._home.upset(error)

        try:
            self._on_loop(undo)
        except (GroupClosedError, RuntimeError):
            return  # there is no such loop any more, so nothing goes on there

    def _undo(self, error: BaseException) -> bool:
        """On the loop: withdraw the operation, give its message back, or leave the group that it
        has made. False: a message is lost."""
        work = self._work
        if work is None or work.cancel() or work.cancelled() or self._outcome.is_taken:
            return True
        if not isinstance(work, Work):
            # Once, because `wait` and `run` may both give up for the same error.
            discard, self._discard = self._discard, None
            if discard is not None and work.exception() is None:
                discard(work.result())
            return True
        if work.error is not None:
            return True
        made: Any = work.result() if work.op in _MAKERS else None
        if made is not None:
            # Nothing else has it, so nothing else can end it.
            (made._abort if work.op == "expose" else made.abort)(in_words(error))
            self._outcome.fail(asyncio.CancelledError())
        if work.op not in RECEIVES:
            return True
        self._outcome.fail(asyncio.CancelledError())
        if getattr(work, "take_back", None) is None:
            return False
        work.give_back()
        return True

    def _on_loop(self, call: Callable[[], R]) -> R:
        """Return what `call` returns, which is made on the loop after the call of this Work."""
        made: LoopOutcome[R] = LoopOutcome()
        disorders = self._home.disorders

        def make() -> None:
            try:
                made.succeed(call())
            except BaseException as error:
                made.fail(error)
                if not isinstance(error, Exception):
                    raise  # the loop must know that it was interrupted

        self._home.submit(make, made.done)
        self._home.wait(made.wait, disorders)
        if made.error is not None:
            raise made.error
        return made.result

    def _as_work(self) -> Work[T]:
        return cast("Work[T]", self._work)


class Blocking(Generic[T]):
    """An object that lives on a loop, for threads."""

    def __init__(self, home: Home, behind: T) -> None:
        self._home = home
        self._behind = behind


def waiting(
    operation: Callable[Concatenate[T, P], Awaitable[R]],
) -> Callable[Concatenate[Blocking[T], P], R]:
    """Make the method of a `Blocking` that calls `operation` and waits for its result."""

    @wraps(operation)
    def method(self: Blocking[T], /, *args: P.args, **options: P.kwargs) -> R:
        call = partial(operation, self._behind, *args, **options)
        return BlockingWork[R](self._home, call).run()

    return method
