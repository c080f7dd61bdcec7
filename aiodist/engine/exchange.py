"""The frames of one operation: what went to each peer over links, and what came from it.

Frames between two ranks are counted over all phases of an operation. The number of a frame is its
*slot*. These numbers say how far the frames of a peer are::

    slots of a peer     0 … base … taken … arrived … allowed
                          │      │       │         └ the peer may send as far as this (bulk plans)
                          │      │       └ complete, and in the memory of this phase
                          │      └ received by steps of the plan
                          └ those of earlier phases

A frame is kept aside if its phase has not begun here, or if this rank has not granted it yet. Ranks
that are far apart send the first frames of a bulk plan without a grant, because the grant would
take a round trip (`Host.may_push`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from aiodist.engine.hosting import Host
from aiodist.engine.phase import Phase, Spans
from aiodist.errors import ProtocolError
from aiodist.schedules.plan import Recv, Send, Step
from aiodist.wire import kinds
from aiodist.wire.frames import pack_fields
from aiodist.work import Work


class Exchanging(Protocol):
    """An operation, as its exchange needs it. `heard`: the peers that are known to have entered
    it."""

    work: Work[Any]
    tag: object
    seq: int
    call: bytes
    heard: set[int]

    @property
    def waiting_for(self) -> int | None:
        """The peer that the next step needs, if it needs one."""
        ...

    def advance(self) -> None:
        """Runs steps until one has to wait."""
        ...

    def sent(self, peer: int) -> None:
        """Notes that a frame has left for `peer`."""
        ...


Op = TypeVar("Op", bound=Exchanging)

MAX_EARLY = 24 << 20
"""The most bytes of one peer's frames that are kept aside for one operation."""


@dataclass(eq=False, slots=True)
class Inflow:
    """The landing for the frames of one peer, one after the other.

    `memory`: the place of the current frame. None: there is no frame, or it is not wanted any more.
    """

    exchange: Exchange[Any]
    op: Exchanging
    src: int
    memory: memoryview | None = None
    spans: Spans | None = None  # in the current phase; None: the frame is for a later one

    def landed(self) -> None:
        data, self.memory = self.memory, None
        op, src = self.op, self.src
        if self.exchange.came(src, self.spans, data) and op.waiting_for == src:
            op.advance()


class Exchange(Generic[Op]):
    """The frames of the operation `op`, by peer.

    The executor sends and takes frames. Links bring them to the place that `message` returns.
    """

    __slots__ = (
        "_allowed", "_arrived", "_base", "_eager", "_early", "_granted", "_host", "_inflows",
        "_memory", "_op", "_party", "_pushable", "_pushed", "_receives", "_sent", "_taken", "_to",
        "_unsent", "urgent", "why_lost",
    )  # fmt: skip

    def __init__(self, host: Host[Op], op: Op, size: int) -> None:
        self._host = host
        self._party = host.party
        self.why_lost = host.party.why_lost
        self._op: Op | None = op  # None: it has ended, and must not wait for the garbage collector
        self._unsent = [0] * size  # frames that have not left yet
        self._to: set[int] = set()  # the peers that got a frame in this phase
        self._inflows: dict[int, Inflow] = {}
        self._sent = [0] * size  # the slot of the next frame to the peer
        self._granted = [0] * size  # the peer takes our frames below this slot
        self._pushed = [0] * size  # our frames below this slot went without a grant
        self._pushable = [0] * size  # our frames below this slot may do so
        self._base = [0] * size  # the slot of the first frame of this phase
        self._taken = [0] * size  # the slot of the next frame that a step takes
        self._arrived = [0] * size  # the slot of the next frame that completes
        self._allowed = [0] * size  # this rank takes the peer's frames below this slot
        # Payloads for a later phase, or without a grant.
        self._early: dict[int, deque[memoryview]] = {}
        # Of the current phase:
        self._receives: dict[int, Sequence[Recv]] = {}  # the places of frames, in order
        self._memory: Any = None  # what these spans mean
        self._eager = True  # frames need no grant
        # Eager frames overtake bulk ones, but never those of their own operation.
        self.urgent = True

    # -- phases -----------------------------------------------------------------------------------

    def begin(self, phase: Phase) -> None:
        """Begin `phase`: from here on its frames go to the places in its plan."""
        plan, self._receives, *_ = phase.prepared
        self._memory = phase.memory
        self._eager = plan.eager
        # A plan has one Recv for each frame. So at the end of a phase all its frames are taken, and
        # the next frame is the first one of this phase.
        self._base = self._taken.copy()
        if not plan.eager:
            self.urgent = False
            # Slots and grants are counted over the whole operation.
            self._allowed = [*map(max, self._allowed, self._base)]
            self._pushable = [*map(plan.pushes.__add__, self._sent)]

    def catch_up(self, steps: Iterable[Step]) -> None:
        """Count the frames of the first steps, which were done before there was an operation."""
        op = self._op
        assert op is not None
        for step in steps:
            if isinstance(step, Send):
                self._sent[step.peer] += 1
            elif isinstance(step, Recv):
                self._arrived[step.peer] += 1
                self._taken[step.peer] += 1
                op.heard.add(step.peer)

    def deliver_early(self) -> tuple[int, ProtocolError] | None:
        """Deliver what came before the phase began. Return the sender and the error, if a frame
        makes no sense."""
        for src in tuple(self._early):
            try:
                self._deliver_early(src)
            except ProtocolError as error:
                return src, error
        return None

    def _deliver_early(self, src: int) -> None:
        """Deliver the early frames of `src` that may be taken now."""
        early = self._early[src]
        # The early frames are the last ones that have arrived, without a gap.
        slot = self._arrived[src] - len(early)
        while early and (spans := self._spans(src, slot)) is not None:
            self._deliver(spans, early.popleft())
            slot += 1
        if not early:
            del self._early[src]

    def end(self) -> None:
        """End the phase: what comes now is for a later one."""
        self._receives = {}
        self._memory = None

    def close(self) -> None:
        """Let go of the operation and all memory, because the operation has ended."""
        self._op = None
        self._early.clear()
        self._turn_away()
        self._inflows.clear()
        self.end()

    def _turn_away(self) -> None:
        """Write frames that are under way nowhere, even if they have arrived in part."""
        for inflow in self._inflows.values():
            inflow.memory = None

    @property
    def is_drained(self) -> bool:
        """Whether all frames have left. Then their memory may change."""
        if any(self._unsent):
            return False
        if self._to and self._op is not None:
            # The frames have left this process, but a link that breaks has to send them again if
            # the peer lacks them. It reads our memory for that. So it has to copy them now, before
            # the user or the next phase writes there.
            self._party.settle_all(self._to, self._op)
            self._to.clear()
        return True

    def left(self, peer: int) -> None:
        self._unsent[peer] -= 1

    def has_unsent(self, peer: int) -> bool:
        return self._unsent[peer] > 0

    def arrived(self, peer: int) -> int:
        return self._arrived[peer]

    def waiting(self, peer: int) -> int:
        """Return how many frames of `peer` are ready for steps to take."""
        return self._arrived[peer] - self._taken[peer]

    # -- what the executor asks for, see `aiodist.engine.executor.Links` --------------------------

    def may_send(self, peer: int) -> bool:
        slot = self._sent[peer]
        return slot < self._granted[peer] or (self._host.pushes > 0 and slot < self._pushable[peer])

    def send(self, peer: int, views: Sequence[memoryview]) -> bool:
        host, op = self._host, self._op
        assert op is not None
        slot = self._sent[peer]
        if not self._eager and slot >= self._granted[peer]:
            if not host.may_push(op, peer, sum([view.nbytes for view in views])):
                return False
            self._pushed[peer] = slot + 1
        elif peer not in op.heard and not host.may_send(
            op, peer, sum([view.nbytes for view in views])
        ):
            return False
        lost = self.why_lost(peer)
        if lost is not None:
            raise lost
        self._sent[peer] = slot + 1
        self._unsent[peer] += 1
        self._to.add(peer)
        party = self._party
        to = party.peers[peer]
        # Directly to the link, if there is one, because large arrays take many frames.
        (to.link or to).send(
            pack_fields(kinds.MESSAGE, party.id, op.tag, op.seq, slot, op.call),
            views,
            done=partial(op.sent, peer),
            token=op,
            urgent=self.urgent,
        )
        return True

    def take(self, peer: int, spans: Spans) -> bool:
        if self._arrived[peer] <= self._taken[peer]:
            return False
        self._taken[peer] += 1
        return True

    def grant(self, peer: int, count: int) -> None:
        op, party = self._op, self._party
        assert op is not None
        self._allowed[peer] += count
        upto = self._allowed[peer]
        to = party.peers[peer]
        header = pack_fields(kinds.GRANT, party.id, op.tag, op.seq, upto, op.call)
        (to.link or to).send(header, urgent=True)
        if peer in self._early:
            self._deliver_early(peer)

    # -- what the links bring ---------------------------------------------------------------------

    def granted(self, src: int, upto: int) -> bool:
        """Note that `src` takes our frames below slot `upto`. Return whether that is news."""
        if upto <= self._granted[src]:
            return False
        self._granted[src] = upto
        return True

    def awaits_grant(self, peer: int) -> bool:
        """Return whether a frame went to `peer` that it has not granted."""
        return self._pushed[peer] > self._granted[peer]

    def message(self, src: int, slot: int, nbytes: int) -> Inflow:
        """Return the landing for a frame of `src` that begins. Raises ProtocolError."""
        op = self._op
        assert op is not None
        if slot != self._arrived[src]:
            raise ProtocolError(
                f"{op.work.op}: frame {slot} of rank {src} came, expected {self._arrived[src]}"
            )
        # One for all frames of a peer, because a link brings one payload after the other.
        inflow = self._inflows.get(src)
        if inflow is None:
            inflow = self._inflows[src] = Inflow(self, op, src)
        spans = inflow.spans = self._spans(src, slot)
        if spans is None:
            early = sum([len(data) for data in self._early.get(src, ())])
            if early + nbytes > MAX_EARLY:
                raise ProtocolError(
                    f"{op.work.op}: rank {src} sent more than {MAX_EARLY} bytes too early"
                )
            inflow.memory = memoryview(bytearray(nbytes))
        else:
            inflow.memory = self._memory.incoming(spans, nbytes)
        return inflow

    def came(self, src: int, spans: Spans | None, data: memoryview | None) -> bool:
        """Take the complete frame that `src` began last. `spans`: its place in this phase, or None
        if it came to memory of its own, `data`.

        Returns whether it belongs to this phase. Raises ProtocolError.
        """
        slot = self._arrived[src]
        if spans is not None:
            self._memory.arrived(spans)
        else:
            assert data is not None
            # While the payload came, its phase may have begun, or it was granted. Then copy it to
            # its place.
            spans = self._spans(src, slot)
            if spans is None:
                self._early.setdefault(src, deque()).append(data)
                self._arrived[src] = slot + 1
                return False
            self._deliver(spans, data)
        self._arrived[src] = slot + 1  # last, because a frame that makes no sense has not arrived
        return True

    def _spans(self, src: int, slot: int) -> Spans | None:
        """Return the place of this frame. None: it has to wait."""
        receives = self._receives.get(src)
        index = slot - self._base[src]
        if receives is None or index >= len(receives):
            return None
        if slot >= self._allowed[src] and not self._eager:
            return None
        return receives[index].spans

    def _deliver(self, spans: Spans, data: memoryview) -> None:
        view = self._memory.incoming(spans, len(data))
        view[:] = data
        self._memory.arrived(spans)
