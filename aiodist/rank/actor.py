"""The actor of a rank: its connection to the coordinator, its endpoint, its listeners.

All groups of one `connect` share one actor, over all epochs. It ends when the group of the newest
epoch is closed.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import copy
import logging
import math
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

from aiodist.control.client import ControlClient
from aiodist.control.events import ControlEvent, CoordinatorBack, CoordinatorGone
from aiodist.control.store import Store
from aiodist.errors import (
    AiodistError,
    CollectiveTimeoutError,
    GroupClosedError,
    despite_errors,
    in_words,
)
from aiodist.links.endpoint import FAREWELL_TIMEOUT, Endpoint
from aiodist.links.owner import EndpointOwner
from aiodist.rank.context import Context
from aiodist.schedules.costs import agreed
from aiodist.schedules.teams import parted, teams_of
from aiodist.shared_memory.lane import Layout, Sharing
from aiodist.transports.base import Listener
from aiodist.transports.sockets import Acceptor
from aiodist.types import Member
from aiodist.wire.activity import Seen, SeenRequest
from aiodist.wire.limits import MAX_TEXT
from aiodist.wire.messages import EpochView, MemberInfo, MemberLeft, MemberLost, Message
from aiodist.wire.recovery import Unreachable

log = logging.getLogger("aiodist.group")

GOODBYE_TIMEOUT = 5.0
"""Seconds that the coordinator has to answer a goodbye."""

ANSWER_TIMEOUT = 1.0
"""Seconds for the coordinator to say what peers are doing. Half of it is for the peers' answers."""

MOST_SHARING = 64
"""The most ranks of a group that share memory. More ranks on one host are divided, as if they were
on several hosts, and each maps only the memory of its part."""

_STORE_LOST = (
    ", without its state file: the group's store is empty now. Check the path given as --state. "
    "This group refuses an older state file from now on"
)


class MemoryReach(NamedTuple):
    """Which memory a rank can share.

    `process` is the id of its process. `inproc`: it reaches other ranks of that process in memory.
    `host` is the host and its user, whose other processes it shares memory with ("": none).
    """

    process: str
    inproc: bool
    host: str


class Served(Protocol):
    """A coordinator that this rank serves to all."""

    async def stop(self, *, drain: float) -> None:
        """Stop it once all of its groups have ended, and after `drain` seconds at the latest."""
        ...


class RankActor(EndpointOwner):
    """Owner of everything a membership holds open."""

    def __init__(
        self,
        *,
        address: str,
        view: EpochView,
        control: ControlClient,
        endpoint: Endpoint,
        listeners: Sequence[Listener],
        coordinator: Served | None,
        op_timeout: float,
        people: dict[int, MemberInfo],
        memory_of: Callable[[MemberInfo], MemoryReach],
        events: Iterable[ControlEvent] = (),
    ) -> None:
        """`people` are the members by root, and are kept up to date here.

        `memory_of` tells which memory each can share. `events` are what the coordinator said since
        the view.
        """
        self.loop = asyncio.get_running_loop()  # everything here happens on it
        self._pid = os.getpid()
        self.address = address
        self.view = view
        self.roots: tuple[int, ...] = ()  # of the members of the view, by rank
        self.people = people
        self.lost: dict[int, str] = {}  # ranks of the view that the coordinator ruled lost, and why
        self._guests: set[int] = set()  # roots of members of other groups that this one meets
        self.left: set[int] = set()  # ranks of the view that have left in order
        # Questions that the coordinator has not answered, by the ranks that they are about. Each
        # has the time by which the answer comes, and the functions that get it.
        self._asking: dict[tuple[int, ...], tuple[float, list[Callable[..., None]]]] = {}
        self.changed: dict[Callable[[], None], None] = {}  # called after a change, in this order
        """Called when members of the view are lost or leave, for a new view, when the coordinator
        goes, and at the end."""
        self.control = control
        self.endpoint = endpoint
        self.store = Store(control, timeout=op_timeout)  # the group's store at the coordinator
        self.context: Context | None = None  # that of the newest epoch; None: not made yet
        self._memory_of = memory_of
        self._memories: dict[int, MemoryReach] = {}  # which memory each member can share, by root
        # Events of an epoch that is not adopted here yet.
        self._ahead: list[MemberLost | MemberLeft] = []
        self._listeners = list(listeners)  # peers connect to these
        self._coordinator = coordinator
        self._op_timeout = op_timeout
        self._leaving: asyncio.Task[None] | None = None  # closes everything; None: this rank stays
        self._hurries = False  # it was aborted while it left
        self.ended: GroupClosedError | None = None  # why this rank has left; None: it stays
        self.is_evicted = False  # the coordinator has ruled that this rank is lost
        self.has_quit = False  # it was told to leave, and does not do so for an error
        self.votes = 0  # that are under way at the coordinator, of all groups of this rank
        self.adopt(view)
        # Events since the view come first, then new ones.
        for event in events:
            self._on_event(event)
        control.on_event = self._on_event
        endpoint.owner = self
        for listener in self._listeners:
            if isinstance(listener, Acceptor):
                listener.on_exhausted = self._cannot_accept
        self.thread = threading.get_ident()
        """The thread of the loop."""
        _actors.add(self)

    def adopt(self, view: EpochView) -> tuple[int, ...]:
        """Make `view` the newest. Returns the roots of its members, by rank."""
        # The endpoint knows a member by its root for as long as it is one. A rank is a place in one
        # view. If rank 1 of three is lost and a new member comes::
        #
        #     epoch 1   ranks 0 1 2    roots 0 1 2
        #     epoch 2   ranks 0 1 2    roots 0 2 3
        #
        # So links, losses and everything else that outlives an epoch are kept by root, because the
        # same rank may be another member in the next view.
        before, left = self.roots, {self.roots[rank] for rank in self.left}
        self._asking.clear()  # about ranks of the view before
        self.roots = self.endpoint.admit([member.id for member in view.members])
        for root, member in zip(self.roots, view.members, strict=True):
            self.people[root] = member
            self._memories[root] = self._memory_of(member)
        stay = {*self.roots}
        for root in before:
            if root not in stay and root not in self.endpoint.lost and root not in left:
                # The coordinator was away when this rank should have heard of it.
                self.endpoint.lose(root, f"epoch {view.epoch} began without it")
        # Groups of earlier epochs go on beside this one, and name their lost ranks. A member is
        # forgotten only once it is in none of them.
        used = stay.union(*[context.ranks for context in self.contexts])
        for root in [root for root in self.endpoint.lost if root not in used]:
            self.endpoint.forget(root)
            del self.people[root], self._memories[root]
        self.view = view
        self.lost, self.left = {}, set()
        ahead, self._ahead = self._ahead, []
        for event in ahead:
            self._on_event(event)
        self._tell_changed()
        return self.roots

    def meet(self, people: Sequence[MemberInfo]) -> tuple[int, ...]:
        """Members of other groups can be reached from now on, and reach this one: their roots.
        Those that are lost, and that no context has a place for, are forgotten."""
        used = {root for context in self.contexts for root in context.ranks}
        for root in [root for root in self._guests & self.endpoint.lost.keys() if root not in used]:
            self.endpoint.forget(root)
            self._guests.discard(root)
            del self.people[root], self._memories[root]
        roots = self.endpoint.admit([member.id for member in people])
        for root, member in zip(roots, people, strict=True):
            if root not in self.people:
                self._guests.add(root)
                self.people[root] = member
                self._memories[root] = self._memory_of(member)
        return roots

    def part_from(self, ids: Iterable[str], reason: str) -> None:
        """Members of other groups are gone."""
        for root in [root for root in self._guests if self.people[root].id in {*ids}]:
            self.endpoint.lose(root, reason)

    def layout(self, ranks: Iterable[int]) -> Layout:
        """Return how the collectives of `ranks` may share memory, and which ranks with which."""
        ranks = tuple(ranks)
        costs = agreed(self.people[rank].addresses for rank in ranks)
        memories = [self._memories[rank] for rank in ranks]
        hosts = teams_of([self.people[rank].host_id for rank in ranks])
        teams = parted(teams_of([memory.host for memory in memories]), MOST_SHARING)
        ways = [_sharing([memories[rank] for rank in team]) for team in teams if len(team) > 1]
        if not ways or Sharing.NONE in ways or not all(memory.host for memory in memories):
            return Layout(Sharing.NONE, teams, costs, hosts)
        sharing = Sharing.WOKEN if Sharing.WOKEN in ways else Sharing.POLLED
        return Layout(sharing, teams, costs, hosts)

    def neighbours(self, ranks: Sequence[int], rank: int) -> tuple[int, int]:
        """Return the place of `rank` among those of `ranks` on its host, and their number."""
        hosts = [self.people[root].host_id for root in ranks]
        here = [one for one, host in enumerate(hosts) if host == hosts[rank]]
        return here.index(rank), len(here)

    def _on_event(self, event: ControlEvent) -> None:
        if isinstance(event, (MemberLost, MemberLeft)):
            if event.epoch > self.view.epoch:  # its view has come, and is about to be adopted
                self._ahead.append(event)
                return
            for rank in event.ranks:
                if isinstance(event, MemberLost):
                    self.lost[rank] = event.reason
                    self.endpoint.lose(self.roots[rank], event.reason)
                else:
                    self.left.add(rank)
                    self.endpoint.left(self.roots[rank])
            self.endpoint.ruled([self.roots[rank] for rank in event.ranks])
            self._tell_changed()
        elif isinstance(event, CoordinatorGone):
            if event.evicted:
                self._evicted(event.eviction(self.address))
            elif self._leaving is None:
                log.warning(
                    "group %r: the coordinator at %s is %s (%s): operations go on, membership "
                    "cannot change",
                    self.view.group,
                    self.address,
                    "gone for good" if event.final else "away",
                    event.reason,
                )
            if not self.is_over:
                if event.final:
                    for context in self.contexts:
                        context.p2p.receiver.ask_again()
                self._tell_changed()
            self.endpoint.ruled()  # last: what waits for a ruling has heard of an eviction by then
        elif isinstance(event, CoordinatorBack):
            # A warning like the one before, because its reader waits for this.
            log.warning(
                "group %r: the coordinator at %s is back%s",
                self.view.group,
                self.address,
                "" if event.kept else _STORE_LOST,
            )
            # What was told while it went may not have reached it.
            gone = {self.roots[rank] for rank in (*self.lost, *self.left)}
            for root in self.endpoint.doubted - gone:
                self.link_broke(root, self.endpoint.lost[root], ended=False)

    def link_broke(self, root: int, reason: str, ended: bool) -> None:
        """Tell the coordinator that there is no link to a peer. It rules which rank is lost."""
        if self._leaving is None and self.control.is_open and root in {*self.roots, *self._guests}:
            self.control.tell(Unreachable(self.people[root].id, reason[:MAX_TEXT], ended))

    def expects_ruling(self, *, later: bool = False) -> bool:
        is_there = self.control.is_open and (later or not self.control.is_away)
        return self._leaving is None and is_there

    async def caught_up(self, seconds: float = 0.0) -> None:
        if self.expects_ruling(later=seconds > 0.0):
            # Any answer comes behind what the coordinator has said before.
            with contextlib.suppress(AiodistError, TimeoutError):
                await self.control.request(SeenRequest((), 0.0), seconds or ANSWER_TIMEOUT)

    def tells_who_leaves(self, context: bytes) -> bool:
        is_whole = self.context is None or self.context.id == context
        return is_whole and self.control.is_open

    def ask(
        self, roots: Sequence[int], tell: Callable[[dict[int, str]], None], seconds: float
    ) -> None:
        """Ask the coordinator what peers are doing. It may wait so many seconds for their
        answers."""
        asked = set(roots)
        wanted = {rank: root for rank, root in enumerate(self.roots) if root in asked}
        if not wanted or self.control.is_away or not self.control.is_open:
            tell({})
            return
        # Many calls may ask at once. They get one answer, if that comes in time for all.
        ranks, due = tuple(sorted(wanted)), self.loop.time() + seconds
        earlier, tells = self._asking.get(ranks, (math.inf, []))
        if self.loop.time() < earlier <= due:
            tells.append(tell)
            return
        asking = self._asking[ranks] = (due, [tell])

        def told(reply: asyncio.Future[Message]) -> None:
            seen = None if reply.cancelled() or reply.exception() is not None else reply.result()
            texts: dict[int, str] = {}
            if isinstance(seen, Seen):
                pairs = zip(seen.ranks, seen.texts, strict=False)
                texts = {wanted[rank]: text for rank, text in pairs if rank in wanted and text}
            if self._asking.get(ranks) is asking:
                del self._asking[ranks]
            for each in asking[1]:
                each(texts)

        self.control.begin(SeenRequest(ranks, seconds)).add_done_callback(told)

    def _tell_changed(self) -> None:
        # A copy, because a listener may remove itself.
        for call in list(self.changed):
            call()

    @property
    def contexts(self) -> list[Context]:
        """The contexts of all groups of this rank, of all epochs that go on."""
        contexts: list[Any] = list(self.endpoint.inboxes.open.values())
        return contexts

    @property
    def is_over(self) -> bool:
        """Whether this rank has left, or is about to."""
        return self._leaving is not None

    def _evicted(self, text: str) -> None:
        self.is_evicted = True
        error = GroupClosedError(text, group=self.view.group, epoch=self.view.epoch)
        self.abort("evicted", error)

    def task_failed(self, error: BaseException) -> None:
        """Abort after an unexpected error, because others may wait for something that never
        comes."""
        if self._leaving is None:
            reason = f"an unexpected error on it: {in_words(error)}"[:MAX_TEXT]
            self.abort(reason, self._end_with(f"aborted: {reason}"))

    def _cannot_accept(self, error: OSError) -> None:
        # The peer that waits may be a stranger, so this rank goes on unless it waits, too.
        if self.endpoint.is_dialing:
            self.exhausted(error)

    def exhausted(self, error: OSError) -> None:
        """Leave, and say why, because no link can be made without files.

        Otherwise the others would wait for this rank until their deadlines.
        """
        if self._leaving is None:
            why = (error.strerror or str(error)).lower()
            reason = f"{why}: it cannot make links to other ranks; raise the limit (ulimit -n)"
            text = f"this rank has left: {reason}"
            log.error("group %r: %s", self.view.group, text)
            self.abort(reason, GroupClosedError(text, group=self.view.group, epoch=self.view.epoch))

    def _close_contexts(self, error: GroupClosedError) -> None:
        despite_errors(*(partial(context.close, error) for context in self.contexts))

    def _end_with(self, why: str, *, in_order: bool = False) -> GroupClosedError:
        text = f"the group that it was made of was {why}"
        return GroupClosedError(text, group=self.view.group, in_order=in_order)

    def when_gone(self, call: Callable[[], None]) -> None:
        """Call this once everything is closed. This rank must have begun to leave."""
        assert self._leaving is not None
        self._leaving.add_done_callback(lambda _: call())

    async def leave(self) -> None:
        """Say goodbye to peers and coordinator, and close everything. Idempotent.

        Raises CollectiveTimeoutError, at the end, if not all that was sent could be delivered.
        """
        if self._leaving is None:
            self.has_quit = True
            self.ended = self._end_with("closed", in_order=True)
            self._leaving = self.loop.create_task(self._leave(self.ended), name="aiodist leave")
            self._tell_changed()
        # The caller may be cancelled. The goodbye goes on, because the others would otherwise take
        # this rank for lost.
        await asyncio.shield(self._leaving)

    async def _leave(self, end: GroupClosedError) -> None:
        error: Exception | None = None
        try:
            self._close_contexts(end)
        except Exception as failure:
            error = failure
        # The coordinator must hear of the leave, whatever goes wrong before.
        try:
            # Peers first, because queued data must be on its way before they hear that we left. For
            # its sender, a small message is sent before there is a link to its receiver.
            deadline = self.loop.time() + self._op_timeout
            left = await self.endpoint.delivered(self._op_timeout)
            if left:
                error = await self._undelivered(left)
            # A busy peer may read our goodbye much later, because its system has all that we sent.
            spare = FAREWELL_TIMEOUT if left else max(0.0, deadline - self.loop.time())
            await self.endpoint.finish(min(FAREWELL_TIMEOUT, spare))
            self._close_listeners()
        except Exception as failure:
            error = failure
        await self.control.leave(GOODBYE_TIMEOUT)
        self.control.close()
        await self.control.closed()
        if self._coordinator is not None:
            # Last, because this rank itself has just left through the coordinator that it serves.
            await self._coordinator.stop(drain=self._op_timeout)
        _actors.discard(self)
        if error is not None:
            raise error

    async def _undelivered(self, left: Mapping[int, int]) -> CollectiveTimeoutError:
        """Make the error for bytes, by root, that peers did not take."""
        texts = {} if self._hurries else await self._seen(list(left))
        until = "when it was aborted" if self._hurries else f"within {self._op_timeout:g} s"
        ranks = {root: self.people[root].rank for root in left}
        each = ", ".join(
            f"{nbytes:,} bytes by rank {ranks[root]} ({texts.get(root, 'no answer')})"
            for root, nbytes in left.items()
        )
        return CollectiveTimeoutError(
            f"left, but not all that was sent had been taken {until}: not {each}",
            group=self.view.group,
            epoch=self.view.epoch,
            op="close",
            missing=ranks.values(),
            last_seen={ranks[root]: text for root, text in texts.items()},
        )

    async def _seen(
        self, roots: Sequence[int], seconds: float = ANSWER_TIMEOUT / 2
    ) -> Mapping[int, str]:
        """Return what peers are doing, as far as the coordinator finds out within so many
        seconds."""
        told: asyncio.Future[Mapping[int, str]] = self.loop.create_future()

        def tell(texts: Mapping[int, str]) -> None:
            if not told.done():
                told.set_result(texts)

        self.ask(roots, tell, seconds)
        await asyncio.wait({told}, timeout=ANSWER_TIMEOUT)
        if told.done():
            return told.result()
        told.cancel()
        return {}

    def abort(self, reason: str, error: GroupClosedError | None = None) -> None:
        """Close everything at once. `gone` waits for the rest. Pending operations fail with
        `error`."""
        if self._leaving is not None:
            self._hurries = True
            self.endpoint.hurry()
            return
        self.has_quit = error is None
        self.ended = ended = error or self._end_with(f"aborted: {reason}")
        self._leaving = self.loop.create_task(self._stop(reason), name="aiodist abort")
        self._leaving.add_done_callback(_stopped)  # not every caller of abort waits for it
        despite_errors(
            partial(self.endpoint.abort, reason),
            *(partial(context.close, ended) for context in self.contexts),
            self._tell_changed,
        )

    async def _stop(self, reason: str) -> None:
        # Peers first: they hear the reason from us, behind all that we had sent. Some connect to us
        # while we connect to them, so we listen until then.
        try:
            await self.endpoint.aborted()
            await self.control.leave(FAREWELL_TIMEOUT, aborts=reason)
        finally:  # the loop may end before
            despite_errors(self._close_listeners, partial(self.control.abort, reason))
        await self.control.closed()
        if self._coordinator is not None:
            await self._coordinator.stop(drain=0.0)
        _actors.discard(self)

    async def gone(self) -> None:
        """Wait until everything is closed after `abort`."""
        if self._leaving is not None:
            await asyncio.wait({self._leaving})

    def _close_listeners(self) -> None:
        despite_errors(*(listener.close for listener in self._listeners))

    @property
    def is_inherited(self) -> bool:
        """Whether this process is a fork of the one that joined. Then there is nothing to leave."""
        return os.getpid() != self._pid

    def end_in_child(self) -> None:
        """After a fork: let no call of the child's copy go on."""
        error = GroupClosedError(
            "the group was inherited over a fork; connect in the child instead",
            group=self.view.group,
        )
        for context in self.contexts:
            context.ended = error
            context.express = context.tagged_express = context.post_express = None
            context.records.unseen.mute()

    def close_in_child(self) -> None:
        """After a fork: close the child's copy, without a word to others."""
        for listener in self._listeners:  # else peers could connect to the child after our death
            listener.close_in_child()
        self.endpoint.close_in_child()
        self.control.close_fds_after_fork()


def _stopped(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("a rank that aborted could not close everything", exc_info=error)


def as_member(info: MemberInfo, rank: int | None = None) -> Member:
    """Make the public description of a member. `rank`: its rank in a derived group."""
    return Member(
        rank=info.rank if rank is None else rank,
        id=info.id,
        host=info.host,
        pid=info.pid,
        name=info.name,
        # Ranks of one process share `info`, and programs may change lists in what they get.
        metadata=copy.deepcopy(info.metadata) if info.metadata else {},
        joined_at=info.joined_at,
    )


def _sharing(memories: Sequence[MemoryReach]) -> Sharing:
    """Return how ranks of one host may share memory."""
    if len({memory.process for memory in memories}) == len(memories):
        return Sharing.POLLED
    # Ranks of one process take turns: while one looks at memory, the others cannot write.
    return Sharing.NONE if any(memory.inproc for memory in memories) else Sharing.WOKEN


_actors: weakref.WeakSet[RankActor] = weakref.WeakSet()


def _tell_at_exit() -> None:
    """Warn of forgotten awaits in groups that the program did not close, unless an exception ends
    it."""
    if not hasattr(sys, "last_value"):
        for actor in list(_actors):
            for context in actor.contexts:
                context.records.unseen.tell("the process ends")


atexit.register(_tell_at_exit)


def _close_in_child() -> None:
    with contextlib.ExitStack() as stack:  # it closes all, even if closing one fails
        for actor in list(_actors):
            stack.callback(actor.close_in_child)
            actor.end_in_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)
