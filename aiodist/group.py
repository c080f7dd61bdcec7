"""The public `Group`: its operations, its members, groups made of it, its epochs and its end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np

from aiodist import timeouts
from aiodist.blocking.calls import Home
from aiodist.blocking.group import BlockingGroup
from aiodist.composing import started
from aiodist.control.store import Store
from aiodist.engine import failures
from aiodist.errors import (
    CollectiveTimeoutError,
    GroupClosedError,
    GroupRevokedError,
    despite_errors,
    in_words,
)
from aiodist.operations import Operations
from aiodist.phases.base import Call, as_shape, barrier
from aiodist.rank import deriving, untaken
from aiodist.rank.actor import RankActor, as_member
from aiodist.rank.context import Context
from aiodist.rank.recovery import Recovery, check_sizes
from aiodist.rank.views import views
from aiodist.signatures import Array, Buffer, Signatures, typed
from aiodist.types import Member, View
from aiodist.windows.window import Window, offered
from aiodist.wire.recovery import Purpose
from aiodist.work import Unseen, Work


class EpochKeeper(Protocol):
    """Provides one epoch after the other: see `aiodist.epochs`."""

    def entered(self, group: Group) -> None:
        """Notes that the program has entered ``async with group``."""
        ...

    async def left(self, error: BaseException | None) -> bool:
        """Notes how the program has left that. True: this rank stays a member, because another
        epoch follows."""
        ...


class _Line:
    """The newest of the groups that came from each other by `shrink` or `rendezvous`.

    The older ones are not kept, because each would keep the memory of its epoch.
    """

    newest: Group
    keeper: EpochKeeper | None = None


class Group(Operations):
    """Ranks that communicate. Get a group from `aiodist.connect`, `run`, `local`, or another group.

    **Operations** start when you call them, and return a `Work`. Await it for the result. They take
    these two arguments:

    * `tag`: None, a str of at most 1024 bytes in UTF-8, or an int of 64 bits. Calls of the ranks
      match by tag, and in their order within one tag. `agree`, and what makes a group or a window,
      has no `tag`.
    * `timeout`: seconds until the call fails. None: the group's `op_timeout`. `math.inf`: never.

    **Values** are numpy arrays, torch tensors, anything with `__dlpack__`, and trees of dict, list,
    tuple, str, bytes, None, bool, int, float, complex and arrays. An `array.array`, bytearray or
    memoryview counts as an array, and arrives as a numpy array. A subclass of one of these types,
    such as OrderedDict or IntEnum, arrives as the plain type. Masked arrays and named tuples are
    refused, and trees of more than 100 levels. New arrays have the byte order of this machine.

    **Wrong arguments** raise TypeError or ValueError at the call. The call of a collective still
    counts in the order: the Works of the other ranks fail with `CollectiveAbortedError`, and the
    next calls match each other. These calls do not count, so the other ranks wait:

    * A call with a bad tag, because it has no order.
    * A call of `subgroup` with bad `ranks`, because they do not say which ranks wait.
    * A call that Python itself refuses: it has too few or too many positional arguments, or an
      unknown name in an operation without `tag`.
    * A call from another event loop, which raises RuntimeError.
    * A call after the group has ended, which raises what ended it.

    **Works fail** with `PeerLostError`, `CollectiveTimeoutError`, `CollectiveAbortedError`,
    `MismatchError`, `MessageTooLargeError`, `ProtocolError` (a rank sent something that makes no
    sense) or `GroupClosedError`.
    """

    def __init__(
        self, actor: RankActor, context: Context, *, name: str, line: _Line | None = None
    ) -> None:
        super().__init__(context, actor.loop)
        self._line = line or _Line()  # knows the newest group of this name
        self._line.newest = self
        self._actor = actor
        self._name = name
        # By rank, including those that are gone.
        self._members = tuple(
            as_member(actor.people[root], rank) for rank, root in enumerate(context.ranks)
        )
        # Agree, shrink and rendezvous.
        self._recovery = Recovery(actor, context, [member.id for member in self._members])
        # This rank's place on its host.
        self._local_rank, self._local_size = actor.neighbours(context.ranks, context.rank)
        # One `close` for all callers. None: not called yet.
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
        """The number of ranks."""
        return self._context.size

    @property
    def local_rank(self) -> int:
        """This rank's place among the ranks of this host."""
        return self._local_rank

    @property
    def local_size(self) -> int:
        """The number of ranks on this host."""
        return self._local_size

    @property
    def epoch(self) -> int:
        """The number of this membership. Later memberships of the same name have higher numbers."""
        return self._context.epoch

    @property
    def members(self) -> tuple[Member, ...]:
        """The members, by rank."""
        return self._members

    @property
    def address(self) -> str:
        """The coordinator's address."""
        return self._actor.address

    @property
    def bytes_moved(self) -> tuple[int, int]:
        """The payload bytes sent to and received from all peers so far, over all transports."""
        return self._actor.endpoint.traffic.payload

    @property
    def lost(self) -> dict[int, str]:
        """The ranks that this rank knows to be lost or to have left, each with the reason.

        Other ranks may have died without a sign so far. After `shrink` or `rendezvous` all
        survivors know the same ranks. `agree` gives all ranks the same answer.
        """
        return dict(self._context.lost())

    @property
    def revoked(self) -> bool:
        """Whether a rank has revoked the group, as far as this rank has heard."""
        return self._context.is_revoked

    @property
    def store(self) -> Store:
        """The group's key-value store, which the coordinator keeps."""
        return self._actor.store

    def __repr__(self) -> str:
        state = " closed" if self.closed else ""
        return f"<Group {self._name!r} rank {self.rank} of {self.size} epoch {self.epoch}{state}>"

    # -- groups of some ranks ---------------------------------------------------------------------

    @started
    async def subgroup(self, ranks: Sequence[int], *, timeout: float | None = None) -> Group:
        """Make a group of `ranks`, in that order. Only these ranks call this.

        `src` and `dst` of its operations are ranks of the new group: ``ranks.index(rank)`` is that
        of a `rank` of this group. (torch sorts `ranks`, and takes ranks of the world.)

        The new group is independent: it stays usable if this one is revoked, or closed by other
        ranks. Either all of the ranks get it or none, as with `split` and `dup`. If a rank
        gives up in the last moment, it may have left the group that others get. If another rank
        has revoked it meanwhile, you get it revoked.

        Close the new group when you no longer need it, for example by ``async with pair:``. A group
        that is only dropped keeps its sockets and its memory until the one of `connect` ends.

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
        """Make a group of the ranks that give the same `color`, ordered by (key, rank).

        All ranks call this. A rank that gives None as color gets no group, and None as the result.
        Close the new group when you no longer need it (see `subgroup`).

        For example::

            half = await group.split(group.rank % 2)
        """
        self._enter()
        part = await deriving.parts(self._context, color, key, timeout, self._decline)
        return None if part is None else await self._derive(*part, timeout)

    def _decline(self, part: deriving.Part, error: BaseException) -> None:
        kind, ranks = part
        roots = [self._context.ranks[rank] for rank in ranks]
        if not self._actor.people.keys() >= {*roots}:
            return  # this group has gone on without a lost member of the part: no rank waits in it
        layout = self._actor.layout(roots)
        deriving.decline(self._context, self._name_of(kind), kind, ranks, layout, error)

    def _name_of(self, kind: str) -> str:
        """Return the name of the groups of this kind that are made of this one."""
        return f"{self._name}/{kind.split()[0]}"

    @started
    async def dup(self, *, timeout: float | None = None) -> Group:
        """Make another group of the same ranks. Its operations do not match those of this group.

        Close it when you no longer need it (see `subgroup`).

        For example::

            other = await group.dup()
            await asyncio.gather(group.barrier(), other.barrier())
        """
        self._check_loop()
        return await self._derive("dup", list(range(self.size)), timeout)

    async def _derive(self, kind: str, ranks: list[int], timeout: float | None) -> Group:
        return (await self._derived(kind, ranks, timeout, barrier))[0]

    async def _derived(
        self,
        kind: str,
        ranks: list[int],
        timeout: float | None,
        meeting: Callable[[Context], Call],
    ) -> tuple[Group, Any]:
        parent = self._context
        try:
            parent.check_open()
            timeouts.check_timeout(timeout)
        except (TypeError, ValueError, GroupRevokedError) as error:
            self._decline((kind, ranks), error)
            raise
        layout = self._actor.layout([parent.ranks[rank] for rank in ranks])
        name = self._name_of(kind)
        context, result = await deriving.derive(parent, name, kind, ranks, layout, timeout, meeting)
        return Group(self._actor, context, name=name), result

    # -- going on after a loss --------------------------------------------------------------------

    def revoke(self) -> None:
        """End the group for all ranks. Pending and later operations raise `GroupRevokedError`.

        A single rank may call this. Ranks pass it on until all living ranks have heard it. Groups
        made of this one go on, and this rank stays a member. You can still call `agree`, `shrink`
        and `rendezvous`. A second call does nothing.

        For example::

            if group.rank == 0:
                group.revoke()
        """
        self._check_loop()
        self._context.revoke(self.rank)

    @started
    async def agree(self, flag: bool = True, *, timeout: float | None = None) -> bool:
        """Return the AND of `flag` over all living ranks. All get the same answer, even if some die
        meanwhile.

        All ranks call this, in the same order as `shrink` and `rendezvous`. It works on groups that
        lost ranks or were revoked, too. The coordinator decides when all ranks have called that it
        has not ruled lost. A call that is cancelled before that votes False. While the coordinator
        is away, the call waits. If its time ends meanwhile, the others get False or
        CollectiveTimeoutError.

        Raises:
            CollectiveTimeoutError: a rank ran out of time. All ranks that have not heard the answer
                get this error.
            CoordinatorLostError: the coordinator never comes back.
            GroupRevokedError: another rank calls `shrink` or `rendezvous` instead.
            TypeError: `flag` is not a bool.

        For example::

            if await group.agree(True):  # all have come this far
                pass
        """
        self._check_loop()
        with self._recovery.checking(Purpose.AGREE):
            if not isinstance(flag, (bool, np.bool_)):
                raise TypeError(f"flag is a bool, not {flag!r}")
            seconds = self._seconds(timeout)
        return await self._recovery.agree(bool(flag), seconds)

    @started
    async def shrink(self, *, timeout: float | None = None) -> Group:
        """Make the group of the survivors, in the order of their ranks, in the next epoch.

        All living ranks call this. The first call revokes this group, unless the coordinator is
        gone for good. It fails as `agree` does, and can be called again then. If you cancel a call
        too late to stop the others, your next call returns the group that they have.

        For example::

            try:
                await group.barrier()
            except aiodist.GroupBrokenError:
                group = await group.shrink()
        """
        self._check_loop()
        with self._recovery.checking(Purpose.SHRINK):
            seconds = self._seconds(timeout)
        return self._gone_on(await self._recovery.go_on(Purpose.SHRINK, seconds))

    @started
    async def rendezvous(
        self,
        *,
        min_size: int | None = None,
        max_size: int | None = None,
        timeout: float | None = None,
    ) -> Group:
        """Make the group of the survivors and of the ranks that wait to join, in the next epoch.

        Survivors come first, in the order of their ranks, and are never turned away. Joiners follow
        in the order of their arrival, up to `max_size` members in all. If there are fewer than
        `min_size`, the call waits for more, and then until no rank has joined for the group's
        `join_window`. Both sizes default to those of `connect`, and must be the same on all ranks.
        A default never contradicts the other size: with `min_size` alone, the group may grow to
        that size, and with `max_size` alone, no more are awaited.

        All living ranks call this, as `shrink`, but only on a group that `connect` gave.

        For example::

            group = await group.rendezvous(timeout=60)
        """
        self._check_loop()
        self._recovery.check_root("rendezvous")
        with self._recovery.checking(Purpose.RENDEZVOUS):
            check_sizes(min_size, max_size)
            seconds = self._seconds(timeout)
        return self._gone_on(
            await self._recovery.go_on(Purpose.RENDEZVOUS, seconds, least=min_size, most=max_size)
        )

    async def views(self) -> AsyncIterator[View]:
        """Iterate over views of the members: ``async for view in group.views()``.

        A view says which ranks live, are lost, or wait to join. The first one comes at once, the
        next ones after each change, over all epochs, until this rank closes the group. If changes
        come faster than you ask, one view has several of them. Only for a group that `connect`
        gave.

        Raises GroupClosedError if the group ends here in another way, for example because the
        coordinator removes this rank. Raises CoordinatorLostError if the coordinator is gone for
        good.

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
        context.records.unseen.update(self._unseen)  # only the newest group is closed
        return Group(self._actor, context, name=self._name, line=self._line)

    def _newest(self) -> Group:
        """Return the group that came from this one by now."""
        return self._line.newest

    def _seconds(self, timeout: float | None) -> float:
        timeouts.check_timeout(timeout)
        return self._context.op_timeout if timeout is None else timeout

    # -- memory -----------------------------------------------------------------------------------

    @typed(Signatures.empty)
    def empty(self, shape: int | Sequence[int], dtype: Any = None, *, like: Any = None) -> Any:
        """Make an array of zeros in memory that all ranks of this host can see.

        Collectives without a tag read such an array, or a contiguous part of it, in its place, so
        that nothing is copied to staging buffers. These are `all_reduce` in place,
        `reduce_scatter`, and the data of `broadcast`, `all_gather`, `gather`, `scatter` and
        `all_to_all`. All ranks whose data others need must give such arrays, and the group must be
        on one host, with at most 64 ranks. A message of more than 64 KiB is also read in its place,
        and copied once, into the memory of the receive.

        Anywhere else it is an ordinary array. So is any array beyond 4,096 at a time, or if arrays
        that others have yet to map take half of the files that this process may open. They map them
        while their event loops run. The memory lives as long as the array or a view of it.

        Args:
            shape: an int, or a sequence of ints.
            dtype: a dtype of numpy or torch, which decides the kind of array that you get.
            like: an array whose kind and dtype the new one has, in place of `dtype`.

        Raises:
            TypeError: arrays of this dtype cannot be sent.
            ValueError: a size in `shape` is negative.
            OSError: the system has no memory left, or the process has no file left.

        For example::

            x = group.empty((2, 3), np.float32)
        """
        self._enter()
        return self._context.heap.empty(as_shape(shape), dtype, like)

    @started
    async def expose(
        self, x: Array | Buffer | None = None, *, timeout: float | None = None
    ) -> Window:
        """Let all ranks read and write the memory of `x`. A collective. docs/windows.md has the
        rules.

        `x` is a numpy array, a buffer, or a tensor on the CPU. None: this rank exposes nothing.

        Raises TypeError or ValueError on this rank if `x` cannot be written in place. The other
        ranks get CollectiveAbortedError then.

        Close the window when you no longer need it: one that is only dropped keeps its memory until
        the group of `connect` ends.

        For example::

            window = await group.expose(np.zeros(4))
            await window.put(0, group.rank, 1.5)  # x[rank] = 1.5, at rank 0
            await window.close()
        """
        self._check_loop()
        meeting = partial(offered, x)
        own, told = await self._derived("expose", list(range(self.size)), timeout, meeting)
        return Window(own, own.close, own.abort, told or [], x)

    # -- threads ----------------------------------------------------------------------------------

    def blocking(self) -> BlockingGroup:
        """Return the operations of this group as ordinary calls, for threads other than the loop's.

        Raises GroupClosedError if the group has ended here.

        For example::

            ranks = await asyncio.to_thread(group.blocking().all_gather, group.rank)
        """
        # In a forked child the loop does not run, so no later call could raise it.
        if isinstance(self._context.ended, GroupClosedError):
            self._context.check_open()
        return BlockingGroup(self, Home.of(self._loop))

    # -- the end ----------------------------------------------------------------------------------

    async def close(self) -> None:
        """Wait for everything that is pending, then leave the group. A second call ends as the
        first one.

        If `connect` gave this group, all groups that this rank made of it close, too. This rank
        leaves once all its data has reached the receivers, even if they are busy. It does not wait
        for lost ranks.

        Raises CollectiveTimeoutError if ranks have not taken all data within the group's
        `op_timeout`, or by the `timeout` of a send. `.missing` names them. Raises PeerLostError if
        a receiver leaves or is lost while this waits for a send to it. A send that a task awaits
        when this is called raises its error there, and not here. This rank has left in all cases.

        For example::

            await group.close()
        """
        self._check_loop()
        unseen = self._all_unseen() if self._closing is None else []
        if self._closing is None:
            # In a task of its own, behind a shield. If one caller is cancelled while it waits, the
            # other callers still wait for the same close, and the group is not left half closed.
            self._closing = self._loop.create_task(self._close(), name="aiodist close")
        try:
            for works in unseen:
                works.tell()  # now, because closing waits for them
        finally:  # if warnings are errors
            await asyncio.shield(self._closing)

    async def _close(self) -> None:
        context = self._context
        waited: dict[Work[Any], Context] = {}
        left: CollectiveTimeoutError | None = None
        closed = context.error(GroupClosedError, "the group was closed", in_order=True)
        # In a loop, because the program goes on: the end of one operation may begin another one.
        while pending := self._pending():
            waited |= {work: one for work, one in pending.items() if not work.is_awaited}
            await asyncio.wait(pending)
        context.close(closed)
        if context is self._actor.context:
            try:
                await self._actor.leave()
            except CollectiveTimeoutError as error:
                left = error
        if (untold := untaken.error_of(context, waited, left)) is not None:
            raise untold

    def _pending(self) -> dict[Work[Any], Context]:
        """Return the Works to wait for before this group closes, with the group of each."""
        # Groups that were made of a revoked group go on.
        contexts = [one for one in self._contexts() if one.ended is None]
        return {work: one for one in contexts for work in one.pending if not work.done()}

    def _contexts(self) -> list[Context]:
        """Return the contexts that end with this group."""
        is_root = self._context is self._actor.context
        return self._actor.contexts if is_root else [self._context]

    def _all_unseen(self) -> list[Unseen]:
        """Return the Works that the program should look at before this group ends."""
        found = [context.records.unseen for context in self._contexts()]
        if self._context is self._actor.context:
            found.append(self.store._unseen)
        return found

    def abort(self, reason: str = "aborted") -> None:
        """Leave at once. What is pending fails, on this rank and on the others.

        The others see this rank as lost, with `reason`. The coordinator does not log a crash. A
        second call does nothing.

        For example::

            if group.rank == 0:
                group.abort("the disk is full")
        """
        self._check_loop()
        for works in self._all_unseen():
            works.mute()
        reason = failures.sayable(reason)
        error = self._context.error(GroupClosedError, f"the group was aborted: {reason}")
        ends = [partial(self._context.close, error, abort=True)]
        if self._context is self._actor.context:
            ends.append(partial(self._actor.abort, reason))
        elif self._context.ended is None:
            # The coordinator does not know of groups that were made of others.
            ends.append(partial(self._context.tell_unlinked, error.message))
        despite_errors(*ends)

    async def __aenter__(self) -> Group:
        if self._line.keeper is not None:
            self._line.keeper.entered(self)
        return self

    async def __aexit__(
        self, kind: object, error: BaseException | None, trace: object
    ) -> bool | None:
        if self._actor.is_inherited:
            return None
        keeper, stays = self._line.keeper, False
        try:
            stays = keeper is not None and await keeper.left(error)
        finally:  # also if this task is cancelled meanwhile
            newest = self._newest()  # the block may have said `group = await group.shrink()`
            if error is not None and not stays:
                if isinstance(error, Exception) and newest._context is self._actor.context:
                    self._actor.endpoint.recorder.left(error)
                newest.abort(in_words(error))
        if stays:
            return True
        if error is None:
            await newest.close()
        else:
            await self._actor.gone()
        return None
