"""One collective on one rank: its phases, one after the other, from the call to its end.

A collective is a generator of phases (`aiodist.collectives`). The operation asks for one after the
other, and has each run: by an executor where it is a plan, or until it is over where it is a pause.
What comes of peers is kept in its `exchange`. The operation is entered synchronously, from the call
that starts it, from the links, and from its lane; nothing in here waits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from typing import Any, NamedTuple, Protocol

from aiodist.engine.exchange import Exchange
from aiodist.engine.executor import Executor, begin_area
from aiodist.engine.hosting import Host
from aiodist.engine.phase import Phase
from aiodist.shared_memory.board import ON_DEVICE
from aiodist.shared_memory.lane import DifferentCallsError, Lane
from aiodist.transports.base import Landing
from aiodist.work import Work


class Running(Protocol):
    """A phase that is under way. `waiting_for` is the peer that it needs to go on, if it is one."""

    @property
    def waiting_for(self) -> int | None: ...

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
    waiting_for: int | None = None
    last = False

    def needs(self, peer: int) -> bool:
        """Whether anything is exchanged with `peer` from here on."""
        return not self.last

    def belong(self, operation: Operation) -> None:
        """Begin, as a phase of `operation`."""
        self.resume = operation.advance

    @abstractmethod
    def run(self) -> bool:
        """Whether it is over."""

    @abstractmethod
    def close(self) -> None:
        """The phase is over, or nobody waits for it any more."""


class Failure(NamedTuple):
    """What a program returns that has run to its end, and has no result. The others need not be
    told: they have all that this rank gives, and come to ends of their own."""

    error: Exception


Program = Generator[Phase | Running, None, Any]
Start = Callable[[bool], Program]
"""Makes a program, given whether it runs on a lane: there, and only there, it may have phases in
shared memory."""


def refused(on_lane: bool) -> Program:
    """What a collective starts that was called with what it cannot take: it never does."""
    raise AssertionError("a call that was refused has started")


class Operation:
    """A started collective, from its call to its end."""

    __slots__ = (
        "_draining", "_host", "_phase", "_program", "_running", "_start", "call", "digest", "done",
        "exchange", "heard", "knocked", "lane", "place", "roll", "seen", "seq", "tag", "timer",
        "unsolicited", "work",
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
        self.timer: Any = None  # of its deadline
        self.heard: set[int] = set()  # peers that are known to have entered it
        self.knocked: set[int] = set()  # peers that were asked to say when they have entered it
        # Bytes that were sent to others than those, or before these had granted them, by peer.
        self.unsolicited: dict[int, int] = {}
        self.seen: dict[int, str] = {}  # what peers do that have not entered it, in words
        self.exchange: Exchange[Operation] = Exchange(host, self, size)  # its frames, by peer
        self._host = host
        self._start = start  # makes the program
        self._program: Program | None = None  # yields one phase after the other
        self._phase: Executor | Running | None = None  # the one that runs
        self._running = False  # its phase is being run: not to be entered again within that
        self._draining = False  # the phase is over, but not all frames have left

    # -- entered by the context ---------------------------------------------------------------

    def start(self) -> None:
        """Begin its first phase; `advance` runs it."""
        self._program = self._start(self.lane is not None)
        if self._phase is None:
            self._begin()
            return
        try:
            self._tell_phase()
        except Exception as error:
            self._host.failed(self, error)

    def carry_on(self, executor: Executor) -> None:
        """Before it starts: its first phase is under way already, and its program is what comes
        after that."""
        self._phase = executor
        self._note_plan(executor.phase)
        self.exchange.begin(executor.phase)
        self.exchange.catch_up(executor.done)
        executor.hand_over(self.exchange)

    def called_with(self, src: int, *, on_device: bool) -> None:
        """Where the array of `src` lies. Its first word counts, see `roll_call`."""
        assert self.roll is not None
        if src not in self.roll:
            self.roll[src] = on_device
            if self._program is not None:
                self.advance()

    def resume(self) -> None:
        """The operation has its turn on its lane."""
        assert self.lane is not None
        if self.done:
            return
        if self._program is not None:
            self.advance()
        elif self.lane.enter(self):
            self.start()
            self.advance()

    @property
    def waiting_for(self) -> int | None:
        """The peer that the next step needs, if it is a peer."""
        return None if self._phase is None else self._phase.waiting_for

    def granted(self, src: int, upto: int) -> Landing | None:
        """`src` takes our frames with slots below `upto`."""
        is_news = self.exchange.granted(src, upto)
        self._hear(src)
        return self if is_news and self.waiting_for == src else None

    def admitted(self, src: int) -> Landing | None:
        """`src` has entered, and takes what it was not known to want."""
        self._hear(src)
        return self if self.waiting_for == src else None

    def _hear(self, src: int) -> None:
        self.heard.add(src)
        if self.unsolicited and not self.exchange.awaits_grant(src):
            self._host.refund(self, src)

    def lacks(self, src: int, slot: int) -> bool:
        """Whether any frame of `src` before this slot is not here."""
        return slot > self.exchange.arrived(src)

    def message(self, src: int, slot: int, nbytes: int) -> Landing:
        """A frame of `src` begins: where its payload goes. Raises ProtocolError."""
        self._hear(src)
        return self.exchange.message(src, slot, nbytes)

    def sent(self, peer: int) -> None:
        """A frame has left for `peer` (the `done` of its send)."""
        self.exchange.left(peer)
        if self._draining and not self.done and self.exchange.is_drained:
            self._draining = False
            self._begin()
            self.advance()

    def needs(self, peer: int) -> bool:
        """Whether the rest of the current phase exchanges anything with `peer`."""
        phase = self._phase
        if isinstance(phase, Executor):
            # What has not left never will.
            return self.exchange.has_unsent(peer) or phase.needs(peer)
        return not isinstance(phase, Pause) or phase.needs(peer)

    def close(self) -> None:
        """Never run again; let go of all memory."""
        self.done = True
        self.exchange.close()
        if isinstance(self._phase, Executor):
            self._phase.stop()
        # Where this is called from within a step, that step still has the memory in its hands:
        # `advance` releases it on its way out.
        if not self._running:
            self._release()

    # -- running ------------------------------------------------------------------------------

    def advance(self) -> None:
        """Run phases until one has to wait, or the operation is done."""
        if self._running or self.done or self._draining:
            return
        self._running = True
        try:
            while not self.done:
                phase = self._phase
                assert phase is not None
                if not phase.run() or self.done:
                    return
                # Frames that have not left are read from the memory of this phase. The next one may
                # write there, and the end of the operation gives it back to the user.
                if not self.exchange.is_drained:
                    self._draining = True
                    return
                self._next_phase()
        except DifferentCallsError as error:
            self._host.differ(self, error.calls)
        except Exception as error:
            # Who gave it up has said so, and may have written anything to what was read here.
            lane = self.lane
            if lane is None or lane.current is not self or not lane.is_void():
                self._host.failed(self, error)
        finally:
            self._running = False
            if self.done:
                self._release()

    # An operation is itself the landing of a frame without a payload with which it may go on. So it
    # does not do so below all those who have passed on the header, but once they are done.
    memory = None
    landed = advance

    def _begin(self) -> None:
        """Begin the next phase."""
        self._running = True
        try:
            self._next_phase()
        except Exception as error:
            self._host.failed(self, error)
        finally:
            self._running = False
        if self.done:
            self._release()

    def _next_phase(self) -> None:
        self._end_phase()
        assert self._program is not None
        try:
            self._tell_phase()
            phase = next(self._program)
            if isinstance(phase, Phase):
                area = begin_area(phase, self.lane, self.seq)
                self._phase = Executor(phase, self.exchange, self.lane, area, self.place)
            else:
                self._phase = phase
                if isinstance(phase, Pause):
                    phase.belong(self)
        except StopIteration as stop:
            self.done = True
            self._host.finished(self, stop.value)
            return
        except Exception as error:
            self._host.failed(self, error)
            return
        if isinstance(phase, Phase):
            self._note_plan(phase)
            self.exchange.begin(phase)
            if (blamed := self.exchange.deliver_early()) is not None:
                self._host.blame(self, *blamed)

    def _note_plan(self, phase: Phase) -> None:
        if self.work.record is not None:
            self.work.record.plans += (phase.prepared.plan.name,)

    def _tell_phase(self) -> None:
        if self.work.trace is not None:
            self.work.trace("phase", self.work, None)

    def _end_phase(self) -> None:
        self.exchange.end()
        if self._phase is not None:
            if isinstance(self._phase, Executor):
                self._phase.stop()
            self._phase.close()
            self._phase = None

    def _release(self) -> None:
        self.exchange.close()
        if self._program is not None:
            self._program.close()
        self._end_phase()
