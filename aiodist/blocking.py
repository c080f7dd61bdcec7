"""A group for threads: the same operations as ordinary calls."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Awaitable, Callable, Sequence
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from aiodist.operations import Operations

P = ParamSpec("P")
R = TypeVar("R")


def _waiting(
    operation: Callable[Concatenate[Operations, P], Awaitable[R]],
) -> Callable[Concatenate[BlockingGroup, P], R]:
    """The method of a `BlockingGroup` that calls `operation` and waits for its result."""

    @wraps(operation)
    def method(self: BlockingGroup, /, *args: P.args, **options: P.kwargs) -> R:
        result: R = self._run(partial(operation, self._group), *args, **options)
        return result

    return method


class BlockingGroup:
    """Made by `Group.blocking()`. Every call waits for its result; usable from any thread but that
    of the group's event loop, which has to run meanwhile.

    Concurrent calls from several threads need tags to tell them apart, as concurrent tasks do.
    """

    def __init__(self, group: Any, loop: asyncio.AbstractEventLoop) -> None:
        """`group`: the `Group` whose methods are called in its `loop`."""
        self._group = group
        self._loop = loop

    @property
    def rank(self) -> int:
        """This rank, 0 to size - 1."""
        rank: int = self._group.rank
        return rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        size: int = self._group.size
        return size

    all_reduce = _waiting(Operations.all_reduce)
    reduce = _waiting(Operations.reduce)
    broadcast = _waiting(Operations.broadcast)
    share = _waiting(Operations.share)
    reshard = _waiting(Operations.reshard)
    all_gather = _waiting(Operations.all_gather)
    gather = _waiting(Operations.gather)
    scatter = _waiting(Operations.scatter)
    reduce_scatter = _waiting(Operations.reduce_scatter)
    all_to_all = _waiting(Operations.all_to_all)
    scan = _waiting(Operations.scan)
    exscan = _waiting(Operations.exscan)
    barrier = _waiting(Operations.barrier)
    send = _waiting(Operations.send)
    recv = _waiting(Operations.recv)
    sendrecv = _waiting(Operations.sendrecv)
    probe = _waiting(Operations.probe)

    def subgroup(self, ranks: Sequence[int], *, timeout: float | None = None) -> BlockingGroup:
        """See `Group.subgroup`."""
        return BlockingGroup(self._run(self._group.subgroup, ranks, timeout=timeout), self._loop)

    def split(
        self, color: str | int | None, key: int | None = None, *, timeout: float | None = None
    ) -> BlockingGroup | None:
        """See `Group.split`."""
        group = self._run(self._group.split, color, key, timeout=timeout)
        return None if group is None else BlockingGroup(group, self._loop)

    def dup(self, *, timeout: float | None = None) -> BlockingGroup:
        """See `Group.dup`."""
        return BlockingGroup(self._run(self._group.dup, timeout=timeout), self._loop)

    def revoke(self) -> None:
        """See `Group.revoke`."""

        async def revoke() -> None:
            self._group.revoke()

        self._run(revoke)

    def agree(self, flag: bool = True, *, timeout: float | None = None) -> bool:
        """See `Group.agree`."""
        verdict: bool = self._run(self._group.agree, flag, timeout=timeout)
        return verdict

    def shrink(self, *, timeout: float | None = None) -> BlockingGroup:
        """See `Group.shrink`."""
        return BlockingGroup(self._run(self._group.shrink, timeout=timeout), self._loop)

    def rendezvous(
        self, *, min_size: int | None = None, max_size: int | None = None,
        timeout: float | None = None,
    ) -> BlockingGroup:  # fmt: skip
        """See `Group.rendezvous`."""
        group = self._run(
            self._group.rendezvous, min_size=min_size, max_size=max_size, timeout=timeout
        )
        return BlockingGroup(group, self._loop)

    def close(self) -> None:
        """See `Group.close`."""
        self._run(self._group.close)

    def _run(self, method: Callable[..., Any], *args: Any, **options: Any) -> Any:
        if asyncio._get_running_loop() is not None:
            raise RuntimeError(
                "a blocking call would stop the event loop that runs in this thread: await the "
                "group's own method here, or call this one in a thread (asyncio.to_thread)"
            )
        outcome: concurrent.futures.Future[Any] = concurrent.futures.Future()
        started: list[asyncio.Future[Any]] = []

        def start() -> None:
            try:
                # A coroutine method becomes a task, a Work is used as it is.
                work = asyncio.ensure_future(method(*args, **options))
            except BaseException as error:
                outcome.set_exception(error)
                return
            started.append(work)
            work.add_done_callback(partial(_pass_on, outcome))

        self._loop.call_soon_threadsafe(start)
        try:
            return outcome.result()
        except BaseException:
            # KeyboardInterrupt while waiting: withdraw what nobody will wait for. The loop calls
            # `start` first, as that was handed to it first: whatever it began is in `started` when
            # this is called.
            if not outcome.done():
                self._loop.call_soon_threadsafe(lambda: [work.cancel() for work in started])
            raise


def _pass_on(outcome: concurrent.futures.Future[Any], work: asyncio.Future[Any]) -> None:
    if outcome.cancelled():
        return
    if work.cancelled():
        outcome.set_exception(asyncio.CancelledError())
    elif (error := work.exception()) is not None:
        outcome.set_exception(error)
    else:
        outcome.set_result(work.result())
