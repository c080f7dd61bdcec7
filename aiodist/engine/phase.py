"""Phases: the parts of a collective's program. Each is a plan and the memory that it works on.

There is one type of phase for links, for shared memory, and for both. The steps of the plan say
what they need. `aiodist.engine.executor` runs phases.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
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

    # `Copy` and `Reduce` steps need ``copy(step)`` and ``reduce(step)``. These are not listed here,
    # because not every memory has both.

    def outgoing(self, spans: Spans) -> Sequence[memoryview] | None:
        """Returns the bytes to send. They must not change until the frame has left. None: they are
        not made yet, and the operation is resumed once they are."""
        ...

    def incoming(self, spans: Spans, nbytes: int) -> memoryview:
        """Returns the place for a frame of `nbytes`. Raises ProtocolError if that size is not
        possible."""
        ...

    def arrived(self, spans: Spans) -> None:
        """Notes that the frame for `spans` is complete."""
        ...


class SharedMemory(Protocol):
    """The memory of a plan that uses shared memory. It knows the shared memory from `bind` to
    `unbind`."""

    def bind(self, lane: Lane, area: int) -> None:
        """From now on ``SHARED + r`` is that area of rank r."""
        ...

    def unbind(self) -> None: ...


class Prepared(NamedTuple):
    """A plan, and what is computed from it once.

    `receives`: its receives by peer, in order. `shown` and `taken`: how many units this rank shows
    to others in shared memory, and takes from them. `weight`: how many steps are in memory.
    """

    plan: Plan
    receives: dict[int, Sequence[Recv]]
    shown: int
    taken: int
    weight: int


_weight: Callable[[Prepared], int] = attrgetter("weight")


@cached_by_weight(MOST_PLAN_STEPS, _weight)
def prepared(algorithm: Callable[..., Plan], *args: Any) -> Prepared:
    """Return the plan ``algorithm(*args)``. It is cached, because programs tend to use the same
    shapes again."""
    plan = algorithm(*args)
    steps = plan.steps
    return Prepared(plan, receives_of(steps), *moved(plan), weight=1 + written_down(steps))


class Phase(NamedTuple):
    """A plan to run on a memory.

    `shared`: how many bytes the plan needs of the area of each rank, or None if it uses no shared
    memory. 0: ranks need different numbers of bytes, for which a small area has room. `itemsize`:
    the bytes of a unit of such a plan.

    `direct`: makes the plan to run instead, if all ranks have their arrays in memory that all see.
    It takes the places of the others, and makes the memory show those arrays. Raises ProtocolError
    if the places make no sense.

    `whole`: the plan is the shortest in shared memory. Every rank shows all it has at once, waits
    for all others, and reduces its result (see `aiodist.engine.executor.all_at_once`).

    `lent`: if the phase is kept for further calls, these vectors of its memory get the user's
    arrays, as long as the phase runs.
    """

    prepared: Prepared
    memory: Memory | SharedMemory
    itemsize: int = 0
    shared: int | None = None
    direct: Callable[[dict[int, int]], Prepared] | None = None
    whole: bool = False
    lent: tuple[Vector, ...] = ()
