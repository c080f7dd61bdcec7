"""`Work`: the future of one operation."""

from __future__ import annotations

import asyncio
import math
import sys
import warnings
from collections.abc import Callable, Coroutine, Generator, Sequence
from functools import partial, wraps
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, cast
from weakref import WeakSet

from aiodist.compiled import core
from aiodist.errors import (
    AiodistError,
    GroupClosedError,
    GroupRevokedError,
    PeerLostError,
    in_words,
)
from aiodist.timeouts import check_wait
from aiodist.trace import Trace
from aiodist.transports.surroundings import is_virtual

T = TypeVar("T")
S = TypeVar("S", bound="HasUnseen")
P = ParamSpec("P")

RECEIVES = frozenset({"recv", "sendrecv"})
"""The operations that take a message."""

_OWN = f"{Path(__file__).parent}/"


class WorkRecord(Protocol):
    """The record of an operation, see `aiodist.recorder`."""

    plans: tuple[str, ...]

    def carries(self, arrays: Sequence[object]) -> None: ...

    def end(self, state: str, error: BaseException | None = None) -> None: ...


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
        if not self.done():
            if isinstance(error, StopIteration):  # futures cannot raise it
                error = RuntimeError(f"StopIteration({error.value!r}) was raised")
            if self.trace is not None:
                self.trace("failed", self, error)
            self._end("failed", error)
            self.set_exception(error)
            if isinstance(error, GroupClosedError) or (
                self.op == "send" and isinstance(error, (PeerLostError, GroupRevokedError))
            ):
                # A program need not look, because it has left the group itself, or hears of a lost
                # rank in other ways. This is no look of the program, so it is done by the base.
                asyncio.Future.exception(self)
            cast(Any, self).__class__ = _Yielding

    def cancel(self, msg: Any | None = None) -> bool:
        """Withdraw the operation. Return False if it was done already."""
        if self.done():
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
        async with asyncio.timeout(timeout):
            return await asyncio.shield(self)

    def synchronize(self) -> None:
        """Block until the result is ready on its device, as a torch Work does.

        A Work on devices is done when the device is, so there is nothing to wait for after ``await
        work``. Raises RuntimeError while the Work is pending, because it goes on only while the
        loop turns.
        """
        if not self.done():
            raise RuntimeError(f"{self!r} is pending: await it before you synchronize")

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
            if (
                isinstance(cast(Any, self), _Taken) and self._looks <= 1
            ):  # the task itself looks before it runs
                self.give_back()
            raise
        finally:
            del self.take_back
            cast(Any, self).__class__ = Work

    __iter__ = __await__


class _Taken(Work[T]):
    """A receive whose message has come, and might go back. It counts who looks at the message."""

    __slots__ = ()

    def __await__(self) -> Generator[Any, None, T]:
        self._looks += 1
        return _await(self)

    __iter__ = __await__

    def result(self) -> T:
        self._looks += 1
        return super().result()

    def exception(self) -> BaseException | None:
        self._looks += 1
        return super().exception()

    def add_done_callback(self, fn: Callable[[Any], object], **options: Any) -> None:
        self._looks += 1
        super().add_done_callback(fn, **options)


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
        loop.call_exception_handler({"message": f"{file}:{line}: {text}"})
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


def both(loop: asyncio.AbstractEventLoop, sending: Work[None], receiving: Work[Any]) -> Work[Any]:
    """Return a Work that is done when both are, and fails with the first that fails."""

    def result(whole: Work[Any]) -> Any:
        whole.source = receiving.source
        if whole.may_give_back and type(receiving) is _Taken:
            whole.offer_back(receiving.give_back)
        return receiving.result()

    if not receiving.done():
        receiving.take_back = None
    return together(loop, "sendrecv", sending.tag, (sending, receiving), result)


def together(
    loop: asyncio.AbstractEventLoop,
    op: str,
    tag: object,
    works: Sequence[Work[Any]],
    result: Callable[[Work[T]], T],
    why: Callable[[BaseException], BaseException] = lambda error: error,
) -> Work[T]:
    """Return a Work that is done when all of `works` are. `result` makes its result.

    If one of `works` fails, the new Work fails with that error, or with a better one that `why`
    returns. If `result` raises, it fails with that. The other Works are withdrawn.
    """

    def withdraw(_: object) -> None:
        for work in works:
            if not work.cancel():
                work.give_back()

    # A Work that fails withdraws the others, because half of a sendrecv would keep the memory of
    # both. The errors of the others are retrieved, so that asyncio does not report them.
    def check(work: asyncio.Future[Any]) -> None:
        if whole.done():
            if not work.cancelled():
                work.exception()
            return
        if work.cancelled():
            whole.cancel()
        elif (error := work.exception()) is not None:
            withdraw(None)
            whole.fail(why(error))
        elif all(one.done() for one in works):
            try:
                whole.finish(result(whole))
            except Exception as wrong:
                whole.fail(wrong)

    whole: Work[T] = Work.begin(loop, op, tag, None, works[0].nbytes, withdraw)
    for work in works:
        if work.done():
            check(work)
        else:
            work.add_done_callback(check)
    return whole


class HasUnseen(Protocol):
    """A part of a group whose methods are made by `started`."""

    @property
    def _unseen(self) -> Unseen:
        """The Works that the program should look at before the group closes."""
        ...


class CoroutineRest(Coroutine[Any, Any, T]):
    """The rest of a coroutine that has begun, and waits for `awaited`. It ends `work`."""

    def __init__(self, coroutine: Coroutine[Any, Any, T], awaited: Any) -> None:
        # Coroutines have it, and reports of hangs show it.
        self.__qualname__: str = getattr(coroutine, "__qualname__", "")
        self.work: Work[T]
        self.coroutine = coroutine
        self._awaited: list[Any] = [awaited]  # until its task has taken it
        self._error: BaseException | None = None  # if it has ended before that

    def send(self, value: Any) -> Any:
        if self._error is not None:
            raise self._error
        if not self._awaited:
            return self._step(self.coroutine.send, value)
        awaited = self._awaited.pop()
        if awaited is not None:
            # As if it were awaited now, because another task may have awaited it meanwhile.
            awaited._asyncio_future_blocking = True
        return awaited

    def throw(self, *error: Any) -> Any:
        if self._error is not None or self.cancel():
            return self.send(None)
        self._awaited.clear()
        return self._step(self.coroutine.throw, *error)

    def cancel(self) -> bool:
        """Cancel what it waits for, as a task does, and let it handle that now.

        False: its task has taken what it waits for, or it is done.
        """
        if not self._awaited or self._awaited[0] is None or not self._awaited[0].cancel():
            return False
        self._awaited.clear()
        try:
            self._awaited.append(self._step(self.coroutine.send, None))
        except BaseException as error:
            self._error = error
        return True

    def close(self) -> None:
        self.coroutine.close()

    def __await__(self) -> Generator[Any, Any, T]:
        raise NotImplementedError("only one task can await the rest of a coroutine")

    def _step(self, step: Callable[..., Any], *given: Any) -> Any:
        try:
            return step(*given)
        except StopIteration as stop:
            # Now, because a cancel before its task runs would lose the result.
            self.work.finish(stop.value)
            raise


def started(
    method: Callable[Concatenate[S, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[S, P], Work[T]]:
    """Make a plain method of an ``async def``. It starts when it is called, and returns a Work.

    The coroutine runs within the call until it has to wait, and a task does the rest. So it has
    been called even if its Work is cancelled before the loop turns. The coroutine gets the
    cancellation where it waits.

    The call raises errors of wrong arguments, and of a group that has ended. Other errors are
    raised by the Work, as with other operations. If the program forgets to await the Work, it is
    warned.

    Until its first wait the coroutine runs in the task of the caller. So it must not use
    `asyncio.timeout` there, because that would cancel the caller's task.
    """

    @wraps(method)
    def start(self: S, /, *args: P.args, **options: P.kwargs) -> Work[T]:
        op = method.__name__
        coroutine = method(self, *args, **options)
        rest: CoroutineRest[T] | None = None
        result: Any = None
        error: AiodistError | None = None
        try:
            rest = CoroutineRest(coroutine, coroutine.send(None))
        except StopIteration as stop:
            result = stop.value
        except AiodistError as found:
            if isinstance(found, (ValueError, GroupClosedError, GroupRevokedError)):
                raise
            error = found
        work: Work[T] = Work.begin(asyncio.get_running_loop(), op)
        if rest is not None:
            rest.work = work
            task = work.get_loop().create_task(rest, name=f"aiodist {op}")
            work._on_cancel = partial(_withdraw, rest, task)
            task.add_done_callback(partial(_ended, work))
        elif error is not None:
            work.fail(error)
        else:
            work.finish(result)
        return work.for_user(self._unseen)

    return start


def _withdraw(rest: CoroutineRest[T], task: asyncio.Task[T], work: Work[T]) -> None:
    """Cancel the rest of `work`, which `task` does."""
    if not rest.cancel():
        task.cancel()


def _ended(work: Work[T], task: asyncio.Task[T]) -> None:
    """End `work`, because its task has ended. `CoroutineRest` has ended it if there is a result."""
    if task.cancelled():
        work.cancel()
    elif (error := task.exception()) is not None:
        work.fail(error)


def failure_of(task: asyncio.Task[Any], owner: str) -> AiodistError | None:
    """Return the error with which `owner` fails, because a task of its own has ended; None: it goes
    on. An error that is not expected is reported to the loop first."""
    if task.cancelled() or (error := task.exception()) is None:
        return None
    if isinstance(error, AiodistError):
        return error
    said = {"message": f"{task.get_name()} failed", "exception": error}
    task.get_loop().call_exception_handler(said)
    return GroupClosedError(f"{owner} failed here: {in_words(error)}")
