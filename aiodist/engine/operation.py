"""One collective on one rank: its phases, executed step by step as frames come in.

A collective is a generator of phases (`aiodist.collectives`). Each phase is a pure `Plan`
and the memory that the plan's spans mean. The operation runs the plan's steps in order, entered
synchronously from the call that starts it and from the links; nothing in here waits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

from aiodist.engine.hosting import Host
from aiodist.engine.pull import PullPhase, PullRun, area_for
from aiodist.errors import ProtocolError
from aiodist.schedules.plan import Await, Copy, Grant, Plan, Recv, Reduce, Send, Span, Step
from aiodist.schedules.pull import moved
from aiodist.shared_memory.board import ON_DEVICE
from aiodist.shared_memory.lane import DifferentCallsError, Lane
from aiodist.work import Work

Spans = tuple[Span, ...]


class Memory(Protocol):
    """What the spans of a plan mean. Where the plan has `Copy` and `Reduce` steps, the memory has
    ``copy(step)`` and ``reduce(step)``, too; where it is a mixed one, also what a `PullMemory`
    has."""

    def outgoing(self, spans: Spans) -> Sequence[memoryview]:
        """The bytes to send. They must not change until the frame has left."""
        ...

    def incoming(self, spans: Spans, nbytes: int) -> memoryview:
        """Where a frame of `nbytes` goes. Raises ProtocolError where that is no possible size."""
        ...

    def arrived(self, spans: Spans) -> None:
        """The frame for `spans` is complete."""
        ...


class Prepared(NamedTuple):
    """A plan, the spans of its receives by peer, in order, and the units that it shows to others in
    shared memory and takes from them."""

    plan: Plan
    receives: dict[int, list[Spans]]
    shown: int
    taken: int


@lru_cache(maxsize=64)
def prepared(algorithm: Callable[..., Plan], *args: Any) -> Prepared:
    """The plan ``algorithm(*args)``, kept: the same shapes tend to come again and again."""
    plan = algorithm(*args)
    receives: dict[int, list[Spans]] = {}
    for step in plan.steps:
        if type(step) is Recv:
            receives.setdefault(step.peer, []).append(step.spans)
    return Prepared(plan, receives, *moved(plan))


class Phase(NamedTuple):
    """A plan to execute on a memory. A mixed plan runs on a lane as well: it is of units of
    `itemsize` bytes, and needs `shared` bytes of each rank's area (None: it is not mixed).
    `done`: so many steps are done already; only of a first phase, see `Operation.catch_up`."""

    prepared: Prepared
    memory: Memory
    itemsize: int = 0
    shared: int | None = None
    done: int = 0


class Running(Protocol):
    """A phase in shared memory that is under way."""

    def run(self) -> bool:
        """Go on. True: done. False: it has to wait; `Operation.resume` is called in due course."""
        ...

    def close(self) -> None:
        """Let go of shared memory: it is done, or never goes on."""
        ...


class Pause(ABC):
    """A phase that waits for something on this rank, not for a peer: `run` says whether it is over,
    and if not, sees to it that `resume` is called when it may be.

    `last`: nothing is exchanged with any peer from here on.
    """

    resume: Callable[[], None]
    last = False

    def belong(self, operation: Operation) -> None:
        """It is a phase of `operation`, and begins."""
        self.resume = operation.advance

    @abstractmethod
    def run(self) -> bool:
        """Whether it is over."""

    @abstractmethod
    def close(self) -> None:
        """It is over, or nobody waits any more."""


class Failure(NamedTuple):
    """What a program returns that has run to its end, and has no result. The others need not be
    told: they have all that this rank gives, and come to ends of their own."""

    error: Exception


Program = Generator[Phase | PullPhase | Running, None, Any]
Start = Callable[[bool], Program]
"""Makes a program, given whether it runs on a lane: there, and only there, it may have phases in
shared memory."""


def refused(on_lane: bool) -> Program:
    """What a collective starts that was called with what it cannot take: it never does."""
    raise AssertionError("a call that was refused has started")


class Operation:
    """A started collective. `waiting_for` is the peer that the next step needs, or None."""

    __slots__ = (
        "_allowed", "_area", "_arrived", "_base", "_bound", "_consumed", "_draining", "_early",
        "_granted", "_host", "_memory", "_moved", "_pc", "_plan", "_program", "_receives",
        "_running", "_running_phase", "_sent", "_staging", "_start", "_to", "_unsent", "call",
        "digest", "done", "heard", "lane", "place", "roll", "seen", "seq", "tag", "timer",
        "unsolicited", "urgent", "waiting_for", "work",
    )  # fmt: skip

    def __init__(
        self,
        host: Host[Operation],
        work: Work[Any],
        tag: object,
        call: bytes,
        start: Start,
        size: int,
        place: int = 0,
    ) -> None:
        self.work = work  # what the caller awaits
        self.tag = tag
        self.seq = -1  # its number among the collectives of its tag; -1: none yet
        self.call = call  # what was called, in words: all ranks must agree on it
        self.digest = 0  # on a lane: that of `call`, to be compared with the others'
        self.place = place  # where its array lies in memory that all ranks see
        # Whether the arrays of others are on devices, as far as it was heard; None: this rank's is
        # not, so it need not know (`aiodist.engine.roll_call`).
        self.roll: dict[int, bool] | None = {} if place == ON_DEVICE else None
        self.lane: Lane | None = None  # where it runs; None: over links alone
        self.done = False  # it has ended, well or not, and never runs again
        self.waiting_for: int | None = None
        self.timer: Any = None  # of its deadline
        self.heard: set[int] = set()  # peers that are known to have entered it
        self.unsolicited: dict[int, int] = {}  # bytes that were sent to others than those, by peer
        self.seen: dict[int, str] = {}  # what peers do that have not entered it, in words
        # Eager frames overtake bulk ones, but never those of their own operation.
        self.urgent = True
        self._host = host
        self._start = start  # makes the program
        self._program: Program | None = None  # yields one phase after the other
        self._running_phase: Running | None = None  # if it is one without a `_plan`
        # Frames, by peer, counted over all phases: the slot of a frame is its number.
        self._sent = [0] * size
        self._arrived = [0] * size  # whose payload is complete here
        self._base = [0] * size  # that were due in the phases before this one
        self._consumed = [0] * size  # of this phase alone: those that its steps have received
        self._granted = [0] * size  # the peer takes ours with slots below
        self._allowed = [0] * size  # we take the peer's with slots below
        self._early: dict[int, deque[bytearray]] = {}  # payloads for a later phase, by peer
        self._staging: dict[int, bytearray | Spans] = {}  # where the payload goes that comes now
        self._unsent = [0] * size  # that were sent and have not left yet
        self._to: set[int] = set()  # to whom something was sent in this phase
        self._running = False  # its steps are being run: not to be done again within that
        self._draining = False  # all steps of the phase are done, but not all frames have left
        # Of the running phase:
        self._plan: Plan | None = None
        self._receives: dict[int, list[Spans]] = {}  # where the frames of a peer go, in order
        self._memory: Any = None  # what the spans of the plan mean
        self._area: int | None = None  # in shared memory, of a mixed plan
        self._bound = False  # `_memory` uses that area now
        self._moved = (0, 0)  # bytes that it shows and takes there
        self._pc = 0  # the number of the step that is next

    # -- entered by the context ---------------------------------------------------------------

    def start(self) -> None:
        """Run as far as can be."""
        self._program = self._start(self.lane is not None)
        self._begin()

    def catch_up(self, steps: Sequence[Step]) -> None:
        """Before it starts: these first steps of its plan are done already."""
        for step in steps:
            if isinstance(step, Send):
                self._sent[step.peer] += 1
            elif isinstance(step, Recv):
                self._arrived[step.peer] += 1
                self.heard.add(step.peer)

    def called_with(self, src: int, *, on_device: bool) -> None:
        """Where the array of `src` lies. Its first word counts, see `roll_call`."""
        assert self.roll is not None
        if src not in self.roll:
            self.roll[src] = on_device
            if self._program is not None:
                self.advance()

    def resume(self) -> None:
        """It is its turn on its lane."""
        assert self.lane is not None
        if self.done:
            return
        if self._program is not None:
            self.advance()
        elif self.lane.enter(self):
            self.start()

    def granted(self, src: int, upto: int) -> None:
        """`src` takes our frames with slots below `upto`."""
        self._hear(src)
        if upto > self._granted[src]:
            self._granted[src] = upto
            if self.waiting_for == src:
                self.advance()

    def admitted(self, src: int) -> None:
        """`src` has entered, and takes what it was not known to want."""
        self._hear(src)
        if self.waiting_for == src:
            self.advance()

    def _hear(self, src: int) -> None:
        if src not in self.heard:
            self.heard.add(src)
            if self.unsolicited:
                self._host.refund(self, src)

    def message(self, src: int, slot: int, nbytes: int) -> memoryview:
        """A frame of `src` begins: where its payload goes."""
        self._hear(src)
        if slot != self._arrived[src]:
            raise ProtocolError(
                f"{self.work.op}: frame {slot} of rank {src} where {self._arrived[src]} was due"
            )
        spans = self._spans(src, slot)
        if spans is None:
            early = bytearray(nbytes)
            self._staging[src] = early
            return memoryview(early)
        if slot >= self._allowed[src] and self._plan is not None and not self._plan.eager:
            raise ProtocolError(f"{self.work.op}: frame {slot} of rank {src} was not granted")
        self._staging[src] = spans
        view: memoryview = self._memory.incoming(spans, nbytes)
        return view

    def payload(self, src: int) -> None:
        """The frame that began last from `src` is complete."""
        where = self._staging.pop(src)
        slot = self._arrived[src]
        if isinstance(where, bytearray):
            spans = self._spans(src, slot)
            if spans is None:
                self._early.setdefault(src, deque()).append(where)
                self._arrived[src] = slot + 1
                return
            self._deliver(spans, where)
        else:
            self._memory.arrived(where)
        self._arrived[src] = slot + 1  # now: what makes no sense has not come, see `needs`
        if self.waiting_for == src:
            self.advance()

    def receiving_from(self) -> list[int]:
        """The peers whose current frame has come only in part: its payload is not complete."""
        return list(self._staging)

    def needs(self, peer: int) -> bool:
        """Whether the rest of the current phase exchanges anything with `peer`."""
        if isinstance(self._running_phase, Pause) and self._running_phase.last:
            return False
        if self.lane is not None and (self._running_phase is not None or self._plan is None):
            return True
        # What has not left never will.
        if self._plan is None or self._unsent[peer] or isinstance(self._running_phase, Pause):
            return True
        receives = 0
        for step in self._plan.steps[self._pc :]:
            if type(step) is Send and step.peer == peer:
                return True
            if type(step) is Recv and step.peer == peer:
                receives += 1
            if type(step) is Await and peer in step.peers:
                assert self.lane is not None
                if not self.lane.has_published(peer, step.count):
                    return True
        return receives > self._arrived[peer] - self._base[peer] - self._consumed[peer]

    def close(self) -> None:
        """Never run again; let go of all memory."""
        self.done = True
        self.waiting_for = None
        self._plan = None
        self._early.clear()
        self._staging.clear()
        if not self._running:
            self._release()

    # -- running ------------------------------------------------------------------------------

    def advance(self) -> None:
        """Run steps until one has to wait, or the operation is done."""
        if self._running or self.done:
            return
        self._running = True
        try:
            while not self.done and self._run():
                if not self._is_drained():
                    self._draining = True
                    return
                self._next_phase()
        except DifferentCallsError as error:
            self._host.differ(self, error.calls)
        except Exception as error:
            # Who gave it up has said so, and may have written anything to what was read here.
            if self.lane is None or self.lane.current is not self or not self._is_void():
                self._host.failed(self, error)
        finally:
            self._running = False
            if self.done:
                self._release()

    def _release(self) -> None:
        if self._program is not None:
            self._program.close()
        self._plan = None
        if self._running_phase is not None:
            self._running_phase.close()
            self._running_phase = None
        self._unbind()
        self._memory = None
        self._receives = {}

    def _run(self) -> bool:
        """Execute steps of the current plan. True: all are done."""
        if self._running_phase is not None:
            return self._running_phase.run()
        if self._area is not None and not self._bind(self._area):
            return False
        plan = self._plan
        assert plan is not None
        steps = plan.steps
        eager = plan.eager
        memory = self._memory
        host = self._host
        pc = self._pc
        end = len(steps)
        while pc < end:
            step: Any = steps[pc]
            kind = type(step)  # looked at rather than isinstance(): large arrays take many steps
            if kind is Copy:
                memory.copy(step)
            elif kind is Recv:
                peer = step.peer
                if self._arrived[peer] - self._base[peer] <= self._consumed[peer]:
                    return self._wait(pc, peer)
                self._consumed[peer] += 1
            elif kind is Reduce:
                memory.reduce(step)
            elif kind is Send:
                peer = step.peer
                slot = self._sent[peer]
                if not eager and slot >= self._granted[peer]:
                    return self._wait(pc, peer)
                if self._bound and self._is_void():
                    self._pc = pc
                    self.waiting_for = None
                    return False
                views = memory.outgoing(step.spans)
                if peer not in self.heard and not host.may_send(
                    self, peer, sum([view.nbytes for view in views])
                ):
                    return self._wait(pc, peer)
                lost = host.why_lost(peer)
                if lost is not None:
                    raise lost
                self._sent[peer] = slot + 1
                self._unsent[peer] += 1
                self._to.add(peer)
                host.send_message(self, peer, slot, views)
            elif kind is Grant:
                peer = step.peer
                self._allowed[peer] += step.count
                host.send_grant(self, peer, self._allowed[peer])
            else:
                lane = self.lane
                assert lane is not None
                if kind is not Await:
                    lane.publish()
                elif not lane.wait_for(step.peers, step.count):
                    self._pc = pc
                    self.waiting_for = None
                    late = [p for p in step.peers if not lane.has_published(p, step.count)]
                    return self._rest(late)
            pc += 1
            if self._plan is not plan:  # it has ended during a send
                return not self.done
        self._pc = pc
        self.waiting_for = None
        if self._area is None:
            return True
        assert self.lane is not None
        if not self.lane.end(self._area):
            return False
        self.lane.moved.add(*self._moved)
        return True

    def _bind(self, area: int) -> bool:
        """Have the own area of shared memory for this phase. False: wait."""
        if not self._bound:
            assert self.lane is not None
            if not self.lane.begin(area):
                return self._rest(self.lane.others)
            self._memory.bind(self.lane, area)
            self._bound = True
        return True

    def _unbind(self) -> None:
        if self._bound:
            self._memory.unbind()
        self._area = None
        self._bound = False

    def _is_void(self) -> bool:
        """Whether someone gave the operation up whose memory was read: then nothing made of it may
        leave this host, where nobody could tell."""
        assert self.lane is not None
        return self.lane.is_void()

    def _rest(self, peers: Sequence[int]) -> bool:
        """Wait for `peers` on the lane; raise if one of them is lost."""
        for peer in peers:
            lost = self._host.why_lost(peer)
            if lost is not None:
                raise lost
        return False

    def _wait(self, pc: int, peer: int) -> bool:
        self._pc = pc
        self.waiting_for = peer
        lost = self._host.why_lost(peer)
        if lost is not None:
            raise lost
        return False

    def sent(self, peer: int) -> None:
        """A frame has left for `peer` (the `done` of its send)."""
        self._unsent[peer] -= 1
        if self._draining and not self.done and self._is_drained():
            self._draining = False
            self._begin()

    def _begin(self) -> None:
        """Begin the next phase, and run as far as can be."""
        self._running = True
        try:
            self._next_phase()
        except Exception as error:
            self._host.failed(self, error)
        finally:
            self._running = False
        if self.done:
            self._release()
        self.advance()

    def _is_drained(self) -> bool:
        """Whether all that was sent has left; then its memory is free again."""
        if any(self._unsent):
            return False
        for peer in self._to:
            self._host.settle(peer, self)
        self._to.clear()
        return True

    def _next_phase(self) -> None:
        for peer, spans in self._receives.items():
            self._base[peer] += len(spans)
        self._receives = {}
        if self._running_phase is not None:
            self._running_phase.close()
            self._running_phase = None
        self._unbind()
        assert self._program is not None
        try:
            if self.work.trace is not None:
                self.work.trace("phase", self.work, None)
            phase = next(self._program)
            if isinstance(phase, PullPhase):
                assert self.lane is not None
                self._running_phase = PullRun(self.lane, self, phase)
            elif not isinstance(phase, Phase):
                self._running_phase = phase
                if isinstance(phase, Pause):
                    phase.belong(self)
        except StopIteration as stop:
            self.done = True
            self._host.finished(self, stop.value)
            return
        except Exception as error:
            self._host.failed(self, error)
            return
        if not isinstance(phase, Phase):
            return
        plan, receives, *_ = phase.prepared
        self._plan = plan
        self._receives = receives
        self._memory = phase.memory
        self._pc = phase.done
        if phase.shared is not None:
            assert self.lane is not None
            self._area = area_for(phase.shared, self.seq, self.lane.next_phase())
            prepared = phase.prepared
            self._moved = prepared.shown * phase.itemsize, prepared.taken * phase.itemsize
        size = len(self._sent)
        self._consumed = [0] * size
        for step in plan.steps[: self._pc]:
            if isinstance(step, Recv):
                self._consumed[step.peer] += 1
        if not plan.eager:
            self.urgent = False
            # Slots are counted over the whole operation, and so are grants.
            self._allowed = [max(a, b) for a, b in zip(self._allowed, self._base, strict=True)]
        for src, early in list(self._early.items()):
            slot = self._arrived[src] - len(early)
            while early:
                spans_of = self._spans(src, slot)
                if spans_of is None:
                    break
                try:
                    self._deliver(spans_of, early.popleft())
                except ProtocolError as error:
                    self._host.blame(self, src, error)
                    return
                slot += 1
            if not early:
                del self._early[src]

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
