"""The frames of one operation: what has gone to each peer over links, and what has come of it.

Frames between two ranks are counted over all phases of an operation, and the number of a frame is
its *slot*. Three slots of each peer matter here, and say where its frames are::

    slots of a peer     0 … base … taken … arrived … allowed
                          │      │       │         └ the peer may send as far as this (bulk plans)
                          │      │       └ complete, and in the memory of this phase
                          │      └ received by steps of the plan
                          └ those of earlier phases

A frame whose phase has not begun here is kept aside until it does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeVar

from aiodist.engine.hosting import Host
from aiodist.engine.phase import Phase, Spans
from aiodist.errors import ProtocolError
from aiodist.schedules.plan import Recv, Send, Step
from aiodist.work import Work


class Exchanging(Protocol):
    """An operation. `heard` are the peers that are known to have entered it."""

    work: Work[Any]
    heard: set[int]


Op = TypeVar("Op", bound=Exchanging)


class Exchange(Generic[Op]):
    """The frames of the operation `op`, by peer. The executor of its phase sends and takes them;
    the links bring them, by `message` and `payload`."""

    __slots__ = (
        "_allowed", "_arrived", "_base", "_eager", "_early", "_granted", "_host", "_memory", "_op",
        "_receives", "_sent", "_staging", "_taken", "_to", "_unsent", "urgent",
    )  # fmt: skip

    def __init__(self, host: Host[Op], op: Op, size: int) -> None:
        self._host = host
        self._op = op
        self._unsent = [0] * size  # frames that were sent and have not left yet
        self._to: set[int] = set()  # to whom something was sent in this phase
        self.forget()

    def forget(self) -> None:
        """What was exchanged till now does not count: both sides begin anew. What is on its way
        out still has to leave."""
        size = len(self._unsent)
        self._sent = [0] * size  # the slot of the next frame to the peer
        self._granted = [0] * size  # the peer takes ours with slots below
        self._base = [0] * size  # the slot of the first frame of this phase
        self._taken = [0] * size  # the slot of the next frame that a step takes
        self._arrived = [0] * size  # the slot of the next frame that completes
        self._allowed = [0] * size  # this rank takes the peer's with slots below
        self._early: dict[int, deque[bytearray]] = {}  # payloads for a later phase
        self._staging: dict[int, bytearray | Spans] = {}  # where the payload goes that comes now
        # Of the phase that runs:
        self._receives: dict[int, list[Spans]] = {}  # where the frames of a peer go, in order
        self._memory: Any = None  # what these spans mean
        self._eager = True  # nobody has to be granted a frame
        # Eager frames overtake bulk ones, but never those of their own operation.
        self.urgent = True

    # -- phases -----------------------------------------------------------------------------------

    def begin(self, phase: Phase) -> None:
        """`phase` begins: from here on its frames go where its plan wants them."""
        plan, self._receives, *_ = phase.prepared
        self._memory = phase.memory
        self._eager = plan.eager
        self._base = self._taken.copy()
        if not plan.eager:
            self.urgent = False
            # Slots are counted over the whole operation, and so are grants.
            self._allowed = [max(a, b) for a, b in zip(self._allowed, self._base, strict=True)]

    def catch_up(self, steps: Sequence[Step]) -> None:
        """These first steps of the phase were done before there was an operation."""
        for step in steps:
            if isinstance(step, Send):
                self._sent[step.peer] += 1
            elif isinstance(step, Recv):
                self._arrived[step.peer] += 1
                self._taken[step.peer] += 1
                self._op.heard.add(step.peer)

    def deliver_early(self) -> tuple[int, ProtocolError] | None:
        """Hand over what came before the phase began; or return who sent what makes no sense."""
        for src, early in list(self._early.items()):
            slot = self._arrived[src] - len(early)
            while early and (spans := self._spans(src, slot)) is not None:
                try:
                    self._deliver(spans, early.popleft())
                except ProtocolError as error:
                    return src, error
                slot += 1
            if not early:
                del self._early[src]
        return None

    def end(self) -> None:
        """The phase is over: what comes now is for a later one."""
        self._receives = {}
        self._memory = None

    def close(self) -> None:
        """The operation has ended: let go of all memory."""
        self._early.clear()
        self._staging.clear()
        self.end()

    @property
    def is_drained(self) -> bool:
        """Whether all that was sent has left; then its memory is free again."""
        if any(self._unsent):
            return False
        for peer in self._to:
            self._host.settle(peer, self._op)
        self._to.clear()
        return True

    def left(self, peer: int) -> None:
        """A frame has left for `peer`."""
        self._unsent[peer] -= 1

    def has_unsent(self, peer: int) -> bool:
        """Whether something for `peer` has not left yet."""
        return self._unsent[peer] > 0

    def waiting(self, peer: int) -> int:
        """How many frames of `peer` are there for steps to take."""
        return self._arrived[peer] - self._taken[peer]

    # -- what the executor asks for, see `aiodist.engine.executor.Links` --------------------------

    def may_send(self, peer: int) -> bool:
        return self._sent[peer] < self._granted[peer]

    def send(self, peer: int, views: Sequence[memoryview]) -> bool:
        host, op = self._host, self._op
        if peer not in op.heard and not host.may_send(
            op, peer, sum([view.nbytes for view in views])
        ):
            return False
        self.check(peer)
        slot = self._sent[peer]
        self._sent[peer] = slot + 1
        self._unsent[peer] += 1
        self._to.add(peer)
        host.send_message(op, peer, slot, views)
        return True

    def take(self, peer: int, spans: Spans) -> bool:
        if self._arrived[peer] <= self._taken[peer]:
            return False
        self._taken[peer] += 1
        return True

    def grant(self, peer: int, count: int) -> None:
        self._allowed[peer] += count
        self._host.send_grant(self._op, peer, self._allowed[peer])

    def check(self, peer: int) -> None:
        lost = self._host.why_lost(peer)
        if lost is not None:
            raise lost

    # -- what the links bring ---------------------------------------------------------------------

    def granted(self, src: int, upto: int) -> bool:
        """`src` takes our frames with slots below `upto`. Whether that is news."""
        if upto <= self._granted[src]:
            return False
        self._granted[src] = upto
        return True

    def message(self, src: int, slot: int, nbytes: int) -> memoryview:
        """A frame of `src` begins: where its payload goes. Raises ProtocolError."""
        op = self._op.work.op
        if slot != self._arrived[src]:
            raise ProtocolError(
                f"{op}: frame {slot} of rank {src} where {self._arrived[src]} was due"
            )
        spans = self._spans(src, slot)
        if spans is None:
            early = bytearray(nbytes)
            self._staging[src] = early
            return memoryview(early)
        if slot >= self._allowed[src] and not self._eager:
            raise ProtocolError(f"{op}: frame {slot} of rank {src} was not granted")
        self._staging[src] = spans
        view: memoryview = self._memory.incoming(spans, nbytes)
        return view

    def payload(self, src: int) -> bool:
        """The frame that began last from `src` is complete. Whether it is one of this phase."""
        where = self._staging.pop(src)
        slot = self._arrived[src]
        if isinstance(where, bytearray):
            spans = self._spans(src, slot)
            if spans is None:
                self._early.setdefault(src, deque()).append(where)
                self._arrived[src] = slot + 1
                return False
            self._deliver(spans, where)
        else:
            self._memory.arrived(where)
        self._arrived[src] = slot + 1  # not before: what makes no sense has not come
        return True

    def receiving_from(self) -> list[int]:
        """The peers whose current frame has come only in part: its payload is not complete."""
        return list(self._staging)

    def _spans(self, src: int, slot: int) -> Spans | None:
        receives = self._receives.get(src)
        index = slot - self._base[src]
        if receives is None or index >= len(receives):
            return None
        return receives[index]

    def _deliver(self, spans: Spans, data: bytearray) -> None:
        view = self._memory.incoming(spans, len(data))
        view[:] = data
        self._memory.arrived(spans)
