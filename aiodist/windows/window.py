"""`Window`: what one rank asks of the memory of another, and how the owner answers.

Each window has a group of its own, so its messages match no others. Requests are messages with one
tag, in order. The answer has the number of its request as tag.

Each rank runs one task for each other rank, which carries out that rank's requests in order. One
task with a receive from any source would not do, because such a receive fails as soon as one rank
is lost.

A request that cannot be carried out is refused, and only its sender hears of that. An unexpected
exception ends the window on this rank and is logged, because the others would otherwise wait until
their deadlines.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from types import NoneType
from typing import Any

import numpy as np

from aiodist import timeouts
from aiodist.collectives import values
from aiodist.composing import started, together
from aiodist.engine.failures import sayable
from aiodist.errors import (
    AiodistError,
    CollectiveAbortedError,
    CollectiveTimeoutError,
    GroupBrokenError,
    GroupClosedError,
    MessageTooLargeError,
    MismatchError,
    ProtocolError,
    in_words,
)
from aiodist.operations import Operations
from aiodist.phases.base import Call, Place, as_rank, barrier
from aiodist.signatures import Given, Index, WindowSignatures, typed
from aiodist.transports.sparing import Sparing
from aiodist.types import SUM, Op
from aiodist.windows.places import Exposed, Request, accumulate, index_of, memory_of
from aiodist.work import Unseen, Work

log = logging.getLogger("aiodist.group")

REQUESTS = "requests"
"""The tag of requests. Answers have ints as tags."""

LEAST_SECONDS = 0.001
"""Seconds for the others if the operations of a rank have taken all of the timeout of a `fence`."""

ANSWERED = (NoneType, MessageTooLargeError, MismatchError, ProtocolError)
"""How the receive of an answer ends if the answer has come."""

MOST_WORDS = 1000
"""The longest text of a refusal, in characters. It must fit into one frame: see `Window._why`."""


class Window:
    """Memory that the ranks of a group have exposed. Made by `Group.expose`.

    For example::

        async with await group.expose(np.zeros(4)) as window:
            await window.accumulate(0, ..., np.ones(4))  # x += 1, at rank 0
            await window.fence()
            x = await window.get(0, slice(0, 2))  # a copy of x[0:2]
    """

    def __init__(
        self,
        group: Operations,
        close: Callable[[], Awaitable[None]],
        abort: Callable[[str], None],
        told: Sequence[Any],
        x: Any,
    ) -> None:
        """`group` belongs to this window alone. `close` closes it, and `abort` aborts it with a
        reason. `told` is the result of `offered`."""
        self._group = group
        self._close = close
        self._abort = abort
        self._exposed = [None if one is None else Exposed(*one) for one in told]  # by rank
        self._x = x  # what this rank has exposed; None: nothing, or the window is closed
        self._number = 0  # of the last request
        self._fences = 0  # how often `fence` was called
        self._closing: asyncio.Task[None] | None = None  # the close that is under way, or was
        self._closers = 0  # how many tasks wait for it
        self._pending = group._context.requests  # those of this rank that are not done
        self._sparing = Sparing(log)  # limits warnings about malformed requests
        group._context.records.hide_messages()  # reports show the calls of the program instead
        self._pid = os.getpid()
        loop = asyncio.get_running_loop()
        self._serving = [
            loop.create_task(self._serve(rank), name=f"aiodist window of rank {rank}")
            for rank in range(len(told) if x is not None else 0)
        ]
        for task in self._serving:
            task.add_done_callback(self._served)

    # -- what a program calls ---------------------------------------------------------------------

    @typed(WindowSignatures.get)
    def get(
        self, rank: int, where: Any = ..., *, out: Any = None, timeout: float | None = None
    ) -> Work[Any]:
        """Read ``x[where]`` of `rank`: the Work gives a copy, or `out` if you pass it.

        `where` is an int, a slice, ``...`` or a tuple of these. Raises TypeError, ValueError or
        IndexError if an argument does not fit the memory of that rank.
        """
        exposed = self._of(rank)
        plain, shape = exposed.part(where)
        if out is not None:
            exposed.check_out(out, shape)
        return self._ask("get", rank, plain, shape, None, "", out, timeout)

    def put(
        self, rank: int, where: Index, value: Given, *, timeout: float | None = None
    ) -> Work[None]:
        """Set ``x[where] = value`` at `rank`. Raises as `get` does."""
        exposed = self._of(rank)
        plain, shape = exposed.part(where)
        given = exposed.value(value, shape)
        return self._ask("put", rank, plain, shape, given, "", None, timeout)

    def accumulate(
        self, rank: int, where: Index, value: Given, op: Op = SUM, *, timeout: float | None = None
    ) -> Work[None]:
        """Set ``x[where] = x[where] op value`` at `rank`.

        Raises as `get` does. Also raises TypeError for an operator of your own, because functions
        do not travel.
        """
        exposed = self._of(rank)
        plain, shape = exposed.part(where)
        name, given = exposed.operator(op), exposed.value(value, shape)
        return self._ask("accumulate", rank, plain, shape, given, name, None, timeout)

    @started
    async def fence(self, *, timeout: float | None = None) -> None:
        """Wait until everything is done that any rank has called on this window before. A
        collective.

        Raises the error of an operation of this rank that fails meanwhile. The other ranks do not
        wait for it.

        Without `timeout`, it awaits the operations of this rank for as long as their own timeouts
        allow, and then the other ranks for `op_timeout`.
        """
        self._group._check_loop()
        # Each fence has its own tag, because another fence may be called while this one waits.
        self._fences += 1
        tag = self._fences
        pending = {**self._pending}
        context = self._group._context
        try:
            timeouts.check_timeout(timeout)
            left = timeout
            if pending:
                loop = asyncio.get_running_loop()
                began = loop.time()
                # None: they have timeouts of their own, which may be longer than `op_timeout`.
                limit = None if timeout == math.inf else timeout
                _, late = await asyncio.wait(pending, timeout=limit)
                if late:
                    missing = {pending[work] for work in late}
                    text = f"operations of this rank were not answered within {timeout:g} s"
                    raise context.error(CollectiveTimeoutError, text, op="fence", missing=missing)
                if timeout is not None:  # rounded, because errors name it
                    left = max(round(timeout - (loop.time() - began), 3), LEAST_SECONDS)
        except BaseException as error:
            self._group._forgo(error, tag)  # else the others would wait for the barrier in vain
            raise
        await self._group._start("fence", tag, left, _fence)
        for work in pending:
            if not work.cancelled():
                work.result()

    async def close(self) -> None:
        """Wait until all ranks have called this, as `fence` does, and release the memory.

        Tasks that call this meanwhile wait for the same close. If all of them are cancelled, this
        rank leaves at once, and what is pending fails. Raises as `fence` does.
        """
        if self._closing is not None and self._closing.cancelling():
            await asyncio.wait({self._closing})  # its CancelledError is not for this task
        if self._closing is None or self._closing.done():
            if self._group.closed:
                return
            self._group._check_loop()
            # One fence for all callers, because the other ranks take part in no second one.
            self._closing = asyncio.create_task(self._finish(), name="aiodist close of a window")
        closing = self._closing
        self._closers += 1
        try:
            await asyncio.shield(closing)
        finally:
            self._closers -= 1
            if not self._closers and not closing.done():
                closing.cancel()
                await asyncio.wait({closing})

    async def _finish(self) -> None:
        try:
            await self.fence()
        except asyncio.CancelledError:
            self._abort("the close of a window was cancelled")  # else it waits for what is pending
            raise
        finally:
            await self._end()

    async def __aenter__(self) -> Window:
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if os.getpid() != self._pid:  # a forked child has nothing to leave
            return
        if error is None:
            await self.close()
        else:
            self._abort(in_words(error))
            await self._end()

    # -- inside -----------------------------------------------------------------------------------

    @property
    def _unseen(self) -> Unseen:
        return self._group._unseen

    async def _end(self) -> None:
        for task in self._serving:
            task.cancel()
        self._x = None
        try:
            await asyncio.gather(*self._serving, return_exceptions=True)
        finally:  # also if this task is cancelled meanwhile
            await self._close()

    def _of(self, rank: int) -> Exposed:
        self._group._enter()
        rank = as_rank(rank, len(self._exposed), "rank")
        exposed = self._exposed[rank]
        if exposed is None:
            raise ValueError(f"rank {rank} has exposed nothing")
        return exposed

    def _ask(
        self, op: str, rank: int, where: list[Any], shape: tuple[int, ...], value: Any, name: str,
        out: Any, timeout: float | None,
    ) -> Work[Any]:  # fmt: skip
        group, exposed = self._group, self._exposed[rank]
        assert exposed is not None
        self._number += 1
        number = self._number
        request = (op, number, where, value, name)
        seconds = group._context.op_timeout if timeout is None else timeout
        sending = group.send(request, rank, tag=REQUESTS, timeout=seconds)
        answer = group.recv(src=rank, tag=number, out=out, timeout=seconds)

        def begun(whole: Work[Any]) -> None:
            group._context.records.begin(whole, peer=rank)
            assert whole.record is not None
            whole.record.carries([exposed._replace(shape=shape)])

        def result(whole: Work[Any]) -> Any:
            whole.nbytes = whole.nbytes or answer.nbytes
            return self._given(rank, op, answer.result())

        work: Work[Any] = together(
            answer.get_loop(),
            op,
            None,
            (sending, answer),
            result,
            partial(self._why, rank, op, number),
            begun,
        )
        answer.add_done_callback(partial(self._leave, rank, number, sending))
        self._pending[work] = rank
        work.add_done_callback(self._pending.pop)
        return work

    def _given(self, rank: int, op: str, answer: Any) -> Any:
        """Return the answer of `rank`. Raises CollectiveAbortedError if it refused."""
        if isinstance(answer, str):
            context = self._group._context
            text = f"rank {rank} could not carry it out: {answer}"
            raise context.error(CollectiveAbortedError, text, op=op, rank=rank, reason=answer)
        return answer

    def _why(self, rank: int, op: str, number: int, error: BaseException) -> BaseException:
        """Return the error of a request. It names the call of the program, not its messages.

        The text of a refusal does not fit the `out` of a `get`, so the receive fails with
        MismatchError and the text stays queued. Here we read it.
        """
        if isinstance(error, MismatchError) and not self._group.closed:
            instead = self._group.recv(src=rank, tag=number)
            instead.add_done_callback(_heard)
            try:
                self._given(rank, op, instead.result() if instead.done() else None)
            except AiodistError as refusal:
                return refusal
        if isinstance(error, AiodistError):
            error.op, error.tag = op, None
        return error

    def _leave(
        self, rank: int, number: int, sending: Work[None], answer: asyncio.Future[Any]
    ) -> None:
        """Receive an answer that is no longer awaited, so that it does not stay queued for ever."""
        came = not answer.cancelled() and isinstance(answer.exception(), ANSWERED)
        if came or self._group.closed or rank in self._group._context.lost():
            return
        late = self._group.recv(src=rank, tag=number)
        late.add_done_callback(_heard)
        asked = sending.done() and not sending.cancelled() and sending.exception() is None
        if not asked:  # the request may have left all the same, so an answer comes soon or never
            seconds = self._group._context.op_timeout
            timer = late.get_loop().call_later(seconds, late.cancel)
            late.add_done_callback(lambda _: timer.cancel())

    async def _serve(self, origin: int) -> None:
        """Carry out the requests of `origin` until that rank or this window is gone."""
        while True:
            try:
                message = await self._group.recv(src=origin, tag=REQUESTS)
                try:
                    request = Request.read(message)
                except ValueError as error:
                    text = "a window was asked for nonsense by rank %d, which was dropped: %s"
                    self._sparing.warning("nonsense", text, origin, sayable(str(error)))
                    continue
                # There is no await in here, so no other request sees it half done.
                answer = self._carried_out(request)
                await self._group.send(answer, origin, tag=request.number, timeout=math.inf)
            except (MessageTooLargeError, ProtocolError):
                continue  # the message was dropped, and its sender was told
            except (GroupBrokenError, GroupClosedError):
                return

    def _served(self, task: asyncio.Task[None]) -> None:
        """Handle the end of a task that serves."""
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a window failed to serve, so its group is aborted", exc_info=error)
            self._abort(f"its window failed to serve: {in_words(error)}")

    def _carried_out(self, request: Request) -> Any:
        """Return the answer to `request`.

        A rank may ask for anything, so each exception becomes a refusal that only this rank hears.
        """
        try:
            return self._carry_out(*request)
        except Exception as error:
            return sayable(in_words(error))[:MOST_WORDS]

    def _carry_out(self, op: str, number: int, where: list[Any], value: Any, name: str) -> Any:
        exposed = self._exposed[self._group._context.rank]
        assert exposed is not None
        # Looked up for each request, because the storage of a tensor may be freed or moved.
        owned = memory_of(self._x)
        memory, index = owned.base, index_of(where)
        match op:
            case "get":
                # A copy: a large answer leaves in pieces, and the next request may write meanwhile.
                # A single string would come out shorter than those of its dtype.
                return np.array(memory[index], memory.dtype)
            case "put":
                memory[index] = value
            case "accumulate":
                memory[index] = accumulate(memory[index], value, name, exposed.name)
            case _:
                raise ValueError(f"windows have no {op!r}")
        owned.commit(None)
        return None


def _fence(place: Place) -> Call:
    return barrier(place)._replace(op="fence", text="fence()")


def _heard(work: asyncio.Future[Any]) -> None:
    """Keep asyncio from reporting the error of `work`, which has no other reader."""
    if not work.cancelled():
        work.exception()


def offered(x: Any, place: Place) -> Call:
    """Make the call that tells each rank what all of them expose. Raises TypeError or ValueError if
    `x` cannot be exposed."""
    own = None if x is None else memory_of(x)
    return values.all_gather(place, None if own is None else [own.name, own.shape], None)
