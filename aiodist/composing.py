"""Works made of other Works, or of coroutines."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Generator, Sequence
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from aiodist.errors import AiodistError, GroupClosedError, GroupRevokedError, in_words
from aiodist.transports.surroundings import running_loop
from aiodist.work import Unseen, Work

T = TypeVar("T")
S = TypeVar("S", bound="HasUnseen")
P = ParamSpec("P")


def both(loop: asyncio.AbstractEventLoop, sending: Work[None], receiving: Work[Any]) -> Work[Any]:
    """Return a Work that is done when both are, and fails with the first that fails."""

    def result(whole: Work[Any]) -> Any:
        whole.source = receiving.source
        if whole.may_give_back and getattr(receiving, "take_back", None) is not None:
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
    begun: Callable[[Work[T]], object] = lambda whole: None,
) -> Work[T]:
    """Return a Work that is done when all of `works` are. `result` makes its result.

    `begun` gets the new Work before it can be done. The call began with the first of `works`.

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
    whole._started = works[0]._started
    begun(whole)
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


def check_home(what: str, pid: int, loop: asyncio.AbstractEventLoop) -> None:
    """Raise GroupClosedError in a forked child of the process that entered `what`, and RuntimeError
    in another event loop or thread."""
    if os.getpid() != pid:
        raise GroupClosedError(f"{what} was inherited over a fork: enter it in the child instead")
    if running_loop() is not loop:
        raise RuntimeError(
            f"{what} belongs to the event loop that entered it; each asyncio.run makes a new one: "
            "enter it in this loop, or call from the other one by asyncio.run_coroutine_threadsafe"
        )
