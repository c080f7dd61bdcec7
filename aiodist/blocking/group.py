"""`BlockingGroup`: the operations of a group as ordinary calls."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial, wraps
from typing import (
    Any,
    Concatenate,
    Never,
    ParamSpec,
    Protocol,
    TypeVar,
    overload,
    runtime_checkable,
)

from aiodist.blocking.calls import Blocking, BlockingWork, Home, waiting
from aiodist.blocking.store import BlockingStore
from aiodist.blocking.window import BlockingWindow
from aiodist.errors import GroupClosedError
from aiodist.operations import Operations
from aiodist.p2p.point_to_point import Envelope
from aiodist.signatures import Array, Buffer, Signatures, typed
from aiodist.types import ANY_SOURCE, ANY_TAG, AnyTag, Member, Src, View

P = ParamSpec("P")
R = TypeVar("R")


@runtime_checkable
class Neighboring(Protocol):
    """A grid or a graph. Its collectives are made of those of the group."""

    @property
    def group(self) -> Any: ...

    def over(self, group: Any) -> Any:
        """Return the same neighbours in another view of the group."""
        ...


def _starting(
    operation: Callable[Concatenate[Operations, P], Awaitable[R]],
) -> Callable[Concatenate[BlockingGroup, P], BlockingWork[R]]:
    """Make the method of a `BlockingGroup` that calls `operation` and returns at once."""

    @wraps(operation)
    def method(self: BlockingGroup, /, *args: P.args, **options: P.kwargs) -> BlockingWork[R]:
        call = partial(operation, self._behind, *args, **options)
        return BlockingWork[R](self._home, call).start()

    return method


class BlockingGroup(Blocking[Any]):
    """A group whose operations are ordinary calls. Made by `Group.blocking` and `connect_blocking`.

    Every call waits for its result, except `start`, `isend`, `issend` and `irecv`, which return a
    `BlockingWork`. Use it from any thread that runs no event loop. The group's own event loop must
    run meanwhile.

    Concurrent calls from several threads need tags, as those of concurrent tasks do.
    KeyboardInterrupt withdraws the operation that the thread waits for before it is raised.

    For example::

        def in_a_thread(group):
            return group.all_gather(group.rank)

        ranks = await asyncio.to_thread(in_a_thread, group.blocking())
    """

    def __init__(self, group: Any, home: Home) -> None:
        """`group` is the `Group` whose methods are called on its loop."""
        super().__init__(home, group)
        home.adopt(group)

    # -- what it is -------------------------------------------------------------------------------

    # Nothing here needs the loop: constants can be read anywhere, and all else is read in one step,
    # so that no other thread can come between.

    @property
    def name(self) -> str:
        """The name of the group."""
        name: str = self._behind.name
        return name

    @property
    def rank(self) -> int:
        """This rank, 0 to size - 1."""
        rank: int = self._behind.rank
        return rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        size: int = self._behind.size
        return size

    @property
    def local_rank(self) -> int:
        """This rank's place among the ranks of this host."""
        local_rank: int = self._behind.local_rank
        return local_rank

    @property
    def local_size(self) -> int:
        """Number of ranks of this host."""
        local_size: int = self._behind.local_size
        return local_size

    @property
    def epoch(self) -> int:
        """The number of this membership. It grows with each new one."""
        epoch: int = self._behind.epoch
        return epoch

    @property
    def members(self) -> tuple[Member, ...]:
        """The members, by rank."""
        members: tuple[Member, ...] = self._behind.members
        return members

    @property
    def address(self) -> str:
        """The coordinator's address."""
        address: str = self._behind.address
        return address

    @property
    def bytes_moved(self) -> tuple[int, int]:
        """Payload bytes sent to and received from all peers so far, over all transports."""
        moved: tuple[int, int] = self._behind.bytes_moved
        return moved

    @property
    def closed(self) -> bool:
        """Whether the group has ended here."""
        closed: bool = self._behind.closed
        return closed

    @property
    def lost(self) -> dict[int, str]:
        """The ranks that are lost or have left, with the reason. See `Group.lost`."""
        lost: dict[int, str] = self._behind.lost
        return lost

    @property
    def revoked(self) -> bool:
        """Whether this rank has heard that the group was revoked."""
        revoked: bool = self._behind.revoked
        return revoked

    @property
    def store(self) -> BlockingStore:
        """The group's key-value store, kept by the coordinator."""
        return BlockingStore(self._home, self._behind.store)

    def __repr__(self) -> str:
        return f"<BlockingGroup of {self._behind!r}>"

    # -- operations -------------------------------------------------------------------------------

    # The second signature is for type checkers that cannot pick an overload here, as pyright.
    @overload
    def start(
        self, operation: Callable[P, R], /, *args: P.args, **options: P.kwargs
    ) -> BlockingWork[R]: ...
    @overload
    def start(
        self, operation: Callable[..., Any], /, *args: Any, **options: Any
    ) -> BlockingWork[Any]: ...
    def start(
        self, operation: Callable[..., Any], /, *args: Any, **options: Any
    ) -> BlockingWork[Any]:
        """Start an operation of this group without waiting for its result (MPI's Iallreduce).

        As `submit` of `concurrent.futures`: ``group.start(group.all_reduce, x)``. `operation` is a
        collective, send or receive of this group, or of a `Grid` or `Graph` of it. It has started
        when this returns, and `BlockingWork.result` waits for it. Operations are ordered by their
        calls, whether these wait or not. Do not change the arrays of an operation until it is done.

        Raises TypeError for any other `operation`, and what the call raises.

        For example::

            def in_a_thread(group):
                work = group.start(group.all_reduce, np.ones(3))
                ahead = group.start(group.all_gather, group.rank, tag="ranks")
                return work.result(), ahead.result()

            await asyncio.to_thread(in_a_thread, group.blocking())
        """
        owner, method = (
            getattr(operation, "__self__", None),
            getattr(operation, "__wrapped__", None),
        )
        if owner is self and method is not None:
            return BlockingWork[Any](
                self._home, partial(method, self._behind, *args, **options)
            ).start()
        if isinstance(owner, Neighboring) and owner.group is self:
            there = getattr(owner.over(self._behind), operation.__name__)
            return BlockingWork[Any](self._home, partial(there, *args, **options)).start()
        raise TypeError(
            f"start takes an operation of this group, such as group.all_reduce, and not "
            f"{getattr(operation, '__qualname__', operation)!r}; pass its arguments after it"
        )

    all_reduce = waiting(Operations.all_reduce)
    reduce = waiting(Operations.reduce)
    broadcast = waiting(Operations.broadcast)
    share = waiting(Operations.share)
    reshard = waiting(Operations.reshard)
    all_gather = waiting(Operations.all_gather)
    gather = waiting(Operations.gather)
    scatter = waiting(Operations.scatter)
    reduce_scatter = waiting(Operations.reduce_scatter)
    all_to_all = waiting(Operations.all_to_all)
    scan = waiting(Operations.scan)
    exscan = waiting(Operations.exscan)
    barrier = waiting(Operations.barrier)
    send = waiting(Operations.send)
    recv = waiting(Operations.recv)
    ssend = waiting(Operations.ssend)
    isend = _starting(Operations.send)
    issend = _starting(Operations.ssend)
    irecv = _starting(Operations.recv)
    sendrecv = waiting(Operations.sendrecv)
    probe = waiting(Operations.probe)

    def iprobe(
        self, *, src: Src = ANY_SOURCE, tag: str | int | AnyTag = ANY_TAG, **unknown: Never
    ) -> Envelope | None:
        """See `Group.iprobe`."""
        envelope: Envelope | None = self._run(self._behind.iprobe, src=src, tag=tag, **unknown)
        return envelope

    def acknowledge_lost(self) -> tuple[int, ...]:
        """See `Group.acknowledge_lost`."""
        lost: tuple[int, ...] = self._run(self._behind.acknowledge_lost)
        return lost

    def messages(
        self, *, tag: str | int | AnyTag = ANY_TAG, src: Src = ANY_SOURCE
    ) -> Iterator[tuple[Any, int, str | int]]:
        """``for value, source, tag in group.messages(tag=…)``: see `Group.messages`."""
        while True:
            work = BlockingWork[Any](self._home, partial(self._behind.recv, src=src, tag=tag))
            try:
                value = work.run()
            except GroupClosedError as error:
                if error.in_order:
                    return
                raise
            # Without a call, because an interrupt after one would lose the message.
            taken: Any = work._work
            yield value, taken.source, taken.tag

    @typed(Signatures.empty)
    def empty(self, shape: int | Sequence[int], dtype: Any = None, *, like: Any = None) -> Any:
        """See `Group.empty`."""
        return self._run(self._behind.empty, shape, dtype, like=like)

    def expose(
        self, x: Array | Buffer | None = None, *, timeout: float | None = None
    ) -> BlockingWindow:
        """See `Group.expose`."""
        return BlockingWindow(self._home, self._run(self._behind.expose, x, timeout=timeout))

    # -- groups made of it ------------------------------------------------------------------------

    def subgroup(self, ranks: Sequence[int], *, timeout: float | None = None) -> BlockingGroup:
        """See `Group.subgroup`."""
        return self._as_blocking(self._run(self._behind.subgroup, ranks, timeout=timeout))

    def split(
        self, color: str | int | None, key: int | None = None, *, timeout: float | None = None
    ) -> BlockingGroup | None:
        """See `Group.split`."""
        group = self._run(self._behind.split, color, key, timeout=timeout)
        return None if group is None else self._as_blocking(group)

    def dup(self, *, timeout: float | None = None) -> BlockingGroup:
        """See `Group.dup`."""
        return self._as_blocking(self._run(self._behind.dup, timeout=timeout))

    # -- going on after a loss --------------------------------------------------------------------

    def revoke(self) -> None:
        """See `Group.revoke`."""
        self._run(self._behind.revoke)

    def agree(self, flag: bool = True, *, timeout: float | None = None) -> bool:
        """See `Group.agree`."""
        verdict: bool = self._run(self._behind.agree, flag, timeout=timeout)
        return verdict

    def shrink(self, *, timeout: float | None = None) -> BlockingGroup:
        """See `Group.shrink`."""
        return self._as_blocking(self._run(self._behind.shrink, timeout=timeout))

    def rendezvous(
        self, *, min_size: int | None = None, max_size: int | None = None,
        timeout: float | None = None,
    ) -> BlockingGroup:  # fmt: skip
        """See `Group.rendezvous`."""
        group = self._run(
            self._behind.rendezvous, min_size=min_size, max_size=max_size, timeout=timeout
        )
        return self._as_blocking(group)

    def views(self) -> Iterator[View]:
        """``for view in group.views()``: see `Group.views`."""
        views = self._behind.views()

        # A task for each step, because a step is neither a coroutine nor a Work.
        async def following() -> View:
            view: View = await anext(views)
            return view

        try:
            while True:
                try:
                    view = self._run(following)
                except StopAsyncIteration:
                    return
                yield view
        finally:

            def close() -> None:
                asyncio.ensure_future(views.aclose())  # noqa: RUF006

            # Without a wait, because Python may close this generator in a thread that runs an event
            # loop. The task needs no reference, because it ends with its first step.
            with contextlib.suppress(GroupClosedError, RuntimeError):  # the loop is gone
                self._home.submit(close)

    # -- the end ----------------------------------------------------------------------------------

    def close(self) -> None:
        """See `Group.close`."""
        self._run(self._behind.close)

    def abort(self, reason: str = "aborted") -> None:
        """See `Group.abort`."""
        self._run(self._behind.abort, reason)

    def __enter__(self) -> BlockingGroup:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not self._home.is_inherited:
            self._run(self._behind.__aexit__, kind, error, trace)

    # -- inside -----------------------------------------------------------------------------------

    def _forgo(self, error: BaseException, tag: Any = None) -> None:
        """See `OperationStarts._forgo`."""
        self._run(self._behind._forgo, error, tag)

    def _as_blocking(self, group: Any) -> BlockingGroup:
        return BlockingGroup(group, self._home)

    def _run(self, method: Callable[..., Any], *args: Any, **options: Any) -> Any:
        return BlockingWork[Any](self._home, partial(method, *args, **options)).run()
