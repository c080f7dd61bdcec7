"""Runs the plans of many ranks, and counts what they do.

`aiodist.testing.plan_simulator` proves plans: it knows of each unit what went into it, and of each
pair of accesses whether they can meet, which takes seconds for 64 ranks. What it has proved for
every number of ranks to 17 is only counted and checked here, so that 1,024 ranks take seconds:

* Units are numbers, and a whole span is one operation of numpy. A unit of X is a random number, and
  a reduction adds them, so that a result that lacks an operand, or has one twice, is another number
  (but for one case in 2^32). The order of operands does not show.
* Frames are copied when they are sent, in one order of events. Races do not show, deadlocks do.

What comes out are the results, and for each rank the counts that `costs.Tally` predicts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from aiodist.schedules.plan import OUT, Copy, Grant, Plan, Recv, Reduce, Send, Span, Step, X
from aiodist.testing.plan_checks import PlanError, locate

Units = NDArray[np.uint32]


class Survey(NamedTuple):
    """What a survey gives; of the busiest rank, where nothing else is said."""

    x: list[Units]
    """What was in X, by rank."""
    out: list[Units]
    """What is in OUT at the end, by rank."""
    rounds: int
    frames: int
    grants: int
    connections: int
    units: int
    """Units sent."""
    scratch: int


def survey(plan: Callable[[int], Plan], inputs: Sequence[int], outputs: Sequence[int]) -> Survey:
    """Run ``plan(rank)`` of all ranks. `inputs` and `outputs`: units of X and of OUT, by rank.

    The plans have frames and grants, and no shared memory. Raises PlanError for a deadlock, and
    where not all frames were received.
    """
    wires: dict[tuple[int, int], _Wire] = {}
    ranks = [_Rank(plan(rank), length, outputs[rank], wires) for rank, length in enumerate(inputs)]
    ready = [*ranks]
    while ready:
        for peer in ready.pop().run():
            # Whoever does not wait for this goes on when it is its turn.
            if (other := ranks[peer]).waits and other.may_go_on():
                other.waits = False
                ready.append(other)
    stuck = [locate(rank.plan, rank.at) for rank in ranks if rank.at < len(rank.plan.steps)]
    if stuck:
        raise PlanError(f"deadlock of {len(stuck)} ranks: {stuck[0]}")
    for (a, b), wire in wires.items():
        if wire.frames:
            raise PlanError(f"{len(wire.frames)} frames from rank {a} to rank {b} are not received")
        if wire.granted != wire.sent and not ranks[a].plan.eager:
            raise PlanError(f"{wire.sent} frames from rank {a} to rank {b}, {wire.granted} granted")
    return Survey(
        x=[rank.memory[X] for rank in ranks],
        out=[rank.memory[OUT] for rank in ranks],
        rounds=max(rank.depth for rank in ranks),
        frames=max(max(rank.sent, rank.received) for rank in ranks),
        grants=max(rank.grants for rank in ranks),
        connections=max(len(rank.peers) for rank in ranks),
        units=max(rank.units for rank in ranks),
        scratch=max(rank.plan.scratch for rank in ranks),
    )


class _Wire:
    """What one rank has sent to another and that one has not received: the units, and how many
    frames had to come before, with it."""

    __slots__ = ("frames", "granted", "sent")

    def __init__(self) -> None:
        self.frames: deque[tuple[Units, int]] = deque()
        self.granted = 0
        self.sent = 0


class _Rank:
    """One rank: its memory, how far it is, and what it has done."""

    def __init__(
        self, plan: Plan, inputs: int, outputs: int, wires: dict[tuple[int, int], _Wire]
    ) -> None:
        self.plan = plan
        self.at = 0
        self.waits = False
        self.depth = self.sent = self.received = self.grants = self.units = 0
        self.peers: set[int] = set()
        random = np.random.default_rng(plan.rank)
        self.memory: list[Units] = [
            random.integers(0, 1 << 32, inputs, np.uint32),
            np.zeros(outputs, np.uint32),
            np.zeros(plan.scratch, np.uint32),
        ]
        self._wires = wires

    def run(self) -> Iterator[int]:
        """Go on as far as can be. Yields each peer that may have waited for what was done."""
        while self.at < len(self.plan.steps):
            if not self.may_go_on():
                self.waits = True
                return
            step = self.plan.steps[self.at]
            self.at += 1
            self._do(step)
            if isinstance(step, Send | Grant):
                yield step.peer

    def may_go_on(self) -> bool:
        """Whether the next step can be done."""
        step = self.plan.steps[self.at]
        if isinstance(step, Send):
            wire = self._wire(self.plan.rank, step.peer)
            return self.plan.eager or wire.sent < wire.granted
        return not isinstance(step, Recv) or bool(self._wire(step.peer, self.plan.rank).frames)

    def _do(self, step: Step) -> None:
        match step:
            case Send(peer, spans):
                wire = self._wire(self.plan.rank, peer)
                units = np.concatenate([self._at(span) for span in spans] or [self.memory[X][:0]])
                wire.frames.append((units, self.depth + 1))
                wire.sent += 1
                self.sent += 1
                self.units += len(units)
                self.peers.add(peer)
            case Recv(peer, spans):
                units, depth = self._wire(peer, self.plan.rank).frames.popleft()
                start = 0
                for span in spans:
                    self._at(span)[:] = units[start : start + span.length]
                    start += span.length
                if start != len(units):
                    raise PlanError(f"{locate(self.plan, self.at - 1)}: {len(units)} units came")
                self.depth = max(self.depth, depth)
                self.received += 1
                self.peers.add(peer)
            case Grant(peer, count):
                self._wire(peer, self.plan.rank).granted += count
                self.grants += 1
            case Copy(into, source):
                self._at(into)[:] = self._at(source)
            case Reduce(into, operands):
                self._at(into)[:] = sum(self._at(operand) for operand in operands)
            case _:
                raise PlanError(f"{locate(self.plan, self.at - 1)} is of shared memory")

    def _wire(self, source: int, target: int) -> _Wire:
        wire = self._wires.get((source, target))
        if wire is None:
            wire = self._wires[source, target] = _Wire()
        return wire

    def _at(self, span: Span) -> Units:
        return self.memory[span.buffer][span.start : span.stop]
