"""`Window`: what one rank asks of the memory of another, and what the owner does.

A window has a group of its own, so its messages match nobody else's. A request is a message with
one tag, in order; its answer has the number of the request as tag. On each rank a task for each
other one takes requests and carries them out, one after the other. It is a task each, since a
receive from any source fails as soon as one rank is lost, and these go on.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aiodist.errors import (
    GroupClosedError,
    GroupRevokedError,
    MessageTooLargeError,
    PeerLostError,
    ProtocolError,
)
from aiodist.operations import Operations
from aiodist.types import SUM, Op
from aiodist.windows.places import Exposed, accumulate, index_of, memory_of
from aiodist.work import Work, together

REQUESTS = "requests"
"""The tag of requests. Answers have ints."""


class Window:
    """Memory of all ranks of a group, as each has exposed it. Made by `Group.expose`.

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
        exposed: list[Exposed | None],
        memory: NDArray[Any] | None,
    ) -> None:
        """`group`: of this window alone, which `close` closes."""
        self._group = group
        self._close = close
        self._exposed = exposed  # by rank
        self._memory = memory  # of this rank; None: nothing, or closed
        self._number = 0  # of the last request
        self._pending: set[Work[Any]] = set()  # of this rank's requests
        loop = asyncio.get_running_loop()
        self._serving = [
            loop.create_task(self._serve(rank), name=f"aiodist window of rank {rank}")
            for rank in range(len(exposed) if memory is not None else 0)
        ]

    # -- what a program calls ---------------------------------------------------------------------

    def get(
        self, rank: int, where: Any = ..., *, out: Any = None, timeout: float | None = None
    ) -> Work[Any]:
        """A copy of ``x[where]`` of `rank`, in `out` where that is given.

        `where`: an int, a slice, ``...``, or a tuple of these. Raises TypeError, ValueError and
        IndexError for arguments that do not fit the memory there.
        """
        exposed = self._of(rank)
        plain, shape = exposed.part(where)
        if out is not None:
            exposed.check_out(out, shape)
        return self._ask("get", rank, plain, None, "", out, timeout)

    def put(self, rank: int, where: Any, value: Any, *, timeout: float | None = None) -> Work[None]:
        """``x[where] = value``, at `rank`. Raises as `get` does."""
        exposed = self._of(rank)
        plain, shape = exposed.part(where)
        return self._ask("put", rank, plain, exposed.value(value, shape), "", None, timeout)

    def accumulate(
        self, rank: int, where: Any, value: Any, op: Op = SUM, *, timeout: float | None = None
    ) -> Work[None]:
        """``x[where] = x[where] op value``, at `rank`. Raises as `get` does, and TypeError for an
        operator of one's own, which does not travel."""
        exposed = self._of(rank)
        plain, shape = exposed.part(where)
        name, given = exposed.operator(op), exposed.value(value, shape)
        return self._ask("accumulate", rank, plain, given, name, None, timeout)

    async def fence(self, *, timeout: float | None = None) -> None:
        """Return when all is done that any rank has called on this window before. A collective.

        Raises what an operation of this rank fails with meanwhile; the others do not wait for it.
        """
        pending = [*self._pending]
        if pending:
            try:
                await asyncio.wait(pending)
            except BaseException as error:
                self._group._forgo(error)  # the others would wait for the barrier in vain
                raise
        await self._group.barrier(timeout=timeout)
        for work in pending:
            if not work.cancelled():
                work.result()

    async def close(self) -> None:
        """Wait for all ranks to call this, as `fence` does, and let go of the memory."""
        if self._group.closed:
            return
        try:
            await self.fence()
        finally:
            await self._end()

    async def __aenter__(self) -> Window:
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            await self.close()
        else:
            await self._end()

    # -- inside -----------------------------------------------------------------------------------

    async def _end(self) -> None:
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)
        self._memory = None
        await self._close()

    def _of(self, rank: int) -> Exposed:
        self._group._enter()
        if not 0 <= rank < len(self._exposed):
            raise ValueError(f"rank={rank}: the ranks are 0 to {len(self._exposed) - 1}")
        exposed = self._exposed[rank]
        if exposed is None:
            raise ValueError(f"rank {rank} has exposed nothing")
        return exposed

    def _ask(
        self, op: str, rank: int, where: list[Any], value: Any, name: str, out: Any,
        timeout: float | None,
    ) -> Work[Any]:  # fmt: skip
        group = self._group
        self._number += 1
        number = self._number
        request = (op, number, where, value, name)
        seconds = group._context.op_timeout if timeout is None else timeout
        sending = group.send(request, rank, tag=REQUESTS, timeout=seconds)
        answer = group.recv(src=rank, tag=number, out=out, timeout=seconds)
        answer.add_done_callback(partial(self._leave, rank, number, sending))
        work: Work[Any] = together(
            answer.get_loop(), op, None, (sending, answer), lambda _: answer.result()
        )
        self._pending.add(work)
        work.add_done_callback(self._pending.discard)
        return work

    def _leave(
        self, rank: int, number: int, sending: Work[None], answer: asyncio.Future[Any]
    ) -> None:
        """Nobody waits for an answer any more. If one comes, it must not lie here for ever."""
        answered = not answer.cancelled() and answer.exception() is None
        asked = sending.done() and not sending.cancelled() and sending.exception() is None
        if answered or not asked or self._group.closed or rank in self._group._context.lost():
            return
        self._group.recv(src=rank, tag=number).add_done_callback(
            lambda work: work.cancelled() or work.exception()
        )

    async def _serve(self, origin: int) -> None:
        """Carry out what `origin` asks for, until it is gone, or this window."""
        while True:
            try:
                op, number, where, value, name = await self._group.recv(src=origin, tag=REQUESTS)
                # No await in here: nobody sees it half done.
                result = self._carry_out(op, index_of(where), value, name)
                await self._group.send(result, origin, tag=number, timeout=math.inf)
            except (MessageTooLargeError, ProtocolError):
                continue  # it was dropped, and its sender has been told
            except (PeerLostError, GroupClosedError, GroupRevokedError):
                return

    def _carry_out(self, op: str, index: tuple[Any, ...], value: Any, name: str) -> Any:
        memory, exposed = self._memory, self._exposed[self._group._context.rank]
        assert memory is not None
        assert exposed is not None
        if op == "get":
            # A copy, since a large answer leaves piece by piece, and the next request may write.
            return np.array(memory[index])
        if op == "put":
            memory[index] = value
        else:
            memory[index] = accumulate(memory[index], value, name, exposed.name)
        return None


async def opened(
    group: Operations, close: Callable[[], Awaitable[None]], x: Any, timeout: float | None
) -> Window:
    """The window that all ranks of `group` open, once each has told what its `x` is."""
    try:
        try:
            own, memory = (None, None) if x is None else memory_of(x)
        except (TypeError, ValueError) as error:
            group._forgo(error)  # the others hear of it in place of what they wait for
            raise
        mine: list[Any] | None = None if own is None else [*own]
        told = await group.all_gather(mine, timeout=timeout)
    except BaseException:
        await close()
        raise
    exposed = [None if found is None else Exposed(*found) for found in told]
    return Window(group, close, exposed, memory)
