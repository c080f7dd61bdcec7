"""What programs of collectives are made of: phases, each a plan and the memory that it is about.

There is one type of phase, for links, for shared memory, and for both: the plan says by its steps
what it needs. `aiodist.engine.executor` carries phases out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from aiodist.buffers.vector import Vector
from aiodist.engine.plan_cache import MOST_PLAN_STEPS, cached_by_weight
from aiodist.schedules.plan import Plan, Recv, Span
from aiodist.schedules.pull import moved
from aiodist.schedules.script import receives_of, written_down
from aiodist.shared_memory.lane import Lane

Spans = tuple[Span, ...]


class Memory(Protocol):
    """What the spans of a plan mean. A memory has the methods that the steps of its plans need."""

    # `Copy` and `Reduce` steps have ``copy(step)`` and ``reduce(step)``. Not all memories can do
    # both, so these are looked up when a step wants them.

    def outgoing(self, spans: Spans) -> Sequence[memoryview] | None:
        """The bytes to send. They must not change until the frame has left. None: they are not made
        yet, and the operation is resumed when they are."""
        ...

    def incoming(self, spans: Spans, nbytes: int) -> memoryview:
        """Where a frame of `nbytes` goes. Raises ProtocolError where that is no possible size."""
        ...

    def arrived(self, spans: Spans) -> None:
        """The frame for `spans` is complete."""
        ...


class SharedMemory(Protocol):
    """The memory of a plan that uses shared memory: until `unbind` it knows where that is."""

    def bind(self, lane: Lane, area: int) -> None:
        """``SHARED + r`` is from now on that area of rank r."""
        ...

    def unbind(self) -> None:
        """Let go of shared memory."""
        ...


class Prepared(NamedTuple):
    """A plan, with what is worked out of it once.

    `receives` are its receives by peer, in their order. `shown` and `taken` are the
    units that this rank shows to others in shared memory, and takes from them.
    """

    plan: Plan
    receives: dict[int, Sequence[Recv]]
    shown: int
    taken: int

    def weight(self) -> int:
        return 1 + written_down(self.plan.steps)


@cached_by_weight(MOST_PLAN_STEPS, Prepared.weight)
def prepared(algorithm: Callable[..., Plan], *args: Any) -> Prepared:
    """The plan ``algorithm(*args)``, kept: the same shapes tend to come again and again."""
    plan = algorithm(*args)
    return Prepared(plan, receives_of(plan.steps), *moved(plan))


class Phase(NamedTuple):
    """A plan to carry out on a memory.

    A plan that uses shared memory needs `shared` bytes of the area of each rank, and its units have
    `itemsize` bytes. Where `shared` is None, it uses none.

    `direct` gives the plan to carry out instead where all ranks have said where their arrays lie in
    memory that all see, and has the memory show these arrays. It is given the places of the others,
    and raises ProtocolError for such as make no sense.

    `whole` says that the plan is the shortest in shared memory: everyone shows all it has at once,
    waits for all, and reduces what it is to have (see `aiodist.engine.executor.all_at_once`).

    A phase that is kept for further calls has `lent` vectors in its memory. Each call lends them
    the user's arrays, for as long as the phase runs.
    """

    prepared: Prepared
    memory: Memory | SharedMemory
    itemsize: int = 0
    shared: int | None = None
    direct: Callable[[dict[int, int]], Prepared] | None = None
    whole: bool = False
    lent: tuple[Vector, ...] = ()
