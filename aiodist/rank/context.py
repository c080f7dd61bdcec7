"""One group in one epoch, as one of its ranks has it: all that it holds open, wired together.

A context is entered synchronously, from calls of its group and from the links of its endpoint. It
passes each frame to the part that it belongs to: collectives (`aiodist.engine`), messages
(`aiodist.p2p`), shared arrays, devices. It also tells all of them when a rank is lost, and when the
group ends.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from aiodist.codecs.feedback import Residuals
from aiodist.devices.memory import DeviceMemory
from aiodist.engine.calls import Calls
from aiodist.engine.operation import Operation
from aiodist.errors import (
    AiodistError,
    GroupClosedError,
    GroupRevokedError,
    ProtocolError,
    despite_errors,
)
from aiodist.links.endpoint import Endpoint
from aiodist.links.party import Party
from aiodist.links.peer import farewell_reason
from aiodist.p2p.express import P2PExpress
from aiodist.p2p.point_to_point import PointToPoint
from aiodist.p2p.shared import MessageMemory
from aiodist.phases.base import MAX_RANKS_POSTING
from aiodist.prepared.express import Express
from aiodist.prepared.lane_express import LaneExpress
from aiodist.prepared.lane_setup import LaneSetup
from aiodist.prepared.link_express import LinkExpress
from aiodist.prepared.multihost_express import MultihostExpress
from aiodist.prepared.post_express import PostExpress
from aiodist.recorder import Records
from aiodist.schedules.teams import spans_hosts
from aiodist.shared_memory.berths import Berths
from aiodist.shared_memory.heap import Heap
from aiodist.shared_memory.lane import Lane, Layout, Sharing
from aiodist.trace import Scope
from aiodist.transports.base import Landing
from aiodist.transports.framed import FramedLink
from aiodist.transports.polling import cores
from aiodist.transports.second_thread import SECOND_THREAD
from aiodist.types import Tag
from aiodist.wire import kinds
from aiodist.work import SENDS, Work


def _nobody(rank: int) -> None:
    """No rank is asked for a sign."""


Take = Callable[[int, list[Any], int], Landing | None]
"""Takes a frame: the rank that sent it, its header, and its number of payload bytes."""


class Context(Party):
    """The ranks of one group in one epoch, and all that goes on among them."""

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        id: bytes,
        group: str,
        epoch: int,
        ranks: Sequence[int],
        op_timeout: float,
        max_message_bytes: int,
        allow_pickle: bool,
        layout: Layout,
    ) -> None:
        super().__init__(endpoint, id=id, group=group, epoch=epoch, ranks=ranks)
        self.op_timeout = op_timeout  # seconds for a collective without a timeout
        self.max_message_bytes = max_message_bytes  # the most bytes of a whole message
        self.allow_pickle = allow_pickle  # whether values may be any Python objects
        self.residuals: dict[Tag, Residuals] = {}  # what codecs have lost, by tag
        # Notes everything that is called here.
        scope = Scope(group, epoch, self.rank, self.size, id)
        self.records = Records(endpoint.recorder, scope, self.ranks)
        self.records.unseen.is_due = endpoint.progress.is_due
        self.derived: dict[bytes, int] = {}
        """How many groups of each kind and ranks were made of this one, except by splits."""
        self.splits = 0  # how many splits were called
        self.requests: dict[Work[Any], int] = {}
        """The calls of a window that are not done, each with the rank that owns the memory."""
        # The ranks of each host; the costs for plans; which hosts these are.
        sharing, self.teams, self.costs, self.hosts = layout
        # Whether all ranks are on one host, and share memory once they have agreed on that.
        shares = sharing is not Sharing.NONE and not spans_hosts(self.teams)
        self.may_post = shares and 1 < self.size <= MAX_RANKS_POSTING
        # Its collectives.
        self.calls = Calls(
            self,
            teams=self.teams,
            records=self.records,
            op_timeout=op_timeout,
            way=self.costs.way,
        )
        self.on_end: Callable[[], None] | None = None  # called once it has ended, for any reason
        # The fast path of small collectives, and that of those with a tag.
        self.express: Express[Any, Any] | None = None
        self.tagged_express: Express[Any, Any] | None = None
        self.post_express: PostExpress | None = None  # the latter, if the ranks share memory
        self.is_revoked = False  # by this rank or another one, also if it was closed since
        self.shows = False  # calls are posted from now on
        self.device_memory = DeviceMemory(self)  # arrays on devices, and what peers have open
        # Arrays in memory that all ranks see.
        self.heap = Heap(self, shares=shares)
        # Its messages.
        helper = SECOND_THREAD if self.size <= cores() else None
        shared = MessageMemory(
            self.heap,
            endpoint.traffic.moved,
            self.process_of,
            helper,
            self.near if helper else _nobody,
        )
        self.p2p = PointToPoint(
            self, self.loop, self.records, self.device_memory, self.costs.way, shared
        )
        self.p2p_express = P2PExpress(self)  # the fast path of point to point
        arrivals = self.calls.arrivals
        self._takes: dict[int, Take] = {
            kinds.MESSAGE: arrivals.message,
            kinds.P2P: self._message,
            kinds.GRANT: arrivals.grant,
            kinds.ABORT: arrivals.abort,
            kinds.INQUIRE: arrivals.inquire,
            kinds.STATUS: arrivals.status,
            kinds.KNOCK: arrivals.knock,
            kinds.ADMIT: arrivals.admit,
        }
        """The handlers of frames. All other frames are small ones without payload: see `_word`."""
        # Makes a lane beside the first collective; None: there will be none.
        self._setup = None if sharing is Sharing.NONE else LaneSetup(self, sharing)
        self.calls.setup = self._setup
        if self._setup is None:
            self.use_links()
        # Last, because this call hands over frames that came early.
        endpoint.add(self)

    # -- what comes -------------------------------------------------------------------------------

    def frame(self, root: int, fields: list[Any], nbytes: int) -> Landing | None:
        """Take a header of `root`. Returns the landing of its payload. Raises ProtocolError."""
        src = self.rank_of.get(root)
        if src is None:
            raise ProtocolError(f"a frame for {self.group!r}, which rank {root} is not part of")
        kind = fields[0]
        if nbytes and kind != kinds.MESSAGE and kind != kinds.P2P:
            raise ProtocolError(f"a frame of kind {kind} has no payload")
        return self._takes.get(kind, self._word)(src, fields, nbytes)

    def _message(self, src: int, fields: list[Any], nbytes: int) -> Landing | None:
        return self.p2p.frame(src, fields[2:], nbytes)

    def saved(self, nbytes: int) -> None:
        """Count bytes that this rank did not have to send, because a codec made them fewer."""
        self.endpoint.traffic.saved += max(0, nbytes)

    def call_roll(self, op: Operation) -> None:
        """Tell all others that the array of this rank is on a device, and ask for theirs."""
        self.calls.arrivals.call_roll(op)

    def _word(self, src: int, fields: list[Any], nbytes: int) -> None:
        kind = fields[0]
        if kind == kinds.KICK:
            if self.lane is not None:
                self.lane.kicked()
            if self.post_express is not None:
                self.post_express.kicked()
        elif kind == kinds.TAGS:
            self.calls.about_tags(src, fields[2:])
        elif kind == kinds.DEVICE:
            self.device_memory.heard(src, fields)
        elif kind in (kinds.REGION, kinds.MAPPED, kinds.UNMAP):
            self.heap.heard(src, fields)
        elif kind == kinds.REVOKE:
            self._revoked(fields)
        elif kind == kinds.FAREWELL:
            reason = farewell_reason(fields)
            if self.ended is None:  # this group may have been revoked before
                self.rank_lost(self.ranks[src], reason)
        else:
            raise ProtocolError(f"no frame is of kind {kind!r}")

    def inline(self, work: Work[Any], peers: Sequence[int]) -> None:
        """Poll for a message of `peers` (none: of any rank) that `work` waits for."""
        links = [
            link
            for peer in peers or range(self.size)
            if peer != self.rank and (link := self.link(peer)) is not None
        ]
        # In shared memory the rest of a large message is there at once.
        by_socket = any(link.kind != "shm" for link in links)
        p2p = self.p2p

        def is_enough() -> bool:
            return work.done() or (by_socket and p2p.takes_long(work))

        if links and not is_enough():
            only = links[0] if len(links) == 1 and not self.p2p_express.crowded else None
            self.endpoint.progress.inline(
                is_enough,
                itertools.cycle(links).__next__,
                only if isinstance(only, FramedLink) else None,
            )

    # -- shared memory ----------------------------------------------------------------------------

    @property
    def lane(self) -> Lane | None:
        """The memory that collectives share, once the ranks have agreed on it."""
        return self.calls.lane

    @property
    def berths(self) -> Berths | None:
        """Lanes for operations with a tag, once memory is shared."""
        return None if self.post_express is None else self.post_express.berths

    def kick(self, peer: int) -> None:
        """Wake `peer`, which waits for this rank in shared memory."""
        self.say(peer, kinds.KICK)

    def share_memory(self, lane: Lane) -> None:
        """Run collectives without a tag on `lane`, from number `lane.first` on."""
        self.calls.lane = lane
        spans = spans_hosts(self.teams)
        self.express = MultihostExpress(self, lane) if spans else LaneExpress(self, lane)
        if spans or self.size > MAX_RANKS_POSTING:
            self.tagged_express = LinkExpress(self)
        else:
            self.post_express = self.calls.posting = PostExpress(self, lane)
            self.tagged_express = self.post_express
            self.post_express.rest()  # others may have begun to post
        if self.lost():
            lane.break_off()
            if self.post_express is not None:
                self.post_express.end()

    @property
    def crowded(self) -> bool:
        """Whether more ranks share memory than there are cores. All ranks know this."""
        return self.calls.lane is not None and self.calls.lane.crowded

    def use_links(self) -> None:
        """Run collectives over links, because there will be no lane."""
        self.express = self.tagged_express = LinkExpress(self)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is pending, nothing was given up early, and no rank is lost."""
        calls = self.calls
        pending = calls.ops or calls.waiting.by_key or calls.deferred
        return not (pending or self.gone or calls.arrivals.verdicts)

    # -- ends -------------------------------------------------------------------------------------

    @property
    def pending(self) -> list[Work[Any]]:
        """The Works that are not done.

        Receives and probes are left out, because they may never be done, and so are aiodist's own
        works.
        """
        sends = [work for work in self.p2p.pending if work.op in SENDS]
        return self.calls.pending + sends

    def rank_lost(self, root: int, reason: str) -> None:
        """Fail what needs `root`, which is lost, at least for this group."""
        src = self.rank_of.get(root)
        if src is None or src in self.gone:
            return
        # First, because the calls below ask which ranks are gone.
        self.gone[src] = reason
        self.p2p_express.rank_lost(src)
        self.calls.rank_lost(src)
        self.device_memory.rank_lost(src)
        self.p2p.rank_lost(src, f"rank {src} is lost: {reason}")
        self.ruled()

    def ruled(self) -> None:
        """Check the Works that wait for a ruling, because the coordinator has ruled or never
        will."""
        self.calls.ends.hearsay.review()

    def revoke(self, by: int) -> None:
        """Fail everything, because rank `by` has revoked the group, and pass that on.

        Each rank tells all others, so that all living ranks hear it even if some die meanwhile.
        """
        # A rank passes it on before it does anything else. So if one rank that stays alive hears
        # it, all do. This costs n frames of some 20 bytes from each of n ranks, once in the life of
        # a group, and they overtake what is queued. A group that has ended passes nothing on, which
        # ends the flood.
        if self.ended is not None:
            return
        for peer in range(self.size):
            if peer != self.rank:
                self.say(peer, kinds.REVOKE, by)
        who = "this rank" if by == self.rank else f"rank {by}"
        self.is_revoked = True
        text = f"{who} revoked the group: go on with shrink() or rendezvous(), or close it"
        self.close(self.error(GroupRevokedError, text))

    def _revoked(self, fields: list[Any]) -> None:
        """Handle a REVOKE frame. Raises ProtocolError."""
        match fields:
            case [_, _, int(by)] if type(by) is int and 0 <= by < self.size:
                if by == self.rank and self.ended is None:
                    raise ProtocolError("a REVOKE of this rank, which has not revoked the group")
                self.revoke(by)
            case _:
                raise ProtocolError("a REVOKE frame ends in a rank")

    def tell_unlinked(self, reason: str) -> None:
        """Tell the ranks without a link to this one that it has aborted."""
        for rank, peer in enumerate(self.peers):
            if rank not in (self.rank, *self.gone) and peer.link is None:
                self.reach(rank, kinds.FAREWELL, reason[:1000])

    def close(self, error: AiodistError, *, abort: bool = False) -> None:
        """Fail all that is pending, and later calls. With `abort`, tell the others."""
        if self.ended is not None:
            if self.is_revoked and isinstance(error, GroupClosedError):
                self.end(error)  # because later calls cannot go on with shrink()
            return
        if self._setup is not None:
            self._setup.cancel()
        # This count belongs to the whole membership, so it outlives the context.
        self.endpoint.traffic.called += self.calls.called
        expresses = {self.express, self.tagged_express} - {None, self.post_express}
        self.express = self.tagged_express = self.post_express = None
        despite_errors(
            partial(self.calls.close, error, abort=abort),
            self.device_memory.close,  # it may send a last frame
            partial(self.end, error),
            self.heap.close,
            *[each.close for each in expresses if each is not None],
            self.calls.clear,
            partial(self.p2p.close, error),
            partial(self.endpoint.remove, self, *((error.message,) if abort else ())),
            *((self.on_end,) if self.on_end is not None else ()),
        )
