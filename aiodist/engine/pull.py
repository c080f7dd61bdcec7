"""Phases in shared memory: a pull plan, and the memory that its spans mean, run on a lane."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from aiodist.engine.kept import PLANS, kept
from aiodist.schedules.plan import Await, Copy, Plan, Publish, Reduce
from aiodist.schedules.pull import moved
from aiodist.shared_memory.board import A_PHASE, AREAS
from aiodist.shared_memory.lane import Lane
from aiodist.shared_memory.turns import Rider


class PullMemory(Protocol):
    """What the spans of a pull plan mean. Where it has `Reduce` steps, the memory has
    ``reduce(step)``, too."""

    def bind(self, lane: Lane, area: int) -> None:
        """``SHARED + r`` is from now on that area of rank r."""
        ...

    def unbind(self) -> None:
        """Let go of shared memory."""
        ...

    def copy(self, step: Copy) -> None: ...


class Pulled(NamedTuple):
    """A pull plan, with the units that it shows to others and takes from them."""

    plan: Plan
    shown: int
    taken: int

    def weight(self) -> int:
        return 1 + len(self.plan.steps)


@kept(PLANS, Pulled.weight)
def planned(algorithm: Callable[..., Plan], *args: Any) -> Pulled:
    """The pull plan ``algorithm(*args)``, kept: the same shapes tend to come again and again."""
    plan = algorithm(*args)
    return Pulled(plan, *moved(plan))


class PullPhase(NamedTuple):
    """A pull plan to execute on a memory, of units of `itemsize` bytes, `nbytes` of shared memory
    at each rank.

    `direct`: what to do instead where all ranks have said where their arrays lie, given the others'
    places; it raises ProtocolError for places that make no sense.
    """

    pulled: Pulled
    memory: PullMemory
    itemsize: int
    nbytes: int
    direct: Callable[[dict[int, int]], PullPhase] | None = None


def area_for(nbytes: int, seq: int, phase: int) -> int:
    """Which area a phase uses: the small ones by turns, where all fits in."""
    for index in ((seq + phase) & 1, 2):
        if nbytes <= AREAS[index][1]:
            return index
    raise ValueError(f"a phase needs {nbytes} bytes of shared memory, areas have {AREAS[2][1]}")


class PullRun:
    """A phase that is running on `lane`, as part of the operation `rider`."""

    __slots__ = ("_area", "_bound", "_chosen", "_lane", "_memory", "_pc", "_phase", "_steps")

    def __init__(self, lane: Lane, rider: Rider, phase: PullPhase) -> None:
        publishes = phase.pulled.plan.publishes
        if publishes >= A_PHASE:
            raise ValueError(
                f"{publishes} pieces, at most {A_PHASE - 1} go in one collective: "
                "move fewer bytes at a time"
            )
        self._lane = lane
        self._set(phase)
        # If this rank's array is not in shared memory, all ranks stage theirs: there is no need to
        # wait until the others say where theirs are.
        self._chosen = phase.direct is None or not rider.place
        self._pc = 0
        self._bound = False
        self._area = area_for(phase.nbytes, rider.seq, lane.next_phase())

    def _set(self, phase: PullPhase) -> None:
        self._phase = phase
        self._steps = phase.pulled.plan.steps
        self._memory: Any = phase.memory

    def _choose(self) -> bool:
        """Do what all ranks will do. False: wait."""
        lane = self._lane
        if not lane.wait_for(lane.others, 0):
            return False
        places = lane.places()
        if places is not None and self._phase.direct is not None:
            self._set(self._phase.direct(places))
        self._chosen = True
        return True

    def run(self) -> bool:
        """Execute steps until one has to wait. True: all are done.

        Raises DifferentCallsError, ProtocolError, and what the memory raises.
        """
        if not self._chosen and not self._choose():
            return False
        lane, memory, steps = self._lane, self._memory, self._steps
        if not self._bound:
            if not lane.begin(self._area):
                return False
            memory.bind(lane, self._area)
            self._bound = True
        for pc in range(self._pc, len(steps)):
            step = steps[pc]
            if isinstance(step, Await):
                if not lane.wait_for(step.peers, step.count):
                    self._pc = pc
                    return False
            elif isinstance(step, Copy):
                memory.copy(step)
            elif isinstance(step, Reduce):
                memory.reduce(step)
            else:
                assert isinstance(step, Publish)
                lane.publish()
        self._pc = len(steps)
        if not lane.end(self._area):
            return False
        _, shown, taken = self._phase.pulled
        lane.moved.add(shown * self._phase.itemsize, taken * self._phase.itemsize)
        return True

    def close(self) -> None:
        self._memory.unbind()
