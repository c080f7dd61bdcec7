"""The executor: it runs the steps of a phase, over links, in shared memory, or both.

No other code walks over the steps of a plan. A phase of ranks that share a host needs only the
lane. A phase of ranks on different hosts needs only `Links`. A phase over several hosts with
several ranks needs both.

Nothing in here waits. If a step cannot be done yet, `Executor.run` returns False. The lane calls it
again, or the link that brings a frame, when the step may be possible.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple, Protocol

import numpy as np

from aiodist.engine.phase import Phase, Spans
from aiodist.errors import PeerLostError
from aiodist.schedules.plan import Await, Copy, Grant, Publish, Recv, Reduce, Send, Step
from aiodist.schedules.script import Pages, ahead
from aiodist.shared_memory.board import A_PHASE, AREAS, LEAST_IN_ROUND, SMALL, in_round
from aiodist.shared_memory.lane import Lane
from aiodist.shared_memory.posts import CHEAP_COPY


class Links(Protocol):
    """The frames of one operation, by peer. If a method returns False, wait and ask again."""

    def may_send(self, peer: int) -> bool:
        """Returns whether `peer` takes the next frame of a plan with grants."""
        ...

    def send(self, peer: int, views: Sequence[memoryview]) -> bool:
        """Sends the next frame to `peer`. Raises PeerLostError if `peer` is lost."""
        ...

    def take(self, peer: int, spans: Spans) -> bool:
        """Takes the next frame of `peer`, which goes to `spans`, if it has arrived."""
        ...

    def grant(self, peer: int, count: int) -> None:
        """Lets `peer` send `count` more frames."""
        ...

    def why_lost(self, peer: int, /) -> PeerLostError | None:
        """Returns the error if `peer` is lost, because then no frame will come."""
        ...

    def waiting(self, peer: int) -> int:
        """Returns how many frames of `peer` can be taken."""
        ...


def area_for(nbytes: int, seq: int, phase: int, by_turns: int = SMALL) -> int:
    """Return the area for a phase that shows `nbytes`.

    Phases of up to `by_turns` bytes use the two small areas by turns. Raises ValueError if no area
    is large enough.
    """
    if nbytes <= by_turns:
        return (seq + phase) & 1
    if nbytes <= AREAS[2][1]:
        return 2
    raise ValueError(f"a phase needs {nbytes} bytes of shared memory, an area has {AREAS[2][1]}")


def area_of(phase: Phase, lane: Lane, seq: int, number: int) -> int:
    """Return the area of `lane` for `phase`, which is phase `number` of the operation `seq`.

    Raises ValueError if the phase needs more memory or more stamps than there are.
    """
    assert phase.shared is not None
    publishes = phase.prepared.plan.publishes
    if publishes >= A_PHASE:
        raise ValueError(
            f"the data has {publishes} pieces, but a collective may have {A_PHASE - 1} at most: "
            "move fewer bytes at a time"
        )
    if phase.shared >= LEAST_IN_ROUND and goes_round(phase, lane):
        return in_round(phase.shared, seq + number)
    return area_for(phase.shared, seq, number, lane.by_turns)


def goes_round(phase: Phase, lane: Lane) -> bool:
    """Whether `phase`, which needs `LEAST_IN_ROUND` or more, begins in another place of its area
    each time: see `board.in_round`."""
    assert phase.shared is not None
    return lane.goes_round and phase.shared <= lane.by_turns


def by_turn(
    make: Callable[[Phase, Lane, int], Callable[[Any], int]], phase: Phase, lane: Lane
) -> Callable[[Any], int]:
    """Return what `make` returns for the first phase of the operation that has entered, wherever it
    begins."""
    made: dict[int, Callable[[Any], int]] = {}

    def run(x: Any) -> int:
        at = area_of(phase, lane, lane.seq, 0)
        if at not in made:
            made[at] = make(phase, lane, at)
        return made[at](x)

    return run


def begin_area(phase: Phase, lane: Lane | None, seq: int) -> int | None:
    """Begin `phase` of the operation `seq`. Return its area, or None if it uses no shared
    memory."""
    if phase.shared is None:
        return None
    assert lane is not None
    return area_of(phase, lane, seq, lane.next_phase())


ALL = -1
"""All steps are done, and the phase is over."""


class Executor:
    """A phase that is under way.

    `waiting_for` is the peer whose frame or grant the next step needs. None: it needs something
    else, or nothing.
    """

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
        """Make the executor of `phase`.

        `area`: the result of `begin_area`. `place`: that of this rank's array in memory that all
        ranks see, if it is there. `done`: how many of the first steps are done already. `within`:
        the phase runs within a call, as it always does without `links`.
        """
        self.links = links  # None: within a call, in shared memory alone
        # A call has no time to wait for long.
        within = within or links is None
        self._wait_for: Any = lane and (lane.watch if within else lane.wait_for)
        self._lane: Any = lane  # there is one wherever a step needs it
        self._area = area
        self._bound = False  # this rank's area may be written, and the memory knows it
        # If this rank's array is not in shared memory, all ranks stage their arrays. Then this rank
        # need not wait to hear where the others are.
        self._chosen = phase.direct is None or place <= 0
        self._pc = done  # the index of the next step
        self._pages: Pages[Step] | None = None  # of a long plan
        self._stopped = False  # see `stop`
        self.waiting_for: int | None = None
        self.phase = phase
        self._memory: Any = phase.memory  # what the spans of the plan mean

    def run(self) -> bool:
        """Run steps until one has to wait. True: all steps are done.

        Raises DifferentCallsError, ProtocolError, PeerLostError, and what the memory raises.
        """
        self.waiting_for = None
        area = self._area
        if area is not None and not self._bound and not self._begin(area):
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
            kind = type(step)  # faster than isinstance(): large arrays take many steps
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
                    return self._rest(step.peers, step.count)
            else:
                if kind is Publish:
                    lane.publish()
                elif kind is Grant:
                    links.grant(step.peer, step.count)
                elif not (eager or links.may_send(step.peer)):
                    return self._wait(pc, step.peer)
                elif area is not None and lane.is_void():
                    # A rank whose memory was read here gave the operation up, so that memory may
                    # hold anything. What was made of it must not leave this host, because other
                    # hosts cannot tell.
                    self._pc = pc
                    return False
                elif (views := memory.outgoing(step.spans)) is None:
                    self._pc = pc
                    return False
                elif not links.send(step.peer, views):
                    return self._wait(pc, step.peer)
                if self._stopped:  # sending has ended the operation
                    return False
        self._pc = len(steps)
        if area is not None:
            if not lane.end(area):
                return False
            _, _, shown, taken, _ = self.phase.prepared
            itemsize = self.phase.itemsize
            lane.moved.add(shown * itemsize, taken * itemsize)
        return True

    def _begin(self, area: int) -> bool:
        """Choose the plan that all ranks will choose, and claim this rank's area for it. False:
        wait."""
        lane = self._lane
        if not self._chosen:
            if not self._wait_for(lane.others, 0):
                return False
            # All ranks have entered, so the board has the places of all. Every rank finds the same
            # there, and chooses the same plan without a message.
            places = lane.places()
            if places is not None and self.phase.direct is not None:
                self.phase = self.phase._replace(prepared=self.phase.direct(places))
            self._chosen = True
        if not lane.begin(area):
            return False
        self._memory.bind(lane, area)
        self._bound = True
        return True

    def _wait(self, pc: int, peer: int) -> bool:
        self._pc = pc
        self.waiting_for = peer
        return self._rest((peer,))

    def _rest(self, peers: Sequence[int], count: int = 0) -> bool:
        """Return False, to wait for `peers`, of which some may have published `count` times.

        Raises PeerLostError if another one of them is lost.
        """
        # A loss matters only if this phase has to wait. What a lost peer sent before is still good,
        # and steps that need nothing more of it are done.
        if self.links is not None:
            for peer in peers:
                lost = self.links.why_lost(peer)
                if lost is not None and not (count and self._lane.has_published(peer, count)):
                    raise lost
        return False

    def hand_over(self, links: Links) -> None:
        """Go on as a phase of an operation, whose frames are `links`."""
        self.links = links
        self._wait_for = self._lane and self._lane.wait_for
        self.waiting_for = None

    @property
    def done(self) -> Iterator[Step]:
        return islice(self.phase.prepared.plan.steps, self._pc)

    def sent(self) -> Iterator[tuple[int, int]]:
        """Yield the peer and the bytes of each frame that was sent."""
        for step in self.done:
            if isinstance(step, Send):
                yield step.peer, sum([view.nbytes for view in self._memory.outgoing(step.spans)])

    def needs(self, peer: int) -> bool:
        """Return whether the remaining steps exchange anything with `peer`."""
        lane, plan = self._lane, self.phase.prepared.plan
        if self._area is not None and len(lane.others) + 1 == plan.size:
            return True  # all ranks share one host, so each step needs all of them
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
        # Frames that have arrived need nothing more from the peer.
        return receives > self.links.waiting(peer)

    def stop(self) -> None:
        """Do no further step. A step may call this."""
        self._stopped = True

    def close(self) -> None:
        """Release shared memory and lent arrays, because the phase is over or will never go on."""
        if self._bound:
            self._bound = False
            self._memory.unbind()
        for vector in self.phase.lent:
            vector.lend(None)


def all_at_once(phase: Phase, lane: Lane, area: int) -> Callable[[Any], int]:
    """Return a function that runs a `whole` phase within a call.

    The phase must have the plan Copy, Publish, Await, Reduce. The function takes one flat array
    that is input and result, or both. It returns how many steps are done, or `ALL`. An executor can
    go on with the next step.

    The function leaves the same in memory as `Executor.run`. It exists because small arrays take no
    longer than the executor takes to look at four steps and their spans.
    """
    memory: Any = phase.memory
    *_, reduction = phase.prepared.plan.steps
    assert isinstance(reduction, Reduce)
    _, start, stop = reduction.operands[0]
    own, reduce = memory.everyone(lane, area, start, stop)
    _, _, shown, taken, _ = phase.prepared
    shown, taken = shown * phase.itemsize, taken * phase.itemsize
    moved = lane.moved
    # A few bytes are copied faster by a Python object than by numpy, because numpy looks at shapes
    # and strides. This needs a dtype that does not change on the way.
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
    """Return a function like that of `all_at_once`, for plans of a few steps on staging memory.

    It does the same as `Executor.run`, in the same order. It is faster, because it cuts the views
    of shared memory once. Between two copies that fill the caches, every object that Python looks
    at has to be loaded again.
    """
    return _in_steps(phase, lane, area)[0]


_Steps = list[tuple[int, Any, int]]
"""The index of a step, what moves its data, and how often others must have published before it."""


class StepParts(NamedTuple):
    """What `in_steps` does, in two parts.

    `show` is what a rank shows before it knows how far the others are. `rest` are the steps after
    it.
    """

    show: Callable[[Any], None]
    run: Callable[[Any, _Steps], int]
    rest: _Steps
    shown: _Steps
    """The rest, if all others are known to have shown their data, too."""


def in_parts(phase: Phase, lane: Lane, area: int) -> StepParts:
    """Return what `in_steps` does in two parts, so that the first data can be shown early."""
    run, program, views_of = _in_steps(phase, lane, area)
    publish = next(pc for pc, move, count in program if move is None and not count)
    moves, rest = [move for _, move, _ in program[:publish]], program[publish + 1 :]

    def show(x: Any) -> None:
        views = views_of(x)
        for move in moves:
            move(views)

    return StepParts(show, run, rest, [step for step in rest if step[2] != 1])


def _in_steps(
    phase: Phase, lane: Lane, area: int
) -> tuple[Callable[..., int], _Steps, Callable[[Any], Any]]:
    memory: Any = phase.memory
    steps = phase.prepared.plan.steps
    views_of, moves = memory.in_views(steps, lane, area)
    counts = [step.count if isinstance(step, Await) else 0 for step in steps]
    every = list(zip(range(len(steps)), moves, counts, strict=True))
    _, _, shown, taken, _ = phase.prepared
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
