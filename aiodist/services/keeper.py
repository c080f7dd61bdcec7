"""Keeps one membership alive: what is behind `aiodist.epochs` and `aiodist.lifespan`.

An epoch is over when its group is revoked, or this rank is a member no more. Any rank may end it
for all: one whose operation failed because another rank was lost, or the first one, once somebody
waits to join. All of them then meet at a rendezvous, and whoever was turned out joins anew.
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
)
from aiodist.group import Group
from aiodist.session import Connecting
from aiodist.types import View

log = logging.getLogger("aiodist.services")

_RECOVERABLE = (GroupBrokenError, CollectiveAbortedError, CoordinatorLostError)
"""After these there is a next epoch. Deadlines and mismatches are none of them: they come back in
every epoch."""

PATIENCE = 1.0
"""Seconds that a body may take to notice that its epoch is over, before it is cancelled."""

_SHORTEST = 0.001
"""Seconds: who has no more than these left for another try has none."""


class Keeper:
    """One membership after the other of the group that `connecting` leads to, over all epochs.

    `admit`: end the epoch once somebody waits to join, and is not turned away. `eager`: end it also
    as soon as a rank is lost or has left, not only when an operation needs that. `patience`: after
    how many seconds a body that waits for something else is cancelled.
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
        """That of the newest epoch; None: this rank has not joined."""
        self.over = asyncio.Event()
        """Set when that epoch is over; at first, too."""
        self.over.set()
        self._connecting = connecting
        self._admit = admit
        self._eager = eager
        self._patience = patience
        self._watch: asyncio.Task[None] | None = None  # hears who is lost, and who waits
        self._view: View | None = None  # the newest
        self._calling: asyncio.TimerHandle | None = None  # calls for a rendezvous, a little later
        self._body: asyncio.Task[object] | None = None  # what runs in `async with group`
        self._cancelling = 0  # how often that had been cancelled by others when it began
        self._hurry: asyncio.TimerHandle | None = None  # cancels it
        self._interrupted = False

    async def next(self) -> Group | None:
        """The group of the next epoch; None if this rank has left by `Group.close` or `abort`.

        Raises what `connect` does, and CollectiveTimeoutError if the next epoch has not formed
        within the deadline of `connect`: then it can be called again. What has kept it from hearing
        who comes and goes, for which this rank has left, is raised as it is.
        """
        group = self.group
        if group is not None and group._actor.is_over and not group._actor.is_evicted:
            if self._watch is not None and self._watch.done() and not self._watch.cancelled():
                self._watch.result()
            return None
        if group is not None:
            try:
                return self._begin(await self._gone_on(group))
            except (GroupClosedError, CoordinatorLostError) as error:
                log.warning("joining again as a new member: %s", error)
                await self._forget(group)
        return self._begin(await self._join())

    async def end(self) -> None:
        """Leave, if this rank is still a member."""
        if self._watch is not None:
            self._watch.cancel()
        if self._calling is not None:
            self._calling.cancel()
        if self.group is not None and not self.group._actor.is_over:
            await self.group.close()
        if self._watch is not None and not self._watch.done():
            await asyncio.wait({self._watch})

    async def _gone_on(self, group: Group) -> Group:
        """What becomes of `group`."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._connecting.timeout
        while True:
            try:
                return await group.rendezvous(timeout=deadline - loop.time())
            except (CollectiveAbortedError, CollectiveTimeoutError):
                # Of another rank, as a rule, that gave up, or was there long before this one.
                if loop.time() + _SHORTEST >= deadline:
                    raise

    async def _join(self) -> Group:
        try:
            return await self._connecting
        except RankTakenError:
            # That of its number among the processes is of an earlier epoch: ranks move up.
            self._connecting = self._connecting.without_rank()
            return await self._connecting

    async def _forget(self, group: Group) -> None:
        """This rank is a member no more, or there is no coordinator to be a member of."""
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
        if group.closed:  # the word that it is over has come before
            self.over.set()
        self._judge()
        return group

    def entered(self, group: Group) -> None:
        """The body of this epoch begins: `async with group`."""
        self._body = asyncio.current_task()
        assert self._body is not None
        self._cancelling = self._body.cancelling()
        self._interrupted = False
        if self.over.is_set():
            self._remind()

    def left(self, error: BaseException | None) -> bool:
        """The body of this epoch has ended, by `error` or well. True: another epoch follows."""
        body, self._body = self._body, None
        if self._hurry is not None:
            self._hurry.cancel()
        if self._interrupted:
            assert body is not None
            interrupts = body.uncancel() > self._cancelling  # somebody else cancels it, too
            if isinstance(error, asyncio.CancelledError):
                return not interrupts
        return error is not None and self.is_recoverable(error)

    def is_recoverable(self, error: BaseException) -> bool:
        """Whether `error` means that the epoch is over, and another one follows."""
        if isinstance(error, BaseExceptionGroup):
            return all(map(self.is_recoverable, error.exceptions))
        if isinstance(error, GroupClosedError):
            return self.group is None or self.group._actor.is_evicted
        return isinstance(error, _RECOVERABLE)

    def _ended(self) -> None:
        self.over.set()
        if self._body is not None:
            self._remind()

    def _remind(self) -> None:
        """A body that is in no operation has not heard that its epoch is over."""
        loop = asyncio.get_running_loop()
        self._hurry = loop.call_later(self._patience, self._interrupt)

    def _interrupt(self) -> None:
        if self._body is not None:
            self._interrupted = True
            self._body.cancel()

    # Who comes, and who goes.

    async def _heed(self, group: Group) -> None:
        try:
            async for self._view in group.views():
                self._judge()
        except AiodistError as error:
            # A member no more, or there is no coordinator for good: `next` sees to it.
            log.debug("group %r: no news of its members: %s", group.name, error)

    def _heeded(self, watch: asyncio.Task[None]) -> None:
        """Nobody tells any more who comes and who goes. If nobody foresaw why, this rank leaves:
        else the epoch would go on, and whoever waits to join would wait for ever."""
        if watch.cancelled() or (error := watch.exception()) is None or self.group is None:
            return
        log.error("group %r: no news of its members any more", self.group.name, exc_info=error)
        self.group.abort(f"it hears of no changes of its members any more: {in_words(error)}")

    def _judge(self) -> None:
        """Have all ranks come to a rendezvous, if there is a reason for one. The view and the group
        of an epoch come one after the other, in either order: this is called for both."""
        if self._calling is not None:
            self._calling.cancel()
            self._calling = None
        view, group = self._view, self.group
        if view is None or group is None or view.epoch != group.epoch or group.closed:
            return
        if self._eager and (view.lost or view.left):
            group.revoke()
        elif self._admit and self._takes(view, group):
            # A little later, for others may come right behind.
            loop = asyncio.get_running_loop()
            self._calling = loop.call_later(self._connecting.join_window, self._call, group)

    def _takes(self, view: View, group: Group) -> bool:
        """Whether somebody waits whom a rendezvous takes in, and it is this rank that calls it."""
        has_room = len(view.members) < self._connecting.most
        return view.waiting > 0 and has_room and view.members[0].rank == group.rank

    def _call(self, group: Group) -> None:
        if not group.closed:
            group.revoke()
