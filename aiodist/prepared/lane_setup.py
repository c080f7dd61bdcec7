"""The set-up of shared memory: ranks of one host share it, and agree on the first call that uses
it.

The set-up starts with a group's first collective, and runs beside it. In a first round, each rank
makes a segment and tells the others how to fetch it. In a second round, it says whether it has the
segments of its host. Memory is used only if every rank on every host has all that it needs.

Collectives without a tag need a common first number. So each rank says in the second round how many
of them it has started. It holds further ones back until it has all answers. From the highest of
these numbers on, they run in shared memory. A reduction whose bits depend on the way is held even
before (`aiodist.phases.base.Call`). No rank has started it then, so it runs in shared memory on all
ranks. Collectives with a tag need no such number. A rank that shares memory may post at once,
because the others read the post as soon as they share memory, too (`post_express`).

A segment is a sealed memfd, whose descriptor travels by ``SCM_RIGHTS``. It has no name in a file
system, so nothing is left behind, even if ranks are killed. If one rank cannot share memory, no
rank does, and one line in the log says why.
"""

from __future__ import annotations

import asyncio
import logging
import math
import mmap
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
    """The group that wants to share memory.

    `ended` is the error that has ended the group here. `calls` carry the two rounds, and then get
    the lane.
    """

    group: str
    endpoint: Endpoint
    ended: AiodistError | None
    calls: Calls

    def kick(self, peer: int) -> None:
        """Wake `peer`, which waits for this rank in shared memory."""
        ...

    def share_memory(self, lane: Lane) -> None:
        """Run collectives without a tag on `lane`, from number `lane.first` on."""
        ...

    def use_links(self) -> None:
        """Send all collectives over links, for good."""
        ...


class LaneSetup:
    """The set-up of one group. `over`: it is decided whether the ranks share memory."""

    def __init__(self, context: Sharers, sharing: Sharing) -> None:
        self.over = False
        self._sharing = sharing
        self._context = context
        self._mates = team_view(context.teams, context.rank).mates  # the other ranks of this host
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Begin, unless it has begun before."""
        if self._task is None and not self.over:
            self._task = self._context.endpoint.spawn(self._run(), "aiodist shared memory")

    def cancel(self) -> None:
        """Stop, because the group ends."""
        self.over = True
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
            self.over = True
            if self._context.ended is None:
                if self._context.calls.lane is None:
                    self._context.use_links()
                self._context.calls.release()

    async def _establish(self) -> Lane | None:
        context = self._context
        offer, problem = _offer(context.loop) if self._mates else (None, "")
        try:
            words = await self._share(None if offer is None else offer.words)
            others, problem = await self._fetch(words, problem)
            # From here on no call without a tag starts, until all answers are here. The lane begins
            # with the highest number, so ours must not have started by then.
            first = context.calls.hold()
            crowded = len(self._mates) + 1 > cores()
            answers = await self._share((not problem, first, crowded))
            memory = _alone() if offer is None else offer.segment.memory
        finally:
            if offer is not None:
                offer.close()  # all ranks of the host have it
        for answer in answers:
            if not (isinstance(answer, list) and list(map(type, answer)) == [bool, int, bool]):
                raise ProtocolError(f"malformed answer about shared memory: {answer!r}")
        refused = [rank for rank, (ready, *_) in enumerate(answers) if not ready]
        if refused:
            log.warning(
                "group %r: rank %d uses sockets, not shared memory: %s",
                context.group,
                context.rank,
                problem or f"rank {refused[0]} cannot share it",
            )
            return None
        board = Board(context.rank, memory, others, dozes=futex.works())
        board.show_thread()
        return Lane(
            board,
            context.loop,
            context.endpoint.progress,
            context.kick,
            max(first for _, first, _ in answers),
            context.endpoint.traffic.moved,
            size=context.size,
            crowded=any(crowded for *_, crowded in answers),
            polls=self._sharing is Sharing.POLLED,
        )

    async def _fetch(self, words: list[Any], problem: str) -> tuple[dict[int, memoryview], str]:
        """Map the memory that other ranks offer with `words`; or return why that fails.

        A `problem` of this rank comes first.
        """
        peers = self._mates
        refused = [rank for rank in peers if words[rank] is None]
        if refused or problem:
            return {}, problem or f"rank {refused[0]} offers no memory"
        found = await asyncio.gather(
            *(take(words[rank], SEGMENT) for rank in peers), return_exceptions=True
        )
        others: dict[int, memoryview] = {}
        for rank, memory in zip(peers, found, strict=True):
            if isinstance(memory, memoryview):
                others[rank] = memory
            elif isinstance(memory, OSError):
                return {}, f"cannot map the memory of rank {rank}: {memory}"
            else:
                raise memory
        return others, ""

    async def _share(self, own: Any) -> list[Any]:
        """Return what every rank says, by rank."""
        context = self._context

        def program(_: bool) -> Program:
            return (yield from share(context, msgpack.packb(own), on_lane=False))

        # This needs no deadline, because the calls that wait for it have theirs.
        blobs = await context.calls.launch(
            "shared memory", "shared memory()", program, tag=SETUP_TAG, timeout=math.inf
        )
        try:
            return [msgpack.unpackb(blob) for blob in blobs]
        except ValueError as error:
            raise ProtocolError(f"malformed answer about shared memory: {error!r}") from None


def _alone() -> memoryview:
    """Return the memory of a rank that is alone on its host: no other rank sees it."""
    # Like that of others, it takes only the pages that are used. `bytearray` would write them all.
    return memoryview(mmap.mmap(-1, LANE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def _offer(loop: asyncio.AbstractEventLoop) -> tuple[SegmentOffer | None, str]:
    """Make memory that other ranks can map; or return why that fails."""
    problem = unsupported_reason()
    if problem is None:
        try:
            return SegmentOffer(loop, SEGMENT, "aiodist"), ""
        except OSError as error:
            problem = f"cannot make memory to share: {error}"
    return None, problem
