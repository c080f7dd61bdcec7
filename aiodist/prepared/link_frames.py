"""The frames of a collective that is done within its call, between ranks that are joined by links.

They are those of the ordinary way, byte for byte. Kept are their prefixes, but for the number of
the call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from aiodist.engine.phase import Spans
from aiodist.prepared.express import ExpressGroup
from aiodist.schedules.plan import Plan, Recv, Send
from aiodist.transports.base import Landing, Link
from aiodist.transports.polling import cores
from aiodist.transports.retransmission import JOINED
from aiodist.transports.stream import StreamLink
from aiodist.wire import kinds
from aiodist.wire.frames import Stencil, pack_fields

LOOKED_FOR = 80 * 1024
"""Most bytes of a frame that is looked for within the call. A larger one takes longer than that
saves, and is better read right to its place."""


class LinkGroup(ExpressGroup, Protocol):
    """A group whose ranks are joined by links, and whose collectives are done within the call."""

    id: bytes

    @property
    def is_idle(self) -> bool:
        """Whether nothing is pending, nothing was given up early, and nobody is lost."""
        ...

    def link(self, peer: int) -> Link | None:
        """Returns the link to rank `peer`, if there is one."""
        ...


class Expecting(Protocol):
    """The memory of a phase, where it is known how long the frames are that come."""

    def due(self, spans: Spans) -> memoryview | None:
        """Returns where the frame for `spans` goes, with its length; None if that is not known."""
        ...

    def arrived(self, spans: Spans) -> None:
        """The frame for `spans` is there."""
        ...


def is_free(context: LinkGroup) -> bool:
    """Whether nothing is under way in a group that has not ended by what was read."""
    # If a peer has given it up already, its word may have arrived: behind its contribution, or over
    # a link that the call does not need. Who was busy has read neither, and would have a result
    # where all others have a verdict. (Where there is no link to that peer yet, there is nothing
    # to be read before the loop has let it in: the call may be done by then.)
    endpoint = context.endpoint
    if context.calls.arrivals.early or endpoint.progress.is_unread():
        endpoint.poll()
    return context.is_idle


class Frames:
    """The frames of the calls of one kind, one call after the other: `executor.Links` within a
    call, for the eager `plan`. Between two ranks it has one frame each way at most."""

    __slots__ = (
        "_arrivals", "_call", "_context", "_crowded", "_peers", "_prefixes", "_progress", "_seq",
        "_stencils", "links", "memory", "plan",
    )  # fmt: skip

    def __init__(self, context: LinkGroup, call: bytes, plan: Plan) -> None:
        self.plan = plan
        self._context = context
        self._call = call  # what was called, in words, as all its frames say
        self._arrivals = context.calls.arrivals  # frames of peers that are ahead
        self._progress = context.endpoint.progress  # looks for frames within the call
        self._crowded = context.size > cores()  # a peer may need this core: see `Progress._spin`
        # The ranks that the plan is about, whose links have to be there, and free.
        self._peers = sorted({step.peer for step in plan.steps if isinstance(step, (Send, Recv))})
        self._stencils: dict[int, Stencil] = {}  # by the bytes of payload
        self.memory: Any = None  # an `Expecting`: where what comes goes, in the present call
        # Of one call:
        self._seq = 0  # its number
        self.links: dict[int, StreamLink] = {}  # by peer
        self._prefixes: dict[int, bytes] = {}  # by the bytes of payload

    def begin(self, seq: int) -> bool:
        """The collective `seq` is called. Whether all links are free for it."""
        for peer in self._peers:
            link = self._context.link(peer)
            if type(link) is not StreamLink or not link.is_clear:
                return False
            self.links[peer] = link
        self._seq = seq
        self._prefixes.clear()
        return True

    def prefix(self, nbytes: int) -> bytes:
        """What comes before so many bytes of payload."""
        prefix = self._prefixes.get(nbytes)
        if prefix is None:
            stencil = self._stencils.get(nbytes)
            if stencil is None:
                begins = kinds.MESSAGE, self._context.id, None
                stencil = self._stencils[nbytes] = Stencil(begins, (0, self._call), nbytes)
            prefix = self._prefixes[nbytes] = stencil.fill(self._seq)
        return prefix

    def may_send(self, peer: int) -> bool:
        return False  # an eager plan does not ask

    def send(self, peer: int, views: Sequence[memoryview]) -> bool:
        view = views[0] if len(views) == 1 else memoryview(b"".join(views))
        self.links[peer].send_copy(self.prefix(len(view)), view)
        return True

    def take(self, peer: int, spans: Spans) -> bool:
        memory = self.memory
        into = memory.due(spans)
        if into is None:
            self.look_at_all()
            return False
        if not self.has_come(peer, self.prefix(len(into)), into):
            return False
        memory.arrived(spans)
        return True

    def has_come(self, peer: int, prefix: bytes, into: memoryview) -> bool:
        """Whether the frame of `peer` has: its payload is `into` then."""
        arrivals = self._arrivals
        if arrivals.early and arrivals.take_early((None, self._seq), peer, self._call, into):
            return True
        if len(into) > LOOKED_FOR:
            return False
        link = self.links[peer]
        found = self._progress.look(link, link.look_for, prefix, into, crowded=self._crowded)
        return found is True

    def look_at_all(self) -> None:
        """No frame is looked for, since it is not known how long they are: an operation takes them.
        If a peer has given the call up already, its word may have arrived, behind its frame."""
        self._context.endpoint.poll()

    def grant(self, peer: int, count: int) -> None:
        raise AssertionError("an eager plan grants nothing")

    def check(self, peer: int) -> None:
        """Who is lost is for the operation to hear of, that what is left becomes."""

    def waiting(self, peer: int) -> int:
        return 0


class LendingFrames(Frames):
    """Frames whose large ones are sent from where they lie, and not joined to their prefixes. Of
    what goes to several there is one copy at most, and only of what may have to be sent again.
    `settle` comes before anything is written there, or anybody else sends."""

    __slots__ = ("_header", "_lent", "_party")

    def __init__(self, context: LinkGroup, call: bytes, plan: Plan) -> None:
        super().__init__(context, call, plan)
        self._party = context.calls.party
        self._header = b""  # of the present call
        self._lent: list[int] = []  # to whom something went that is not settled

    def begin(self, seq: int) -> bool:
        self._header = b""
        return super().begin(seq)

    def send(self, peer: int, views: Sequence[memoryview]) -> bool:
        nbytes = sum(map(len, views))
        if nbytes <= JOINED:
            return super().send(peer, views)
        if not self._header:
            fields = self._context.id, None, self._seq, 0, self._call
            self._header = pack_fields(kinds.MESSAGE, *fields)
        self.links[peer].send(self._header, views, token=self, urgent=True)
        self._lent.append(peer)
        return True

    def settle(self) -> None:
        """What was sent from where it lies is read there no more."""
        if self._lent:
            lent, self._lent = self._lent, []
            self._party.settle_all(lent, self)


class Coming:
    """A frame of `src` that a call takes itself, and that is coming, or is here: its landing."""

    __slots__ = ("_came", "inflow", "is_here", "src", "view")

    def __init__(self, src: int, view: memoryview, came: Callable[[int], None]) -> None:
        self.src = src
        self.view = view
        self._came = came  # hears of `src` once it is here
        self.is_here = False
        self.inflow: Landing | None = None  # where it goes of the operation that the call is by now

    @property
    def memory(self) -> memoryview | None:
        return self.view if self.inflow is None else self.inflow.memory

    def landed(self) -> None:
        if self.inflow is not None:
            self.inflow.landed()
        else:
            self.is_here = True
            self._came(self.src)
