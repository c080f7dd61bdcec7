"""The executor: it carries out the steps of a phase, wherever its ranks are.

This is the only place that walks over plan steps. What differs is who is asked: `Links` for frames
to and from peers, and the lane for shared memory. A phase of ranks that share a host asks the lane
alone, one of ranks that do not asks links alone, and one of several hosts asks both.

Nothing in here waits. Where a step cannot be done yet, `Executor.run` says so and is called again,
when what it needs may be there: by whoever brings a frame, or by the lane.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple, Protocol

import numpy as np

from aiodist.engine.phase import Phase, Spans
from aiodist.schedules.plan import Await, Copy, Grant, Publish, Recv, Reduce, Send, Step
from aiodist.schedules.script import Pages, ahead
from aiodist.shared_memory.board import A_PHASE, AREAS, SMALL
from aiodist.shared_memory.lane import Lane
from aiodist.shared_memory.posts import CHEAP_COPY


class Links(Protocol):
    """The frames of one operation, by peer. Of what returns a bool, False means: wait, and ask
    again."""

    def may_send(self, peer: int) -> bool:
        """Whether `peer` takes the next frame of a plan in which frames are granted."""
        ...

    def send(self, peer: int, views: Sequence[memoryview]) -> bool:
        """Sends the next frame to `peer`. Raises if `peer` is lost."""
        ...

    def take(self, peer: int, spans: Spans) -> bool:
        """Takes the next frame of `peer`, which goes to `spans`, if it is there."""
        ...

    def grant(self, peer: int, count: int) -> None:
        """Lets `peer` send so many frames more."""
        ...

    def check(self, peer: int) -> None:
        """Raises if `peer` is lost, so that there is nothing to wait for."""
        ...

    def waiting(self, peer: int) -> int:
        """Returns how many frames of `peer` are there to take."""
        ...


def area_for(nbytes: int, seq: int, phase: int, by_turns: int = SMALL) -> int:
    """Which area a phase uses: the small ones by turns, where it puts up to `by_turns` bytes in."""
    if nbytes <= by_turns:
        return (seq + phase) & 1
    if nbytes <= AREAS[2][1]:
        return 2
    raise ValueError(f"a phase needs {nbytes} bytes of shared memory, areas have {AREAS[2][1]}")


def area_of(phase: Phase, lane: Lane, seq: int, number: int) -> int:
    """The area of `lane` that `phase`, phase `number` of the operation `seq`, uses."""
    assert phase.shared is not None
    publishes = phase.prepared.plan.publishes
    if publishes >= A_PHASE:
        raise ValueError(
            f"{publishes} pieces, at most {A_PHASE - 1} go in one collective: "
            "move fewer bytes at a time"
        )
    return area_for(phase.shared, seq, number, lane.by_turns)


def begin_area(phase: Phase, lane: Lane | None, seq: int) -> int | None:
    """`phase` of the operation `seq` begins: the area that it uses, if it uses shared memory."""
    if phase.shared is None:
        return None
    assert lane is not None
    return area_of(phase, lane, seq, lane.next_phase())


ALL = -1
"""All steps are done, and the phase is over."""


class Executor:
    """A phase that is under way. `waiting_for` is the peer whose frame, or whose grant, the next
    step needs; None where it is something else, or nothing."""

    __slots__ = (
        "_area", "_bound", "_chosen", "_lane", "_memory", "_pages", "_pc", "_stopped", "_wait_for",
        "links", "phase", "waiting_for",
    )  # fmt: skip

    def __init__(
        self,
        phase: Phase,
        links: Links | None,
        lane: Lane | None = None,
        area: int | None = None,
        place: int = 0,
        done: int = 0,
        *,
        within: bool = False,
    ) -> None:
        """`area` is what `begin_area` gave, and `place` is where this rank's array lies in memory
        that all see, if it does. So many of the first steps are `done` already. `within`: it runs
        within a call; without `links` it does so, too."""
        self.links = links  # None: within a call, of shared memory alone
        # Within a call there is no time to wait for long.
        within = within or links is None
        self._wait_for: Any = lane and (lane.watch if within else lane.wait_for)
        self._lane: Any = lane  # there is one wherever it is asked
        self._area = area
        self._bound = False  # the own area is there to be written, and the memory knows of it
        # If this rank's array is not in shared memory, all ranks stage theirs: there is no need to
        # wait until the others say where theirs are.
        self._chosen = phase.direct is None or place <= 0
        self._pc = done  # the number of the step that is next
        self._pages: Pages[Step] | None = None  # of a long plan
        self._stopped = False  # nothing more is to be done, see `stop`
        self.waiting_for: int | None = None
        self.phase = phase
        self._memory: Any = phase.memory  # what the spans of the plan mean

    def run(self) -> bool:
        """Carry out steps until one has to wait. True: all are done.

        Raises DifferentCallsError, ProtocolError, PeerLostError, and what the memory raises.
        """
        self.waiting_for = None
        area = self._area
        if area is not None and not self._bound and not (self._choose() and self._bind(area)):
            return self._rest(self._lane.others)
        plan = self.phase.prepared.plan
        steps: Any = plan.steps
        eager = plan.eager
        if type(steps) is not tuple:
            steps = self._pages = self._pages or Pages(steps)
        memory, lane = self._memory, self._lane
        links: Any = self.links
        wait_for = self._wait_for
        for pc in range(self._pc, len(steps)):
            step: Any = steps[pc]
            kind = type(step)  # looked at rather than isinstance(): large arrays take many steps
            if kind is Copy:
                memory.copy(step)
            elif kind is Reduce:
                memory.reduce(step)
            elif kind is Recv:
                if not links.take(step.peer, step.spans):
                    return self._wait(pc, step.peer)
            elif kind is Await:
                if not wait_for(step.peers, step.count):
                    self._pc = pc
                    return self._rest(
                        [peer for peer in step.peers if not lane.has_published(peer, step.count)]
                    )
            else:
                if kind is Publish:
                    lane.publish()
                elif kind is Grant:
                    links.grant(step.peer, step.count)
                elif not (eager or links.may_send(step.peer)):
                    return self._wait(pc, step.peer)
                elif area is not None and lane.is_void():
                    # Someone gave the operation up whose memory was read: nothing made of it may
                    # leave this host, where nobody could tell.
                    self._pc = pc
                    return False
                elif (views := memory.outgoing(step.spans)) is None:
                    self._pc = pc
                    return False
                elif not links.send(step.peer, views):
                    return self._wait(pc, step.peer)
                if self._stopped:  # by what came of it: the operation has ended
                    return False
        self._pc = len(steps)
        if area is not None:
            if not lane.end(area):
                return False
            _, _, shown, taken = self.phase.prepared
            itemsize = self.phase.itemsize
            lane.moved.add(shown * itemsize, taken * itemsize)
        return True

    def _choose(self) -> bool:
        """Do what all ranks will do. False: wait."""
        if self._chosen:
            return True
        lane = self._lane
        if not self._wait_for(lane.others, 0):
            return False
        # All have entered, so the places of all are on the board, and whoever looks finds the same:
        # all ranks choose the same plan, without another word.
        places = lane.places()
        if places is not None and self.phase.direct is not None:
            self.phase = self.phase._replace(prepared=self.phase.direct(places))
        self._chosen = True
        return True

    def _bind(self, area: int) -> bool:
        """Have the own area for this phase. False: wait."""
        if not self._lane.begin(area):
            return False
        self._memory.bind(self._lane, area)
        self._bound = True
        return True

    def _wait(self, pc: int, peer: int) -> bool:
        self._pc = pc
        self.waiting_for = peer
        return self._rest((peer,))

    def _rest(self, peers: Sequence[int]) -> bool:
        """Wait for `peers`; raise if one of them is lost."""
        # Who is lost is looked at only where there is something to wait for. What a lost peer had
        # sent before is as good as ever, and steps that need no more of it are carried out.
        if self.links is not None:
            for peer in peers:
                self.links.check(peer)
        return False

    def hand_over(self, links: Links) -> None:
        """Go on as a phase of an operation, whose frames are `links`."""
        self.links = links
        self._wait_for = self._lane and self._lane.wait_for
        self.waiting_for = None

    @property
    def done(self) -> Iterator[Step]:
        """The steps that are done."""
        return islice(self.phase.prepared.plan.steps, self._pc)

    def sent(self) -> Iterator[tuple[int, int]]:
        """The frames that have been sent: to whom, and how many bytes."""
        for step in self.done:
            if isinstance(step, Send):
                yield step.peer, sum([view.nbytes for view in self._memory.outgoing(step.spans)])

    def needs(self, peer: int) -> bool:
        """Whether the steps that are left exchange anything with `peer`."""
        lane, plan = self._lane, self.phase.prepared.plan
        if self._area is not None and len(lane.others) + 1 == plan.size:
            return True  # all share one host, and each step is for all of them
        receives = 0
        for step, times in ahead(plan.steps, self._pc):
            if isinstance(step, Send) and step.peer == peer:
                return True
            if isinstance(step, Recv) and step.peer == peer:
                receives += times
            if (
                isinstance(step, Await)
                and peer in step.peers
                and not lane.has_published(peer, step.count)
            ):
                return True
        assert self.links is not None
        # Frames that are here already need nothing of the peer any more.
        return receives > self.links.waiting(peer)

    def stop(self) -> None:
        """Do no further step, even if this is called from within one."""
        self._stopped = True

    def close(self) -> None:
        """Let go of shared memory, and of what was lent: the phase is over, or never goes on."""
        if self._bound:
            self._bound = False
            self._memory.unbind()
        for vector in self.phase.lent:
            vector.lend(None)


def all_at_once(phase: Phase, lane: Lane, area: int) -> Callable[[Any], int]:
    """What carries out a `whole` phase within a call, on one flat array that is input and result,
    or on two: its plan is Copy, Publish, Await and Reduce. It returns how many steps are done, or
    `ALL` if the phase is over.

    It does and leaves in memory what `Executor.run` does, and is here for its speed alone: small
    arrays take no longer than the look at four steps, and at the spans that they name. What it
    leaves undone an executor does, which begins with the step that is next.
    """
    memory: Any = phase.memory
    *_, reduction = phase.prepared.plan.steps
    assert isinstance(reduction, Reduce)
    _, start, stop = reduction.operands[0]
    own, reduce = memory.everyone(lane, area, start, stop)
    _, _, shown, taken = phase.prepared
    shown, taken = shown * phase.itemsize, taken * phase.itemsize
    moved = lane.moved
    # A few bytes are copied by way of an object of Python's in less time than by numpy, which looks
    # at shapes and strides; but only where no byte is another one there.
    few = own.dtype if own.nbytes <= CHEAP_COPY else None
    own_bytes = own.view(np.uint8).data

    def run(x: Any, out: Any = None) -> int:
        if x.dtype is few:
            own_bytes[:] = x.tobytes()
        else:
            own[:] = x
        lane.publish()
        if not lane.watch(lane.others, 1):
            return 2
        reduce(out=x if out is None else out)
        if not lane.end(area):
            return 4
        moved.sent += shown
        moved.received += taken
        return ALL

    return run if len(phase.lent) == 1 else (lambda both: run(*both))


def in_steps(phase: Phase, lane: Lane, area: int) -> Callable[[Any], int]:
    """What `all_at_once` is for `whole` phases, for plans of a few steps on staging memory: of one
    flat array that is input and result, or of two.

    It does what `Executor.run` does, in the same order, and is here for its speed alone: between
    two copies that fill the caches, all that Python has to look at is far away again, so the views
    of shared memory that the steps need are cut once.
    """
    return _in_steps(phase, lane, area)[0]


_Steps = list[tuple[int, Any, int]]
"""The number of a step, what it moves, and how often others have published that it waits for."""


class Parts(NamedTuple):
    """What `in_steps` does, in two parts: what a rank shows before it knows where the others are,
    and the rest, which begins when that is published."""

    show: Callable[[Any], None]
    run: Callable[[Any, _Steps], int]
    rest: _Steps
    shown: _Steps
    """The rest, where all others are known to have shown theirs, too."""


def in_parts(phase: Phase, lane: Lane, area: int) -> Parts:
    """What `in_steps` is, where what is published first may be shown early."""
    run, program, views_of = _in_steps(phase, lane, area)
    publish = next(pc for pc, move, count in program if move is None and not count)
    moves, rest = [move for _, move, _ in program[:publish]], program[publish + 1 :]

    def show(x: Any) -> None:
        views = views_of(x)
        for move in moves:
            move(views)

    return Parts(show, run, rest, [step for step in rest if step[2] != 1])


def _in_steps(
    phase: Phase, lane: Lane, area: int
) -> tuple[Callable[..., int], _Steps, Callable[[Any], Any]]:
    memory: Any = phase.memory
    steps = phase.prepared.plan.steps
    views_of, moves = memory.in_views(steps, lane, area)
    counts = [step.count if isinstance(step, Await) else 0 for step in steps]
    every = list(zip(range(len(steps)), moves, counts, strict=True))
    _, _, shown, taken = phase.prepared
    shown, taken = shown * phase.itemsize, taken * phase.itemsize
    moved = lane.moved

    def run(x: Any, program: _Steps = every) -> int:
        views = views_of(x)
        others, publish, watch = lane.others, lane.publish, lane.watch
        for pc, move, count in program:
            if move is not None:
                move(views)
            elif not count:
                publish()
            elif not watch(others, count):
                return pc
        if not lane.end(area):
            return len(every)
        moved.sent += shown
        moved.received += taken
        return ALL

    return run, every, views_of
