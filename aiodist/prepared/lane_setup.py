"""How ranks of one host come to share memory, and agree from which collective on.

It begins with a group's first collective, beside it: everyone makes a segment and tells the others
where to fetch it, then whether it has those of its host. Only if all have, on whatever host, all
use them. In that second round each says how many untagged collectives it has called, and holds
further ones back until it knows the answers: those with numbers from the highest on run in shared
memory. What has a tag needs no such number: a rank that shares memory may post for
any call, and the others read that as soon as they do (`post_express`).

A segment is a sealed memfd, and its descriptor is passed on by ``SCM_RIGHTS``: it has no name in a
file system, so nothing is left behind, however ranks die. If one rank cannot share memory, none
does, and one line in the log says why.
"""

from __future__ import annotations

import asyncio
import logging
import math
from typing import Any, Protocol

import msgpack

from aiodist.buffers.segment import unsupported_reason
from aiodist.engine.calls import Calls
from aiodist.engine.operation import Program
from aiodist.engine.tags import SETUP_TAG
from aiodist.errors import AiodistError, ProtocolError
from aiodist.links.endpoint import Endpoint
from aiodist.phases.base import Place, share
from aiodist.schedules.teams import team_view
from aiodist.shared_memory.board import LANE, SEGMENT, Board
from aiodist.shared_memory.lane import Lane, Sharing
from aiodist.transports import futex
from aiodist.transports.handover import SegmentOffer, take
from aiodist.transports.polling import cores

log = logging.getLogger("aiodist.group")


class Sharers(Place, Protocol):
    """The group that is to share memory. `ended` is what has ended it here, and `calls` are its
    collectives, which tell all ranks what each has, and then have the lane."""

    group: str
    endpoint: Endpoint
    ended: AiodistError | None
    calls: Calls

    def kick(self, peer: int) -> None:
        """Wakes `peer`, which waits for this rank in shared memory."""
        ...

    def share_memory(self, lane: Lane) -> None:
        """Has collectives without a tag run on `lane`, from number `lane.first` on."""
        ...

    def use_links(self) -> None:
        """Has all collectives go over links, for good."""
        ...


class LaneSetup:
    """The set-up of one context. `settling`: untagged collectives have to wait for its end."""

    def __init__(self, context: Sharers, sharing: Sharing) -> None:
        self.settling = False
        self._sharing = sharing
        self._context = context
        self._mates = team_view(context.teams, context.rank).mates  # the other ranks of this host
        self._task: asyncio.Task[None] | None = None
        self._over = False

    def begin(self) -> None:
        """Begin, unless that has been done."""
        if self._task is None and not self._over:
            self._task = self._context.endpoint.spawn(self._run(), "aiodist shared memory")

    def cancel(self) -> None:
        """Stop: the group ends."""
        self._over = True
        self.settling = False
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        try:
            lane = await self._establish()
            if lane is not None and self._context.ended is None:
                self._context.share_memory(lane)
        except AiodistError as error:  # a rank was lost, or the group has ended
            log.debug("%s: no shared memory: %s", self._context.group, error)
        finally:
            self._over = True
            self.settling = False
            if self._context.ended is None:
                if self._context.calls.lane is None:
                    self._context.use_links()
                self._context.calls.undefer()

    async def _establish(self) -> Lane | None:
        context = self._context
        offer, problem = _offer(context.loop) if self._mates else (None, "")
        try:
            words = await self._share(None if offer is None else offer.words)
            others, problem = await self._fetch(words, problem)
            # From here on no untagged call takes a number, until all answers are known: the number
            # that is told now must still be the next one when the lane is begun with the highest.
            self.settling = True
            upcoming = context.calls.tags.upcoming(None)
            crowded = len(self._mates) + 1 > cores()
            answers = await self._share((not problem, upcoming, crowded))
            # A rank that is alone on its host shows nobody what it has there.
            memory = memoryview(bytearray(LANE)) if offer is None else offer.segment.memory
        finally:
            if offer is not None:
                offer.close()  # all that want it have it
        for answer in answers:
            if not (isinstance(answer, list) and list(map(type, answer)) == [bool, int, bool]):
                raise ProtocolError(f"malformed words about shared memory: {answer!r}")
        refused = [rank for rank, (ready, *_) in enumerate(answers) if not ready]
        if refused:
            log.warning(
                "group %r: rank %d uses sockets, not shared memory: %s",
                context.group,
                context.rank,
                problem or f"rank {refused[0]} cannot share it",
            )
            return None
        return Lane(
            Board(context.rank, memory, others, dozes=futex.works()),
            context.loop,
            context.endpoint.progress,
            context.kick,
            max(upcoming for _, upcoming, _ in answers),
            context.endpoint.moved,
            size=context.size,
            crowded=any(crowded for *_, crowded in answers),
            polls=self._sharing is Sharing.POLLED,
        )

    async def _fetch(self, words: list[Any], problem: str) -> tuple[dict[int, memoryview], str]:
        """The others' memory, of which they have sent words; or what is wrong, if not `problem`."""
        peers = self._mates
        refused = [rank for rank in peers if words[rank] is None]
        if refused or problem:
            return {}, problem or f"rank {refused[0]} offers none"
        found = await asyncio.gather(
            *(take(words[rank], SEGMENT) for rank in peers), return_exceptions=True
        )
        others: dict[int, memoryview] = {}
        for rank, memory in zip(peers, found, strict=True):
            if isinstance(memory, memoryview):
                others[rank] = memory
            elif isinstance(memory, OSError):
                return {}, f"that of rank {rank} cannot be had: {memory}"
            else:
                raise memory
        return others, ""

    async def _share(self, own: Any) -> list[Any]:
        """What every rank says, by rank."""
        context = self._context

        def program(_: bool) -> Program:
            return (yield from share(context, msgpack.packb(own), on_lane=False))

        # It has no deadline of its own. The calls that wait for it have theirs, and name who is
        # missing in it (`engine.deadlines`).
        blobs = await context.calls.launch(
            "shared memory", "shared memory()", program, tag=SETUP_TAG, timeout=math.inf
        )
        try:
            return [msgpack.unpackb(blob) for blob in blobs]
        except ValueError as error:
            raise ProtocolError(f"malformed words about shared memory: {error!r}") from None


def _offer(loop: asyncio.AbstractEventLoop) -> tuple[SegmentOffer | None, str]:
    """Memory for the others to map; or what is wrong."""
    problem = unsupported_reason()
    if problem is None:
        try:
            return SegmentOffer(loop, SEGMENT, "aiodist"), ""
        except OSError as error:
            problem = f"no memory to share ({error})"
    return None, problem
