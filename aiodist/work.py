"""`Work`: the future of one operation."""

from __future__ import annotations

import asyncio
import math
import sys
import warnings
from collections.abc import Callable, Generator, Sequence
from contextvars import copy_context
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Generic, Protocol, TypeVar, cast
from weakref import WeakSet

from aiodist.compiled import core
from aiodist.errors import GroupClosedError, GroupRevokedError, PeerLostError
from aiodist.timeouts import check_wait
from aiodist.trace import Trace
from aiodist.transports.surroundings import is_virtual

T = TypeVar("T")

RECEIVES = frozenset({"recv", "sendrecv"})
"""The operations that take a message."""

SENDS = frozenset({"send", "ssend"})
"""The operations that give one."""

_OWN = f"{Path(__file__).parent}/"


class WorkRecord(Protocol):
    """The record of an operation, see `aiodist.recorder`."""

    plans: tuple[str, ...]

    def carries(self, arrays: Sequence[object]) -> None: ...

    def end(self, state: str, error: BaseException | None = None) -> None: ...

    def numbered(self, seq: int) -> None: ...


class Work(asyncio.Future[T], Generic[T]):
    """An operation that has started: an `asyncio.Future` of its result.

    You can await it, repeatedly and from several tasks, or use it in `asyncio.gather`, `wait`,
    `wait_for`, `as_completed` and `timeout`. If you cancel it, the operation is withdrawn, and the
    other ranks hear of it. Once `cancel()` has returned, aiodist does not touch the buffers of the
    operation any more.

    If your program never looks at the Work of a collective, a receive or a call of the store, it
    gets a `RuntimeWarning` with the line of the call. The warning comes when the Work is dropped,
    or at the latest when the group closes. To look is to await it, add a callback, or call
    `result`, `exception` or `cancel`. A program that leaves a group by an exception is not warned.
    If a call was done before it returned, the warning may have the line that drops its Work.

    Attributes:
        op: name of the operation, "all_reduce".
        tag: its tag; of a completed receive, that of the message.
        seq: its number within the tag (None for point to point).
        nbytes: bytes of the value as far as known when it started; of a completed receive, those of
            the message.
        source: the rank a completed receive came from, else None.

    For example::

        work = group.all_reduce(np.ones(3))  # it has started
        await asyncio.wait([work])
        print(work.op, work.elapsed, work.result())
    """

    # Slots and no `__init__`, because so a Work takes 0.25 instead of 0.65 microseconds to make.
    __slots__ = (
        "_ended", "_looks", "_made_at", "_on_cancel", "_started", "_unseen", "nbytes", "op",
        "record", "seq", "source", "tag", "take_back", "trace",
    )  # fmt: skip

    op: str
    tag: Any
    seq: int | None
    nbytes: int
    source: int | None
    trace: Trace | None
    """The hook that hears of this operation. For the engine."""
    record: WorkRecord | None
    """Hears of its end. For the engine."""
    take_back: Callable[[], None] | None
    """What takes the message of a receive back. It is set only while the receive is awaited, or is
    a part of another Work. None: no message has come. For the engine."""
    _looks: int
    """How often something has looked at a receive since its message came."""
    _on_cancel: Callable[[Work[Any]], None] | None
    _started: float
    _ended: float | None
    _made_at: tuple[CodeType, int]
    """The code and line of the call, if the user should look at this Work and they are known."""
    _unseen: Unseen
    """The Works of its group, if the user should look at this Work."""

    @classmethod
    def begin(
        cls,
        loop: asyncio.AbstractEventLoop,
        op: str,
        tag: object = None,
        seq: int | None = None,
        nbytes: int = 0,
        on_cancel: Callable[[Work[Any]], None] | None = None,
    ) -> Work[T]:
        """Make a Work that starts now. For the engine."""
        work = cls(loop=loop)
        work.op = op
        work.tag = tag
        work.seq = seq
        work.nbytes = nbytes
        work.source = work.trace = work.record = None
        work._on_cancel = on_cancel
        work._started = loop.time()
        work._ended = None
        return work

    @property
    def elapsed(self) -> float:
        """The seconds from the call to the end, or until now if it is pending."""
        ended = self._ended if self._ended is not None else self.get_loop().time()
        return ended - self._started

    @property
    def error(self) -> BaseException | None:
        """The exception of a failed operation, or None. Unlike after `exception()`, asyncio still
        reports an error that the program never retrieves. For the engine."""
        return self._exception

    @property
    def is_awaited(self) -> bool:
        """Whether a task or a callback waits for it, other than one of the engine itself."""
        return self._waiters > 0

    @property
    def _waiters(self) -> int:
        callbacks: Any = self._callbacks or ()
        # Those of tasks are of C, and have no module.
        modules = [getattr(callback, "__module__", None) or "" for callback, _ in callbacks]
        return sum(not module.startswith("aiodist.engine.") for module in modules)

    @property
    def may_give_back(self) -> bool:
        """Whether this is a receive that could give its message back, because at most one waits for
        it. For the engine."""
        return hasattr(self, "take_back") and self._waiters <= 1

    def offer_back(self, take_back: Callable[[], None]) -> None:
        """Keep what takes the message back. The receive is about to end. For the engine."""
        self.take_back, self._looks = take_back, 0
        cast(Any, self).__class__ = _Taken

    @property
    def is_prepared(self) -> bool:
        """Whether it ended well within its call, without a record of its own. For the engine."""
        well = self.done() and self.record is None and self._exception is None
        return well and not self.cancelled()

    def finish(self, result: T, ended: float | None = None) -> None:
        """Complete with `result`, unless the Work is done. `ended`: the time, if not now. For the
        engine."""
        if not self.done():
            if self.trace is not None:
                self.trace("before_complete", self, result)
            self._ended = self.get_loop().time() if ended is None else ended
            self._on_cancel = None
            if self.record is not None:
                self.record.end("done")
            self.set_result(result)

    def finish_within_call(self, result: T, ended: float) -> None:
        """Do what `finish` does for an operation that never waited, and was done at the time
        `ended` of the loop. For the engine."""
        if not self.done():
            if self.trace is not None:
                self.trace("before_complete", self, result)
            self._ended = ended
            self.set_result(result)

    def for_user(self, unseen: Unseen) -> Work[T]:
        """Keep the line of the call, in case the program never looks at this Work, and return the
        Work.

        The call is about to return it. `unseen`: the watched Works of the group. For the engine.
        """
        # A Work that goes on in another way keeps the line of its call.
        if type(self) is Work and not hasattr(self, "_made_at"):
            kind: type[Work[Any]] = _UnwatchedReceive if self.op in RECEIVES else _Unwatched
            if self.done():
                # If the program were cancelled while a receive that is done gives the loop a turn,
                # its message would be lost.
                is_late = self.op not in RECEIVES and unseen.is_due()
                kind = _UnseenYielding if is_late else UnseenWork
            frame = _frame_of_user(sys._getframe(1))
            if frame is not None:
                unseen.add(self)
                cast(Any, self).__class__ = kind
                self._unseen, self._made_at = unseen, (frame.f_code, frame.f_lineno)
        return self

    def after_turn(self, unseen: Unseen) -> Work[T]:
        """This Work. If it is done and the loop is due for a turn, awaiting it gives the loop one.

        For a Work that its call returns. For the engine.
        """
        if type(self) is Work and self.done() and unseen.is_due():
            cast(Any, self).__class__ = _Yielding
        return self

    def of_prepared_call(self, unseen: Unseen) -> Work[T]:
        """This Work, as `for_user`. If it is done, the line of the call is not kept, because that
        takes longer than the rest: it is then looked for when the Work is dropped. For the
        engine."""
        if type(self) is Work:
            if not self.done():
                return self.for_user(unseen)
            self._unseen = unseen
            self.__class__ = UnseenWork
        return self

    def fail(self, error: BaseException) -> None:
        """Complete with `error`, unless the Work is done. For the engine."""
        if not self._is_over:
            if isinstance(error, StopIteration):  # futures cannot raise it
                error = RuntimeError(f"StopIteration({error.value!r}) was raised")
            if self.trace is not None:
                self.trace("failed", self, error)
            self._end("failed", error)
            self.set_exception(error)
            if isinstance(error, GroupClosedError) or (
                self.op in SENDS and isinstance(error, (PeerLostError, GroupRevokedError))
            ):
                # A program need not look, because it has left the group itself, or hears of a lost
                # rank in other ways. This is no look of the program, so it is done by the base.
                asyncio.Future.exception(self)
            cast(Any, self).__class__ = _Yielding

    def cancel(self, msg: Any | None = None) -> bool:
        """Withdraw the operation. Return False if it was done already."""
        if self._is_over:
            return False
        if self._on_cancel is not None:
            # First, the engine releases the buffers and tells the other ranks. If the operation is
            # done in fact, this completes the Work.
            self._on_cancel(self)
            if self.done():
                return False
        if self.trace is not None:
            self.trace("cancelled", self, None)
        self._end("cancelled")
        return super().cancel(msg)

    def give_back(self) -> None:
        """Give the message of a done receive back, if it can be. It counts as cancelled then. For
        the engine."""
        take_back: Callable[[], None] | None = getattr(self, "take_back", None)
        if take_back is not None:
            self.take_back = None
            cast(Any, self).__class__ = Work
            asyncio.Future.__init__(self, loop=self.get_loop())  # without the result
            asyncio.Future.cancel(self)
            take_back()

    async def wait(self, timeout: float | None = None) -> T:
        """Wait at most `timeout` seconds for the result, without cancelling the operation.

        Raises TimeoutError if the operation is still pending then. With 0 or less, a pending
        operation has one turn of the loop.

        For example::

            work = group.all_reduce(1)
            try:
                await work.wait(timeout=5)
            except TimeoutError:
                print("it goes on")
            await work
        """
        check_wait(timeout)
        if timeout is None or timeout == math.inf or self.done():
            return await asyncio.shield(self)
        try:
            async with asyncio.timeout(timeout):
                return await asyncio.shield(self)
        except TimeoutError:
            if not self.done():
                raise TimeoutError(f"not done within {timeout} s: it goes on") from None
            return self.result()  # it may have failed by a TimeoutError of its own

    def synchronize(self) -> None:
        """Block until the result is ready on its device, as a torch Work does.

        A Work on devices is done when the device is, so there is nothing to wait for after ``await
        work``. Raises RuntimeError while the Work is pending, because it goes on only while the
        loop turns.
        """
        if not self.done():
            raise RuntimeError(f"{self!r} is pending: await it before you synchronize")

    @property
    def _is_over(self) -> bool:
        """Whether the Work is done, or is about to be, because an observer now hears of its end."""
        return self.done() or self._ended is not None

    def _seen(self) -> Work[T]:
        # A program may keep a method, such as `work.cancel`, that is older than its look.
        return self

    def _end(self, state: str, error: BaseException | None = None) -> None:
        self._ended = self.get_loop().time()
        self._on_cancel = None
        if self.record is not None:
            self.record.end(state, error)

    def __repr__(self) -> str:
        state = "pending"
        if self.cancelled():
            state = "cancelled"
        elif self.done():
            state = "failed" if self._exception is not None else "done"
        number = "" if self.seq is None else f" #{self.seq}"
        return f"<Work {self.op} tag={self.tag!r}{number} {state}>"


_await = asyncio.Future.__await__
_ordinary: Any = Work


def _frame_of_user(frame: FrameType | None) -> FrameType | None:
    """The innermost frame that is not of this library, from `frame` outwards."""
    while frame is not None and frame.f_code.co_filename.startswith(_OWN):
        frame = frame.f_back
    return frame


class _Unwatched(Work[T]):
    """A pending Work at which the program has not looked yet. A look makes it an ordinary one."""

    __slots__ = ()

    def add_done_callback(self, fn: Callable[[Any], object], **options: Any) -> None:
        cast(Any, self).__class__ = Work
        self.add_done_callback(fn, **options)

    def cancel(self, msg: Any | None = None) -> bool:
        cast(Any, self).__class__ = Work
        return self.cancel(msg)

    def finish(self, result: T, ended: float | None = None) -> None:
        super().finish(result, ended)
        self._ended_unseen()

    def finish_within_call(self, result: T, ended: float) -> None:
        super().finish_within_call(result, ended)
        self._ended_unseen()

    def _ended_unseen(self) -> None:
        if isinstance(self, _Unwatched):  # unless a trace hook has looked
            cast(Any, self).__class__ = UnseenWork


class _UnwatchedReceive(_Unwatched[T]):
    """A receive at which the program has not looked yet.

    A task may be cancelled when the message has come, but before the task runs. Then the program
    never sees the message, so it goes back to its queue.
    """

    __slots__ = ()

    def __await__(self) -> Generator[Any, None, T]:
        self.take_back = None
        try:
            return (yield from _await(self))
        except BaseException:
            # The task itself looks once before it runs.
            if isinstance(cast(Any, self), _Taken) and self._looks <= 1:
                self.give_back()
            raise
        finally:
            del self.take_back
            if isinstance(cast(Any, self), _Taken):
                cast(Any, self).__class__ = Work

    __iter__ = __await__


class _Taken(Work[T]):
    """A receive whose message has come, and might go back. It counts the looks at the message."""

    __slots__ = ()

    def __await__(self) -> Generator[Any, None, T]:
        self._looks += 1
        return _await(self)

    __iter__ = __await__

    def result(self) -> T:
        self._looks += 1
        return Work.result(self)

    def exception(self) -> BaseException | None:
        self._looks += 1
        return Work.exception(self)

    def add_done_callback(self, fn: Callable[[Any], object], **options: Any) -> None:
        self._looks += 1
        Work.add_done_callback(self, fn, **options)


class UnseenWork(Work[T]):
    """A Work that was done before the program looked at it.

    A look makes it an ordinary one. If it is dropped before that, the program forgot an ``await``.
    """

    # A class of its own, so that ordinary Works pay nothing for this.
    __slots__ = ()

    def _seen(self) -> Work[T]:
        cast(Any, self).__class__ = Work
        return self

    def __await__(self) -> Generator[Any, None, T]:
        self.__class__ = _ordinary  # as `_seen` does, which takes longer
        return _await(self)

    __iter__ = __await__

    def done(self) -> bool:
        return self._seen().done()

    def result(self) -> T:
        return self._seen().result()

    def exception(self) -> BaseException | None:
        return self._seen().exception()

    def add_done_callback(self, fn: Callable[[Any], object], **options: Any) -> None:
        self._seen().add_done_callback(fn, **options)

    def cancel(self, msg: Any | None = None) -> bool:
        return self._seen().cancel(msg)

    def __del__(self) -> None:
        if self._unseen.is_muted:
            return
        if hasattr(self, "_made_at"):
            _warn(self, "was dropped before the program")
        elif (frame := _frame_of_user(sys._getframe(1))) is not None:
            # A call in a line of its own is dropped by that line.
            self._made_at = frame.f_code, frame.f_lineno
            _warn(self, "was dropped here before the program")


if core is not None:
    core.await_natively(UnseenWork)


class _UnseenYielding(UnseenWork[T]):
    """One that becomes a `_Yielding` by a look."""

    __slots__ = ()

    def _seen(self) -> Work[T]:
        cast(Any, self).__class__ = _Yielding
        return self

    def __await__(self) -> Generator[Any, None, T]:
        return self._seen().__await__()

    __iter__ = __await__


class Unseen(WeakSet[Work[Any]]):
    """Works of a group at which the program may not have looked, with the lines of their calls."""

    is_muted = False

    def __init__(self) -> None:
        super().__init__()
        self.context = copy_context()
        """That of the group, for simulations: it tells whose Works these are."""

    is_due: Callable[[], bool] = staticmethod(lambda: False)
    """Whether the loop is due for a turn: see `aiodist.transports.polling`."""

    def tell(self, why: str = "the group closes") -> None:
        """Warn of those at which the program has not looked, because their group ends."""
        for work in list(self):
            if isinstance(work, (_Unwatched, UnseenWork)):
                state = "pending" if isinstance(work, _Unwatched) else "done"
                cast(Any, work).__class__ = Work
                _warn(work, f"is {state} while {why}, and the program has not")

    def mute(self) -> None:
        """Warn of none any more, because the program leaves the group by an exception."""
        self.is_muted = True


def _warn(work: Work[Any], what: str) -> None:
    code, line = work._made_at
    file = code.co_filename
    text = f"the Work of {work.op} {what} looked at it: await it, or keep it and look at its result"
    loop = work.get_loop()
    if is_virtual(loop):  # so that the simulation fails
        loop.call_exception_handler({"message": f"{file}:{line}: {text}", "future": work})
        return
    # With its line, as for a coroutine that was never awaited. So the warning comes once for each
    # line.
    warnings.warn_explicit(text, RuntimeWarning, file, line, registry=_told.setdefault(file, {}))


class _Yielding(Work[T]):
    """A Work that has failed, or that was done within its call while the loop was due for a turn.

    Awaiting it gives the loop a turn. Otherwise a program that makes one call after the other, or
    that catches the error of each call and calls again, would keep all other tasks from running.
    """

    __slots__ = ()

    def __await__(self) -> Generator[Any, None, T]:
        self.exception()  # mark it as seen, even if the task is cancelled meanwhile
        yield
        return self.result()

    __iter__ = __await__


_Yielding.__name__ = Work.__name__  # asyncio shows this name if a program ignores the error

_told: dict[str, dict[Any, Any]] = {}
"""The warnings of each file."""
