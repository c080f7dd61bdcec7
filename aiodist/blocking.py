"""A group for threads: the same operations as ordinary calls."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from aiodist.p2p.point_to_point import Envelope
from aiodist.types import ANY_SOURCE, ANY_TAG, SUM, AnySource, AnyTag, Op, Tag


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

    def all_reduce(
        self, x: Any, op: Op = SUM, *, out: Any = None, tag: Tag = None,
        timeout: float | None = None,
    ) -> Any:  # fmt: skip
        """See `Group.all_reduce`."""
        return self._run(self._group.all_reduce, x, op, out=out, tag=tag, timeout=timeout)

    def reduce(
        self, x: Any, dst: int, op: Op = SUM, *, out: Any = None, tag: Tag = None,
        timeout: float | None = None,
    ) -> Any:  # fmt: skip
        """See `Group.reduce`."""
        return self._run(self._group.reduce, x, dst, op, out=out, tag=tag, timeout=timeout)

    def broadcast(
        self, x: Any = None, src: int = 0, *, tag: Tag = None, timeout: float | None = None
    ) -> Any:
        """See `Group.broadcast`."""
        return self._run(self._group.broadcast, x, src, tag=tag, timeout=timeout)

    def share(
        self, x: Any = None, src: int = 0, *, tag: Tag = None, timeout: float | None = None
    ) -> Any:
        """See `Group.share`."""
        return self._run(self._group.share, x, src, tag=tag, timeout=timeout)

    def all_gather(
        self, x: Any, *, out: Any = None, tag: Tag = None, timeout: float | None = None
    ) -> Any:
        """See `Group.all_gather`."""
        return self._run(self._group.all_gather, x, out=out, tag=tag, timeout=timeout)

    def gather(
        self, x: Any, dst: int = 0, *, out: Any = None, tag: Tag = None,
        timeout: float | None = None,
    ) -> Any:  # fmt: skip
        """See `Group.gather`."""
        return self._run(self._group.gather, x, dst, out=out, tag=tag, timeout=timeout)

    def scatter(
        self, xs: Any = None, src: int = 0, *, out: Any = None, tag: Tag = None,
        timeout: float | None = None,
    ) -> Any:  # fmt: skip
        """See `Group.scatter`."""
        return self._run(self._group.scatter, xs, src, out=out, tag=tag, timeout=timeout)

    def reduce_scatter(
        self, xs: Any, op: Op = SUM, *, out: Any = None, tag: Tag = None,
        timeout: float | None = None,
    ) -> Any:  # fmt: skip
        """See `Group.reduce_scatter`."""
        return self._run(self._group.reduce_scatter, xs, op, out=out, tag=tag, timeout=timeout)

    def all_to_all(
        self, xs: Any, *, out: Any = None, tag: Tag = None, timeout: float | None = None
    ) -> Any:
        """See `Group.all_to_all`."""
        return self._run(self._group.all_to_all, xs, out=out, tag=tag, timeout=timeout)

    def scan(
        self, x: Any, op: Op = SUM, *, out: Any = None, tag: Tag = None,
        timeout: float | None = None,
    ) -> Any:  # fmt: skip
        """See `Group.scan`."""
        return self._run(self._group.scan, x, op, out=out, tag=tag, timeout=timeout)

    def exscan(
        self, x: Any, op: Op = SUM, *, out: Any = None, tag: Tag = None,
        timeout: float | None = None,
    ) -> Any:  # fmt: skip
        """See `Group.exscan`."""
        return self._run(self._group.exscan, x, op, out=out, tag=tag, timeout=timeout)

    def barrier(self, *, tag: Tag = None, timeout: float | None = None) -> None:
        """See `Group.barrier`."""
        self._run(self._group.barrier, tag=tag, timeout=timeout)

    def send(self, x: Any, dst: int, *, tag: str | int = 0, timeout: float | None = None) -> None:
        """See `Group.send`."""
        self._run(self._group.send, x, dst, tag=tag, timeout=timeout)

    def recv(
        self, *, src: int | AnySource = ANY_SOURCE, tag: str | int | AnyTag = ANY_TAG,
        out: Any = None, timeout: float | None = None,
    ) -> Any:  # fmt: skip
        """See `Group.recv`."""
        return self._run(self._group.recv, src=src, tag=tag, out=out, timeout=timeout)

    def sendrecv(
        self, x: Any, dst: int, *, src: int | AnySource = ANY_SOURCE, tag: str | int = 0,
        out: Any = None, timeout: float | None = None,
    ) -> Any:  # fmt: skip
        """See `Group.sendrecv`."""
        return self._run(self._group.sendrecv, x, dst, src=src, tag=tag, out=out, timeout=timeout)

    def probe(
        self, *, src: int | AnySource = ANY_SOURCE, tag: str | int | AnyTag = ANY_TAG,
        timeout: float | None = None,
    ) -> Envelope:  # fmt: skip
        """See `Group.probe`."""
        result: Envelope = self._run(self._group.probe, src=src, tag=tag, timeout=timeout)
        return result

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
            # KeyboardInterrupt while waiting: withdraw what nobody will wait for.
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
