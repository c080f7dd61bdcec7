"""One collective on one rank: its phases, one after the other, from the call to its end.

A collective is a generator of phases (`aiodist.collectives`). The operation runs one phase after
the other: a plan by an executor, a pause until it is over. `exchange` keeps what comes from peers.
The call, the links and the lane call the operation synchronously. Nothing in here waits.
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
    """A phase that is under way. `waiting_for` is the peer that it needs to go on, if it needs
    one."""

    @property
    def waiting_for(self) -> int | None: ...

    def run(self) -> bool:
        """Run. True: the phase is done. False: it waits, and `Operation.resume` is called later."""
        ...

    def close(self) -> None:
        """Release shared memory, because the phase is done or will never go on."""
        ...


class Pause(ABC):
    """A phase that waits for something on this rank instead of a peer.

    `run` says whether it is over. If not, it makes sure that `resume` is called when it may be.

    `alone`: the loss of a peer does not end the pause. The phases after it, if there are any, fail
    if they have to wait for that peer. So a peer that has its result may leave meanwhile.
    """

    resume: Callable[[], None]
    waiting_for: int | None = None
    alone = False

    def needs(self, peer: int) -> bool:
        """Return whether the loss of `peer` ends the pause."""
        return not self.alone

    def belong(self, operation: Operation) -> None:
        """Begin as a phase of `operation`."""
        self.resume = operation.advance

    @abstractmethod
    def run(self) -> bool:
        """Return whether the phase is over."""

    @abstractmethod
    def close(self) -> None:
        """Release what the phase holds: it is over, or its operation is."""


class NoResult(NamedTuple):
    """What a program returns if it has run to its end and has no result.

    The others are not told, because they have everything from this rank, and end by themselves.
    """

    error: Exception


Program = Generator[Phase | Running, None, Any]
Start = Callable[[bool], Program]
"""Makes a program. Its argument says whether the program runs on a lane, because only there it may
have phases in shared memory."""


def refused(on_lane: bool) -> Program:
    """Stand in for the program of a collective whose arguments were refused. It never starts."""
    raise AssertionError("a call that was refused has started")


class Operation:
    """A collective that has been called, until it ends."""

    __slots__ = (
        "_draining", "_host", "_phase", "_program", "_running", "_start", "call", "done",
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
        self.call = call  # what was called, in words: all ranks must agree
        self.place = place  # that of its array in memory that all ranks see
        # Which other ranks have arrays on devices, as far as is known. None: this rank's array is
        # on the host, so it need not know (`aiodist.engine.roll_call`).
        self.roll: dict[int, bool] | None = {} if place == ON_DEVICE else None
        self.lane: Lane | None = None  # None: it runs over links alone
        self.done = False  # it has ended, and never runs again
        self.timer: Any = None  # of its deadline
        self.heard: set[int] = set()  # peers that have entered it, as far as is known
        self.knocked: set[int] = set()  # peers that were asked to say when they enter it
        # By peer, the bytes that were sent before the peer was heard or had granted them.
        self.unsolicited: dict[int, int] = {}
        self.seen: dict[int, str] = {}  # what peers do that have not entered it, in words
        self.exchange: Exchange[Operation] = Exchange(host, self, size)
        self._host = host
        self._start = start
        self._program: Program | None = None  # yields its phases
        self._phase: Executor | Running | None = None
        self._running = False  # its phase runs right now, and must not be entered again
        self._draining = False  # the phase is over, but frames have not left

    # -- entered by the context ---------------------------------------------------------------

    def start(self) -> None:
        """Make the program. `advance` runs it."""
        self._program = self._start(self.lane is not None)
        if self._phase is not None and self.work.trace is not None:
            try:
                self.work.trace("phase", self.work, None)
            except Exception as error:
                self._host.failed(self, error)

    def carry_on(self, executor: Executor) -> None:
        """Take over a first phase that is already under way, before `start`. The program has the
        phases after it."""
        self._phase = executor
        self._begin_plan(executor.phase)
        # Within a call, a phase that uses shared memory has no other way.
        if executor.links is not None or executor.phase.shared is None:
            self.exchange.catch_up(executor.done)
            for peer, nbytes in executor.sent():
                if peer not in self.heard:
                    self._host.goes_unasked(self, peer, nbytes)
        executor.hand_over(self.exchange)

    def called_with(self, src: int, *, on_device: bool) -> None:
        """Note whether the array of `src` is on a device. Only its first word counts, see
        `roll_call`."""
        assert self.roll is not None
        if src not in self.roll:
            self.roll[src] = on_device
            if self._program is not None:
                self.advance()

    def resume(self) -> None:
        """Go on, because it is this operation's turn on its lane."""
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
        """The peer that the next step needs, if it needs one."""
        return None if self._phase is None else self._phase.waiting_for

    def granted(self, src: int, upto: int) -> Landing | None:
        """Note that `src` takes our frames below slot `upto`."""
        is_news = self.exchange.granted(src, upto)
        self._hear(src)
        return self if is_news and self.waiting_for == src else None

    def admitted(self, src: int) -> Landing | None:
        """Note that `src` has entered, and takes frames that were held back."""
        self._hear(src)
        return self if self.waiting_for == src else None

    def _hear(self, src: int) -> None:
        self.heard.add(src)
        if self.unsolicited and not self.exchange.awaits_grant(src):
            self._host.refund(self, src)

    def lacks(self, src: int, slot: int) -> bool:
        """Return whether a frame of `src` before this slot is missing."""
        return slot > self.exchange.arrived(src)

    def message(self, src: int, slot: int, nbytes: int) -> Landing:
        """Return the landing for a frame of `src` that begins. Raises ProtocolError."""
        self._hear(src)
        return self.exchange.message(src, slot, nbytes)

    def sent(self, peer: int) -> None:
        """Note that a frame has left for `peer` (the `done` of its send)."""
        self.exchange.left(peer)
        if self._draining and not self.done and self.exchange.is_drained:
            self._draining = False
            self._end_phase()
            self.advance()

    def needs(self, peer: int) -> bool:
        """Return whether the rest of the current phase exchanges anything with `peer`."""
        phase = self._phase
        if isinstance(phase, Executor):
            # A frame that has not left will never leave.
            return self.exchange.has_unsent(peer) or phase.needs(peer)
        return not isinstance(phase, Pause) or phase.needs(peer)

    def close(self) -> None:
        """Stop for ever, and release all memory."""
        self.done = True
        self.exchange.close()
        if isinstance(self._phase, Executor):
            self._phase.stop()
        # If a step called this, the step still uses the memory. Then `advance` releases it at its
        # end.
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
                if self._phase is not None:
                    if not self._phase.run() or self.done:
                        return
                    # Links still read the memory of this phase for frames that have not left. The
                    # next phase may write there, and the user may do so after the end.
                    if not self.exchange.is_drained:
                        self._draining = True
                        return
                    self._end_phase()
                self._next_phase()
        except DifferentCallsError as error:
            self._host.differ(self, error.calls)
        except Exception as error:
            # If a rank gave the operation up, it has told the others. Its memory may have held
            # anything, so an error made of that means nothing.
            lane = self.lane
            if lane is None or lane.turns.current is not self or not lane.is_void():
                self._host.failed(self, error)
        finally:
            self._running = False
            if self.done:
                self._release()

    # An operation is also the landing of a frame without payload. So it goes on after the callers
    # that passed the header on are done, and not below them on the stack.
    memory = None
    landed = advance

    def _next_phase(self) -> None:
        assert self._program is not None
        try:
            if self.work.trace is not None:
                self.work.trace("phase", self.work, None)
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
            self._begin_plan(phase)
            if (blamed := self.exchange.deliver_early()) is not None:
                self._host.blame(self, *blamed)

    def _begin_plan(self, phase: Phase) -> None:
        if self.work.record is not None:
            self.work.record.plans += (phase.prepared.plan.name,)
        self.exchange.begin(phase)

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
