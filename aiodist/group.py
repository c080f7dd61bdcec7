"""The public `Group`: its operations, its members, groups made of it, its epochs and its end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

from aiodist import timeouts
from aiodist.blocking.calls import Home
from aiodist.blocking.group import BlockingGroup
from aiodist.control.store import Store
from aiodist.engine import failures
from aiodist.errors import GroupClosedError, GroupRevokedError, in_words
from aiodist.operations import Operations
from aiodist.rank import deriving
from aiodist.rank.actor import RankActor, as_member
from aiodist.rank.context import Context
from aiodist.rank.recovery import Recovery, check_sizes
from aiodist.rank.views import views
from aiodist.signatures import Array, Buffer, Signatures, typed
from aiodist.types import Member, View
from aiodist.windows.window import Window, opened
from aiodist.wire.recovery import Purpose
from aiodist.work import Unseen, Work, started


class Keeper(Protocol):
    """Gives one epoch after the other: see `aiodist.epochs`."""

    def entered(self, group: Group) -> None:
        """Hears that the program has entered ``async with group``."""
        ...

    def left(self, error: BaseException | None) -> bool:
        """Hears how it has left that. True: this rank stays a member, for another epoch follows."""
        ...


class _Line:
    """Groups of which each came of the one before, by `shrink` or `rendezvous`. Only the newest is
    kept: with those before it each epoch would keep its memory."""

    newest: Group
    keeper: Keeper | None = None


class Group(Operations):
    """Ranks that communicate. Get one from `aiodist.connect`, `run`, `local`, or another group.

    Every operation starts when it is called and returns a `Work`: await it for the result. All
    take `tag=` (None, a str of at most 1024 bytes, or an int of 64 bits), by which operations of
    the ranks are matched, in the order of the calls within one tag; and `timeout=` in seconds
    (None: the group's `op_timeout`, `math.inf`: none).

    Values are numpy arrays, torch tensors, anything with `__dlpack__`, and trees of dict, list,
    tuple, str, bytes, None, bool, int, float, complex and arrays. An `array.array`, bytearray or
    memoryview is taken for an array, and arrives as one of numpy. Subclasses of numpy arrays travel
    as arrays, masked ones and named tuples not at all; new arrays have the byte order of this
    machine.

    A call raises TypeError or ValueError at once for arguments that make no sense. That of a
    collective has its place in the order all the same: the other ranks' Works fail with
    `CollectiveAbortedError`, and the next calls match each other. (What is no tag has no place in
    any order: then the others wait.) RuntimeError from another event loop than the group's, and
    what ended the group after it has ended, leave the order as it is.

    Works fail with `PeerLostError`, `CollectiveTimeoutError`, `CollectiveAbortedError`,
    `MismatchError`, `MessageTooLargeError`, `ProtocolError` (what a rank sent makes no sense) and
    `GroupClosedError`.
    """

    def __init__(
        self, actor: RankActor, context: Context, *, name: str, line: _Line | None = None
    ) -> None:
        super().__init__(context, actor.loop)
        self._line = line or _Line()  # knows which group of this name is the newest
        self._line.newest = self
        self._actor = actor
        self._name = name
        # By rank; those who are gone stay in it.
        self._members = tuple(
            as_member(actor.people[root], rank) for rank, root in enumerate(context.ranks)
        )
        # Agree, shrink and rendezvous.
        self._recovery = Recovery(actor, context, [member.id for member in self._members])
        # This rank among those of its host.
        self._local_rank, self._local_size = actor.neighbours(context.ranks, context.rank)
        # The one `close`, for all who call it; None: not called.
        self._closing: asyncio.Task[None] | None = None

    # -- what it is -------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The name of the group."""
        return self._name

    @property
    def rank(self) -> int:
        """This rank, 0 to size - 1."""
        return self._context.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self._context.size

    @property
    def local_rank(self) -> int:
        """This rank's place among the ranks of this host."""
        return self._local_rank

    @property
    def local_size(self) -> int:
        """Number of ranks of this host."""
        return self._local_size

    @property
    def epoch(self) -> int:
        """Which membership of that name this is; a later one has a higher epoch."""
        return self._context.epoch

    @property
    def members(self) -> tuple[Member, ...]:
        """Who the ranks are, by rank."""
        return self._members

    @property
    def address(self) -> str:
        """The coordinator's address."""
        return self._actor.address

    @property
    def bytes_moved(self) -> tuple[int, int]:
        """Payload bytes sent to and received from all peers so far, over all transports."""
        return self._actor.endpoint.payload_bytes

    @property
    def lost(self) -> dict[int, str]:
        """The ranks that this one knows to be lost or to have left, and why. Who is not in it may
        have died without anybody having noticed: `agree` and `shrink` have all agree on that."""
        return dict(self._context.lost())

    @property
    def revoked(self) -> bool:
        """Whether a rank has revoked the group, as far as has been heard here."""
        return isinstance(self._context.ended, GroupRevokedError)

    @property
    def store(self) -> Store:
        """The group's key-value store, kept by the coordinator."""
        return self._actor.store

    def __repr__(self) -> str:
        state = " closed" if self.closed else ""
        return f"<Group {self._name!r} rank {self.rank} of {self.size} epoch {self.epoch}{state}>"

    # -- groups of some ranks ---------------------------------------------------------------------

    @started
    async def subgroup(self, ranks: Sequence[int], *, timeout: float | None = None) -> Group:
        """The group of `ranks`, in that order; to be called by these ranks alone.

        Independent of this group: it stays usable when this one is revoked or closed by others. As
        with `split` and `dup`, all ranks have it or none: one that another rank has revoked in the
        meantime is given as well, revoked.

        For example::

            if group.rank < 2:
                pair = await group.subgroup([0, 1])
                await pair.barrier()
        """
        self._check_loop()
        return await self._derive("subgroup", deriving.members(self._context, ranks), timeout)

    @started
    async def split(
        self, color: str | int | None, key: int | None = None, *, timeout: float | None = None
    ) -> Group | None:
        """Groups of the ranks that gave the same `color`, ordered by (key, rank).

        To be called by all ranks. None as color: no group, the result is None.

        For example::

            half = await group.split(group.rank % 2)
        """
        self._enter()
        part = await deriving.parts(self._context, color, key, timeout, self._decline)
        return None if part is None else await self._derive(*part, timeout)

    def _decline(self, part: deriving.Part, error: BaseException) -> None:
        kind, ranks = part
        layout = self._actor.layout([self._context.ranks[rank] for rank in ranks])
        deriving.decline(self._context, self._name, kind, ranks, layout, error)

    @started
    async def dup(self, *, timeout: float | None = None) -> Group:
        """Another group of the same ranks, whose operations match apart from this one's.

        For example::

            other = await group.dup()
            await asyncio.gather(group.barrier(), other.barrier())
        """
        self._check_loop()
        return await self._derive("dup", list(range(self.size)), timeout)

    async def _derive(self, kind: str, ranks: list[int], timeout: float | None) -> Group:
        parent = self._context
        try:
            parent.check_open()
            timeouts.check_timeout(timeout)
        except (TypeError, ValueError, GroupRevokedError) as error:
            self._decline((kind, ranks), error)
            raise
        layout = self._actor.layout([parent.ranks[rank] for rank in ranks])
        name = f"{self._name}/{kind.split()[0]}"
        context = await deriving.derive(parent, name, kind, ranks, layout, timeout)
        return Group(self._actor, context, name=name)

    # -- going on after a loss --------------------------------------------------------------------

    def revoke(self) -> None:
        """End the group for all ranks: pending and later operations raise `GroupRevokedError`.

        Any one rank may call it; the word is passed on until all who live have heard it. Groups
        made of this one go on, and so does this rank's membership: `agree`, `shrink` and
        `rendezvous` are for revoked groups, too. Idempotent.

        For example::

            if group.rank == 0:
                group.revoke()
        """
        self._check_loop()
        self._context.revoke(self.rank)

    @started
    async def agree(self, flag: bool = True, *, timeout: float | None = None) -> bool:
        """The AND of `flag` over the ranks that are alive: the same on all, whoever dies meanwhile.

        To be called by all ranks, in the order of their other `agree`, `shrink` and `rendezvous`;
        also of a group that lost ranks or was revoked. The coordinator decides once all ranks that
        it has not ruled lost have called. A call that is cancelled votes False. If one runs out of
        time, it fails on all that have not heard the outcome, with `CollectiveTimeoutError`.
        While the coordinator is away it waits; `CoordinatorLostError` where that never comes back.

        For example::

            if await group.agree(True):  # all have come this far
                pass
        """
        self._check_loop()
        try:
            if not isinstance(flag, bool):
                raise TypeError(f"flag is a bool, not {flag!r}")
            seconds = self._seconds(timeout)
        except (TypeError, ValueError) as error:
            self._recovery.refuse(error)
            raise
        return await self._recovery.agree(flag, seconds)

    @started
    async def shrink(self, *, timeout: float | None = None) -> Group:
        """The group of the survivors, in the order of their ranks, in the next epoch.

        To be called by all who live; the first call revokes this group. Fails as `agree` does; it
        can then be called again. After a cancelled call that came too late to stop the others, the
        next call gives the group that they have.

        For example::

            try:
                await group.barrier()
            except aiodist.GroupBrokenError:
                group = await group.shrink()
        """
        self._check_loop()
        return self._gone_on(await self._recovery.go_on(Purpose.SHRINK, self._seconds(timeout)))

    @started
    async def rendezvous(
        self,
        *,
        min_size: int | None = None,
        max_size: int | None = None,
        timeout: float | None = None,
    ) -> Group:
        """The group of the survivors, in the order of their ranks, and of those who wait to join,
        in the order of their arrival; in the next epoch.

        As `shrink`, but for the group that `connect` gave alone. Takes in as many as wait, up to
        `max_size` members; where that makes fewer than `min_size`, waits for more, and then until
        nobody has joined for the group's `join_window`. Both are those of `connect` where not
        given, and the same on all ranks. Survivors are never turned away.

        For example::

            group = await group.rendezvous(timeout=60)
        """
        self._check_loop()
        self._recovery.check_root("rendezvous")
        check_sizes(min_size, max_size)
        seconds = self._seconds(timeout)
        return self._gone_on(
            await self._recovery.go_on(Purpose.RENDEZVOUS, seconds, least=min_size, most=max_size)
        )

    async def views(self) -> AsyncIterator[View]:
        """``async for view in group.views()``: who is alive, lost, or waits to join; at once, and
        after every change, over all epochs, until this rank leaves. For the group that `connect`
        gave alone. Changes that come faster than they are asked for are seen in one.

        For example::

            async for view in group.views():
                print(len(view.members), "ranks live")
                break
        """
        self._check_loop()
        self._recovery.check_root("views")
        async for view in views(self._actor):
            yield view

    def _gone_on(self, context: Context) -> Group:
        context.records.unseen.update(self._unseen)  # the group that is closed is the newest
        return Group(self._actor, context, name=self._name, line=self._line)

    def _newest(self) -> Group:
        """What has become of this group by now."""
        return self._line.newest

    def _seconds(self, timeout: float | None) -> float:
        timeouts.check_timeout(timeout)
        return self._context.op_timeout if timeout is None else timeout

    # -- memory -----------------------------------------------------------------------------------

    @typed(Signatures.empty)
    def empty(self, shape: int | Sequence[int], dtype: Any = None, *, like: Any = None) -> Any:
        """A new array (zeros, at first) in memory that all ranks of this host can see.

        `dtype` is a dtype of numpy or torch, and says which kind of array it is; or `like` is an
        array whose kind and dtype it is to have. Collectives without a tag read such arrays, or
        contiguous parts of them, where they lie: `all_reduce` in place, `reduce_scatter`, and what
        `broadcast`, `all_gather`, `gather`, `scatter` and `all_to_all` move. For that all ranks
        whose data others need give such arrays, and the group is on one host, with 64 ranks at
        most. A message of over 64 KiB is read where it lies, too, and copied once: into the memory
        of the receive. Everywhere else they are arrays like others, and so are those beyond 4,096
        at a time. The memory lives as long as the array or a view of it.

        Raises TypeError for a dtype that does not travel, ValueError for a negative shape, OSError
        where the system has no memory to give.

        For example::

            x = group.empty((2, 3), np.float32)
        """
        self._enter()
        return self._context.heap.empty(shape, dtype, like)

    @started
    async def expose(
        self, x: Array | Buffer | None = None, *, timeout: float | None = None
    ) -> Window:
        """Let all ranks read and write the memory of `x`, a numpy array, a buffer or a tensor on
        the CPU; None: nothing of this rank. A collective. See docs/windows.md for what holds.

        Raises TypeError and ValueError for what cannot be written in place, on that rank; the
        others then have CollectiveAbortedError.

        For example::

            window = await group.expose(np.zeros(4))
            await window.put(0, group.rank, 1.5)  # x[rank] = 1.5, at rank 0
            await window.close()
        """
        self._check_loop()
        own = await self._derive("expose", list(range(self.size)), timeout)
        return await opened(own, own.close, own.abort, x, timeout)

    # -- threads ----------------------------------------------------------------------------------

    def blocking(self) -> BlockingGroup:
        """The operations of this group as ordinary calls, for other threads than the loop's.

        For example::

            ranks = await asyncio.to_thread(group.blocking().all_gather, group.rank)
        """
        return BlockingGroup(self, Home.of(self._loop))

    # -- the end ----------------------------------------------------------------------------------

    async def close(self) -> None:
        """Wait for what is pending, then leave the group. Idempotent.

        A rank that closes the group it got from `connect` closes with it, for itself, all groups
        that were made of it. It leaves once all that it has sent is with those it is for, however
        busy they are; ranks that are lost are not waited for.

        Raises CollectiveTimeoutError, having left, if somebody had not taken all within the group's
        `op_timeout`: `.missing` says who.

        For example::

            await group.close()
        """
        self._check_loop()
        unseen = self._all_unseen() if self._closing is None else []
        if self._closing is None:
            # A task of its own, behind a shield: whoever is cancelled while it waits must not break
            # off what others wait for, nor leave the group half closed.
            self._closing = self._loop.create_task(self._close(), name="aiodist close")
        try:
            for works in unseen:
                works.tell()  # before closing waits for them
        finally:  # where warnings are errors
            await asyncio.shield(self._closing)

    async def _close(self) -> None:
        context = self._context
        if context.ended is None:
            # Again and again, for what ends may begin something else: the program goes on
            # meanwhile.
            while pending := self._pending():
                await asyncio.wait(pending)
            context.close(self._context.error(GroupClosedError, "the group was closed"))
        if context is self._actor.context:
            await self._actor.leave()

    def _pending(self) -> list[Work[Any]]:
        return [work for context in self._contexts() for work in context.pending if not work.done()]

    def _contexts(self) -> list[Context]:
        """Those that end with this group."""
        is_root = self._context is self._actor.context
        return self._actor.contexts if is_root else [self._context]

    def _all_unseen(self) -> list[Unseen]:
        """The Works that have to be looked at before this group ends."""
        found = [context.records.unseen for context in self._contexts()]
        if self._context is self._actor.context:
            found.append(self.store._unseen)
        return found

    def abort(self, reason: str = "aborted") -> None:
        """Leave at once: what is pending fails, here and on the other ranks, for which this rank is
        lost, for that reason. The coordinator logs that as no crash. Idempotent.

        For example::

            if group.rank == 0:
                group.abort("the disk is full")
        """
        self._check_loop()
        for works in self._all_unseen():
            works.mute()
        reason = failures.sayable(reason)
        error = self._context.error(GroupClosedError, f"the group was aborted: {reason}")
        self._context.close(error, abort=True)
        if self._context is self._actor.context:
            self._actor.abort(reason)

    async def __aenter__(self) -> Group:
        if self._line.keeper is not None:
            self._line.keeper.entered(self)
        return self

    async def __aexit__(
        self, kind: object, error: BaseException | None, trace: object
    ) -> bool | None:
        if self._line.keeper is not None and self._line.keeper.left(error):
            return True
        if error is None:
            await self.close()
        else:
            self.abort(in_words(error))
            await self._actor.gone()
        return None
