"""The frames of a collective that is done within its call, between ranks that are joined by links.

They are those of the ordinary way, byte for byte. Their prefixes are kept, without the number of
the call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from aiodist.engine.early import Key
from aiodist.engine.phase import Spans
from aiodist.prepared.express import ExpressGroup
from aiodist.schedules.plan import Plan, Recv, Send
from aiodist.transports.base import Landing, Link
from aiodist.transports.framed import FramedLink
from aiodist.transports.polling import cores
from aiodist.transports.retransmission import JOINED
from aiodist.wire import kinds
from aiodist.wire.frames import Stencil, pack_fields

LOOKED_FOR = 80 * 1024
"""The most bytes of a frame that a call looks for.

A larger frame takes longer to arrive than that saves, and is better read straight into its place.
"""

KEPT_LENGTHS = 64
"""The most lengths of frames or blobs of which something is kept for a kind of calls."""


class LinkGroup(ExpressGroup, Protocol):
    """A group whose ranks are joined by links, and whose collectives may be prepared."""

    id: bytes

    @property
    def is_idle(self) -> bool:
        """Whether nothing is pending, nothing was given up early, and no rank is lost."""
        ...

    def link(self, peer: int) -> Link | None:
        """Return the link to rank `peer`, if there is one."""
        ...


def is_free(context: LinkGroup, tag: object = None) -> bool:
    """Say whether the group has nothing under way and has not ended, and `tag` is free."""
    if not context.is_idle:
        return False
    # Read links, because a peer may have given the collective up. Its message may be behind its
    # contribution, or on a link that this call does not need. A busy rank has read neither, and
    # would return a result though all others have a verdict. If there is no link to the peer yet,
    # nothing can be read until the loop has let it in. The call may be done by then.
    endpoint = context.endpoint
    if context.calls.arrivals.early or endpoint.progress.is_unread():
        endpoint.poll()
        if not context.is_idle:
            return False
    tags = context.calls.tags
    if tag in tags.frozen:
        return False
    tags.begin(tag)
    return True


class EagerLinks:
    """What `executor.Links` have to do for an eager plan: nothing."""

    __slots__ = ()

    def may_send(self, peer: int) -> bool:
        return False  # an eager plan does not ask

    def grant(self, peer: int, count: int) -> None:
        raise AssertionError("an eager plan grants nothing")

    def why_lost(self, peer: int) -> None:
        """Do nothing, because the call becomes an operation if a rank is lost, and that asks."""

    def waiting(self, peer: int) -> int:
        return 0


class Frames(EagerLinks):
    """The frames of calls of one kind, one call after the other.

    This is `executor.Links` within a call, for the eager `plan`. Between two ranks, it has at most
    one frame each way.
    """

    __slots__ = (
        "_arrivals", "_call", "_context", "_crowded", "_key", "_peers", "_prefixes", "_progress",
        "_stencils", "links", "memory", "plan",
    )  # fmt: skip

    def __init__(self, context: LinkGroup, call: bytes, plan: Plan) -> None:
        self.plan = plan
        self._context = context
        self._call = call  # the text of the call, which all its frames have
        self._arrivals = context.calls.arrivals  # frames of peers that are ahead
        self._progress = context.endpoint.progress  # looks for frames within the call
        self._crowded = context.size > cores()  # a peer may need this core: see `Progress._spin`
        # The peers of the plan: the call needs free links to all of them.
        self._peers = sorted({step.peer for step in plan.steps if isinstance(step, (Send, Recv))})
        self._stencils: dict[int, Stencil] = {}  # for the present tag, by the bytes of payload
        # The memory for incoming frames of the present call: `due` gives the place of a frame.
        self.memory: Any = None
        # Of the present call:
        self._key: Key = (None, 0)  # its tag and number
        self.links: dict[int, FramedLink] = {}  # by peer
        self._prefixes: dict[int, bytes] = {}  # by the bytes of payload

    def begin(self, key: Key) -> bool:
        """Begin the collective with this tag and number. Return whether the links to all peers are
        free."""
        for peer in self._peers:
            link = self._context.link(peer)
            if not (isinstance(link, FramedLink) and link.is_clear):
                return False
            self.links[peer] = link
        if key[0] != self._key[0]:
            self._stencils.clear()
        self._key = key
        self._prefixes.clear()
        return True

    def prefix(self, nbytes: int) -> bytes:
        """Return what precedes a payload of so many bytes."""
        prefix = self._prefixes.get(nbytes)
        if prefix is None:
            tag, seq = self._key
            stencil = self._stencils.get(nbytes)
            if stencil is None:
                if len(self._stencils) >= KEPT_LENGTHS:
                    self._stencils.clear()
                begins = kinds.MESSAGE, self._context.id, tag
                stencil = self._stencils[nbytes] = Stencil(begins, (0, self._call), nbytes)
            prefix = self._prefixes[nbytes] = stencil.fill(seq)
        return prefix

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
        """Look for the frame of `peer`. If it has come, its payload is in `into`."""
        arrivals = self._arrivals
        if arrivals.early and arrivals.take_early(self._key, peer, self._call, into):
            return True
        if len(into) > LOOKED_FOR:
            return False
        link = self.links[peer]
        found = self._progress.look(link, link.look_for, prefix, into, crowded=self._crowded)
        return found is True

    def look_at_all(self) -> None:
        """Read all links, because frame lengths are not known, so that no frame can be looked for.

        If a peer has given the call up, its message may be behind its frame. An operation takes
        them.
        """
        self._context.endpoint.poll()


class LendingFrames(Frames):
    """Frames that are sent without a copy if they are large.

    Small ones are joined to their prefixes. If a frame goes to several peers, it is copied once at
    most, and only if it may have to be sent again. Call `settle` before anything is written to the
    sent memory, and before other frames are sent.
    """

    __slots__ = ("_header", "_lent", "_party")

    def __init__(self, context: LinkGroup, call: bytes, plan: Plan) -> None:
        super().__init__(context, call, plan)
        self._party = context.calls.party
        self._header = b""  # of the present call
        self._lent: list[int] = []  # peers with sent memory that is not settled

    def begin(self, key: Key) -> bool:
        self._header = b""
        return super().begin(key)

    def send(self, peer: int, views: Sequence[memoryview]) -> bool:
        nbytes = sum(map(len, views))
        if nbytes <= JOINED:
            return super().send(peer, views)
        if not self._header:
            fields = kinds.MESSAGE, self._context.id, *self._key, 0, self._call
            self._header = pack_fields(*fields)
        self.links[peer].send(self._header, views, token=self, urgent=True)
        self._lent.append(peer)
        return True

    def settle(self) -> None:
        """Let links copy what they still need of sent memory, so that it may be written over."""
        if self._lent:
            lent, self._lent = self._lent, []
            self._party.settle_all(lent, self)


class ComingFrame:
    """The frame of `src` that a call takes itself, from its first byte on: its landing."""

    __slots__ = ("_came", "inflow", "is_here", "src", "view")

    def __init__(self, src: int, view: memoryview, came: Callable[[int], None]) -> None:
        self.src = src
        self.view = view
        self._came = came  # called with `src` when the frame is here
        self.is_here = False
        self.inflow: Landing | None = None  # its landing in the operation that the call has become

    @property
    def memory(self) -> memoryview | None:
        return self.view if self.inflow is None else self.inflow.memory

    def landed(self) -> None:
        if self.inflow is not None:
            self.inflow.landed()
        else:
            self.is_here = True
            self._came(self.src)
