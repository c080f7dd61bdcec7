"""`Keeper` keeps one membership alive, for `aiodist.epochs` and `aiodist.lifespan`.

An epoch is over when its group is revoked, or when this rank is no longer a member. Any rank may
end it for all: a rank whose operation failed because another was lost, or rank 0 if a rank waits to
join. All ranks then meet at a rendezvous. A rank that was evicted joins anew.
"""

from __future__ import annotations

import asyncio
import logging

from aiodist.errors import (
    AiodistError,
    CollectiveAbortedError,
    CollectiveTimeoutError,
    CoordinatorLostError,
    GroupBrokenError,
    GroupClosedError,
    RankTakenError,
    in_words,
    leaves,
)
from aiodist.group import Group
from aiodist.session import Connecting
from aiodist.types import View

log = logging.getLogger("aiodist.services")

_RECOVERABLE = (GroupBrokenError, CollectiveAbortedError, CoordinatorLostError)
"""Errors after which there is a next epoch. Timeouts and mismatches are not among them, because
they would come back in every epoch."""

PATIENCE = 1.0
"""How many seconds a body may take to notice that its epoch is over, before it is cancelled. Also
how long the end of an epoch may be heard of after an error of another group."""

_SHORTEST = 0.001
"""With less than this many seconds left, there is no further try."""


class Keeper:
    """Gives the groups that `connecting` leads to, over all epochs.

    `admit`: end the epoch if a rank waits to join and there is room. `eager`: end it also as soon
    as a rank is lost or leaves, and not only when an operation needs that rank. `patience`: the
    seconds until a body that waits for something else is cancelled.
    """

    def __init__(
        self,
        connecting: Connecting,
        *,
        admit: bool = True,
        eager: bool = False,
        patience: float = PATIENCE,
    ) -> None:
        self.group: Group | None = None
        """The group of the newest epoch; None if this rank has not joined."""
        self.over = asyncio.Event()
        """Set while no epoch is going on."""
        self.over.set()
        self.op_timeout = connecting.op_timeout
        self._connecting = connecting
        self._admit = admit
        self._eager = int(eager)  # the epoch ends as soon as a rank is gone, if this is not 0
        self._patience = patience
        self._watch: asyncio.Task[None] | None = None  # hears which ranks are lost, and which wait
        self._view: View | None = None  # the newest
        # calls for a rendezvous after the join window
        self._calling: asyncio.TimerHandle | None = None
        self._body: asyncio.Task[object] | None = None  # the task that runs `async with group`
        self._cancelling = 0  # its `cancelling()` when the body began
        self._hurry: asyncio.TimerHandle | None = None  # cancels the body
        self._interrupted = False

    async def next(self) -> Group | None:
        """Return the group of the next epoch; None if this rank has left by `Group.close` or
        `abort`.

        Raises what `connect` raises, and CollectiveTimeoutError if the next epoch has not formed
        within the timeout of `connect`. You can call it again then. If watching the members failed,
        that error is raised, because this rank has left for it.
        """
        group = self.group
        if group is None:
            return self._begin(await self._join())
        if self._has_left(group):
            return None
        try:
            return self._begin(await self._gone_on(group))
        except (GroupClosedError, CoordinatorLostError) as error:
            if group._actor.has_quit and self._has_left(group):
                return None
            log.warning("joining again as a new member: %s", error)
            await self._forget(group)
        return self._begin(await self._join())

    def _has_left(self, group: Group) -> bool:
        """Whether this rank has left, and was not removed. Raises what watching the members has
        raised."""
        actor = group._actor
        if not actor.is_over or (actor.is_evicted and not actor.has_quit):
            return False
        if self._watch is not None and self._watch.done() and not self._watch.cancelled():
            self._watch.result()
        return True

    async def end(self) -> None:
        """Leave, if this rank is still a member."""
        if self.group is not None and self.group._actor.is_inherited:
            return
        if self._watch is not None:
            self._watch.cancel()
        if self._calling is not None:
            self._calling.cancel()
        if self.group is not None and not self.group._actor.is_over:
            await self.group.close()
        if self._watch is not None and not self._watch.done():
            await asyncio.wait({self._watch})

    async def _gone_on(self, group: Group) -> Group:
        """Return the group that follows `group`."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._connecting.timeout
        while True:
            try:
                return await group.rendezvous(timeout=deadline - loop.time())
            except (CollectiveAbortedError, CollectiveTimeoutError):
                # Usually another rank gave up, or began to wait long before this one.
                if loop.time() + _SHORTEST >= deadline:
                    raise

    async def _join(self) -> Group:
        try:
            return await self._connecting
        except RankTakenError:
            # The number of this process belongs to a rank of an earlier epoch, because ranks move
            # up.
            self._connecting = self._connecting.without_rank()
            return await self._connecting

    async def _forget(self, group: Group) -> None:
        """Forget the group: this rank was evicted, or the coordinator is gone."""
        group.revoke()  # so that the other ranks join again, too
        group.abort("this rank joins again")
        await group._actor.gone()
        self.group = None
        self._connecting = self._connecting.without_rank()

    # The present epoch.

    def _begin(self, group: Group) -> Group:
        if self.group is None:  # a new membership
            self._view = None
            if self._watch is not None:
                self._watch.cancel()
            loop = asyncio.get_running_loop()
            self._watch = loop.create_task(self._heed(group), name="aiodist keeper")
            self._watch.add_done_callback(self._heeded)
        self.group = group
        self.over = asyncio.Event()
        group._line.keeper = self
        group._context.on_end = self._ended
        if group.closed:  # it may have been revoked before we listened
            self.over.set()
        self._judge()
        return group

    def entered(self, group: Group) -> None:
        """Hear that the body of this epoch begins, with `async with group`."""
        self._body = asyncio.current_task()
        assert self._body is not None
        self._cancelling = self._body.cancelling()
        self._interrupted = False
        if self.over.is_set():
            self._remind()

    async def left(self, error: BaseException | None) -> bool:
        """Hear that the body has ended, with `error` or well. True: another epoch follows."""
        body, self._body = self._body, None
        if self._hurry is not None:
            self._hurry.cancel()
        if self._interrupted:
            assert body is not None
            interrupts = body.uncancel() > self._cancelling  # the task is cancelled by others, too
            if isinstance(error, asyncio.CancelledError):
                return not interrupts
        return error is not None and self.group is not None and await self.ends(self.group, error)

    async def ends(self, group: Group, error: BaseException) -> bool:
        """Tell whether `error` means that the epoch of `group` is over and another one follows.

        An error of another group, also of one made of `group`, does so only if `group` has ended or
        lost a rank, too. That may be heard of a moment later.
        """
        found = list(leaves(error))
        kinds: tuple[type[BaseException], ...] = _RECOVERABLE
        if group is not self.group or group._actor.is_evicted:
            kinds = (*kinds, GroupClosedError)
        if not all(isinstance(one, kinds) for one in found):
            return False
        if all(_is_of(group, one) for one in found):
            return True
        if group.closed or group.lost or not group._actor.control.is_open:
            return True
        over = self.over
        self._eager += 1
        self._judge()
        try:
            async with asyncio.timeout(PATIENCE):
                await over.wait()
        except TimeoutError:
            return False
        finally:
            self._eager -= 1
        return True

    def _ended(self) -> None:
        self.over.set()
        if self._body is not None:
            self._remind()

    def _remind(self) -> None:
        """Cancel the body soon, because a body that is in no operation does not hear of the end."""
        loop = asyncio.get_running_loop()
        self._hurry = loop.call_later(self._patience, self._interrupt)

    def _interrupt(self) -> None:
        if self._body is not None:
            self._interrupted = True
            self._body.cancel()

    # Ranks that come and go.

    async def _heed(self, group: Group) -> None:
        try:
            async for self._view in group.views():
                self._judge()
        except AiodistError as error:
            # This rank was evicted, or there is no coordinator. `next` handles both.
            log.debug("group %r: no news of its members: %s", group.name, error)

    def _heeded(self, watch: asyncio.Task[None]) -> None:
        """Hear that the task that watches members has ended.

        After an unexpected error this rank leaves, because otherwise the epoch would go on and
        ranks that want to join would wait for ever.
        """
        if watch.cancelled() or (error := watch.exception()) is None or self.group is None:
            return
        log.error("group %r: no news of its members any more", self.group.name, exc_info=error)
        self.group.abort(f"it hears of no changes of its members any more: {in_words(error)}")

    def _judge(self) -> None:
        """Revoke the group if there is a reason for a rendezvous.

        Called for a new view and for a new group, because either may come first.
        """
        if self._calling is not None:
            self._calling.cancel()
            self._calling = None
        view, group = self._view, self.group
        if view is None or group is None or view.epoch != group.epoch or group.closed:
            return
        if self._eager and (view.lost or view.left):
            group.revoke()
        elif self._admit and self._takes(view, group):
            # A little later, because more ranks may come right behind.
            loop = asyncio.get_running_loop()
            self._calling = loop.call_later(self._connecting.join_window, self._call, group)

    def _takes(self, view: View, group: Group) -> bool:
        """Tell whether a rank waits that has room, and this rank is the one that calls the
        rendezvous."""
        has_room = len(view.members) < self._connecting.most
        return view.waiting > 0 and has_room and view.members[0].rank == group.rank

    def _call(self, group: Group) -> None:
        if not group.closed:
            group.revoke()


def _is_of(group: Group, error: BaseException) -> bool:
    """Tell whether `error` is one of this group in this epoch, or the program has made it."""
    return (
        isinstance(error, AiodistError)
        and error.group in (None, group.name)
        and error.epoch in (None, group.epoch)  # the control connection knows no epochs
    )
