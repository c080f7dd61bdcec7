"""A rank's seat in a group: its connection to the coordinator, its endpoint, its listeners.

All groups made from one `connect` share a seat; it is given up when the first of them is closed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from aiodist.errors import GroupClosedError
from aiodist.runtime.control import (
    ControlClient,
    ControlEvent,
    CoordinatorBack,
    CoordinatorGone,
)
from aiodist.runtime.endpoint import Endpoint
from aiodist.runtime.lane import Layout, Sharing
from aiodist.runtime.store import Store
from aiodist.schedules.teams import teams_of
from aiodist.transports.base import Listener
from aiodist.wire.messages import MemberLeft, MemberLost, View

if TYPE_CHECKING:
    from aiodist.runtime.context import Context
    from aiodist.runtime.coordinator import Coordinator

log = logging.getLogger("aiodist.group")

GOODBYE_TIMEOUT = 5.0
"""Seconds that peers, and the coordinator, have to answer a goodbye."""


MOST_SHARING = 64
"""Most ranks of a group on one host whose collectives run in shared memory."""


class Memory(NamedTuple):
    """What memory a rank can share.

    `process` names its process; `inproc` says whether it meets others of that process there, `host`
    the host on which it shares memory with other processes ("": it cannot, or is not to).
    """

    process: str
    inproc: bool
    host: str


class Seat:
    """Owner of everything a membership holds open."""

    def __init__(
        self,
        *,
        address: str,
        view: View,
        control: ControlClient,
        endpoint: Endpoint,
        listeners: Sequence[Listener],
        coordinator: Coordinator | None,
        op_timeout: float,
        memories: Sequence[Memory],
        events: Iterable[ControlEvent] = (),
    ) -> None:
        """`memories`: of each rank. `events`: what the coordinator has told since the view."""
        self.loop = asyncio.get_running_loop()
        self.address = address
        self.view = view
        self.control = control
        self.endpoint = endpoint
        self.store = Store(control, timeout=op_timeout)
        self.context: Context | None = None
        self._memories = memories
        self._listeners = list(listeners)
        self._coordinator = coordinator
        self._op_timeout = op_timeout
        self._leaving: asyncio.Task[None] | None = None
        for event in events:
            self._on_event(event)
        control.on_event = self._on_event
        _seats.add(self)

    def layout(self, ranks: Iterable[int]) -> Layout:
        """How the collectives of `ranks` may share memory, and which of them."""
        memories = [self._memories[rank] for rank in ranks]
        teams = teams_of([memory.host for memory in memories])
        ways = [_sharing([memories[rank] for rank in team]) for team in teams if len(team) > 1]
        if not ways or Sharing.NONE in ways or not all(memory.host for memory in memories):
            return Layout(Sharing.NONE, teams)
        return Layout(Sharing.WOKEN if Sharing.WOKEN in ways else Sharing.POLLED, teams)

    def _on_event(self, event: ControlEvent) -> None:
        if isinstance(event, MemberLost):
            for rank in event.ranks:
                self.endpoint.lose(rank, event.reason)
        elif isinstance(event, MemberLeft):
            for rank in event.ranks:
                self.endpoint.left(rank)
        elif isinstance(event, CoordinatorGone):
            if event.evicted:
                self._evicted(event.reason)
            elif self._leaving is None:
                log.warning(
                    "group %r: the coordinator at %s is %s (%s): operations go on, membership "
                    "cannot change",
                    self.view.group,
                    self.address,
                    "gone for good" if event.final else "away",
                    event.reason,
                )
        elif isinstance(event, CoordinatorBack):
            log.log(
                logging.INFO if event.kept else logging.WARNING,
                "group %r: the coordinator at %s is back%s",
                self.view.group,
                self.address,
                "" if event.kept else ", without its state file: the group's store is empty now",
            )

    def _evicted(self, reason: str) -> None:
        error = GroupClosedError(
            f"this rank was ruled lost by the coordinator: {reason}",
            group=self.view.group,
            epoch=self.view.epoch,
        )
        self._close_contexts(error)
        self.abort("evicted")

    def _close_contexts(self, error: GroupClosedError) -> None:
        for context in list(self.endpoint.contexts.values()):
            context.close(error)

    def _end_with(self) -> GroupClosedError:
        return GroupClosedError("the group that it was made of was closed", group=self.view.group)

    async def leave(self) -> None:
        """Say goodbye to peers and coordinator, and close everything. Idempotent."""
        if self._leaving is None:
            self._leaving = self.loop.create_task(self._leave(), name="aiodist leave")
        await asyncio.shield(self._leaving)

    async def _leave(self) -> None:
        self._close_contexts(self._end_with())
        # Peers first: what is queued for them must be on its way before they hear that we left. A
        # small message is sent, for its sender, before there is a link to its receiver.
        await self.endpoint.connected(GOODBYE_TIMEOUT)
        await self.endpoint.finish(GOODBYE_TIMEOUT)
        self._close_listeners()
        await self.control.leave(GOODBYE_TIMEOUT)
        self.control.close()
        await self.control.closed()
        if self._coordinator is not None:
            await self._coordinator.stop(drain=self._op_timeout)
        _seats.discard(self)

    def abort(self, reason: str) -> None:
        """Close everything at once; `gone` waits for what takes a turn of the loop."""
        if self._leaving is not None:
            return
        self.endpoint.abort(reason)
        self._close_contexts(self._end_with())
        self._close_listeners()
        self._leaving = self.loop.create_task(self._stop(), name="aiodist abort")

    async def _stop(self) -> None:
        # Peers first: they hear the reason from us, not that we vanished from the coordinator.
        await self.endpoint.aborted()
        self.control.abort()
        await self.control.closed()
        if self._coordinator is not None:
            await self._coordinator.stop(drain=0.0)
        _seats.discard(self)

    async def gone(self) -> None:
        """Wait until everything is closed after `abort`."""
        if self._leaving is not None:
            await asyncio.shield(self._leaving)

    def _close_listeners(self) -> None:
        for listener in self._listeners:
            listener.close()

    def close_in_child(self) -> None:
        """After a fork: the child's copy is closed, without a word to anybody."""
        error = GroupClosedError(
            "the group was inherited over a fork; connect in the child instead",
            group=self.view.group,
        )
        for context in self.endpoint.contexts.values():
            context.ended = error
        self.endpoint.close_in_child()
        self.control.close_fds_after_fork()


def _sharing(memories: Sequence[Memory]) -> Sharing:
    """How ranks of one host may share memory."""
    if len(memories) > MOST_SHARING:
        return Sharing.NONE
    if len({memory.process for memory in memories}) == len(memories):
        return Sharing.POLLED
    # Ranks of one process take turns: to look at memory means to keep the other from writing.
    return Sharing.NONE if any(memory.inproc for memory in memories) else Sharing.WOKEN


_seats: weakref.WeakSet[Seat] = weakref.WeakSet()


def _close_in_child() -> None:
    for seat in list(_seats):
        seat.close_in_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)
