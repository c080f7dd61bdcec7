"""Collectives of shapes that were seen before: done within the call, if the others are there.

Everything about a call that is the same each time (what to compare with the others, the plan, the
views of shared memory) is made once and kept as a `Recipe`. What is left runs in the call: the same
words are written and read as by any operation of the lane. Where it has to wait longer, or finds
anything out of the ordinary, it becomes such an operation and goes on as one.

**Why the first steps may be done already.** When the call turns into an operation, it has entered,
has perhaps written to its area and published, and has perhaps reduced into the user's array. None
of that can be done twice: the array is input and result, and a second publish would be counted. So
the steps that are done stay done, and the operation begins with those that are left::

    in the call:        enters │ give │ publish │ await: not there yet
                               │      │         │   │ what is left, with this await as its first
    as an operation:                                └─> await │ reduce │ end │ finished

That is safe because:

* What the others see is the same. The lane has kept number, phase and publishes while the call
  ran, so the next publish is the next stamp, whoever writes it. The operation finds the lane
  entered, and its phase begun (`Lane.enter` returns at once, and a `Run` begins no phase).
* The instructions that are left are those of the plan that was begun, with the views of memory that
  were used. They are never chosen anew: what could change the choice is looked at before the first
  instruction, or at an instruction of its own (`_CHOOSE`), which is passed once.
* Only a wait can stop the row, and a wait that did not succeed has changed nothing, so to begin
  with it again is right. The end of the row is such a wait, too: `Lane.end` refuses where another
  rank has given up; it is asked again then, and nothing is reduced again.
* No word about this collective can have been missed. Before it enters, nothing may have come of
  collectives that were not called here yet (`is_calm`), a verdict least of all. From there to the
  end, or until `take_over` has listed the operation, no link is read: all of it is one call, and
  polls look at memory alone. What arrives later finds the operation; or, if all was done, a number
  that has been counted, and is dropped.
* The number is taken at one of the two ends, by `_done` or by `take_over`, and is the same, for no
  other call comes in between.
* Whatever goes wrong in the call (a kernel that raises, places that make no sense) goes the same
  way, as an operation that fails first of all: so the others hear of it, the abort word is written,
  and the lane is left by the one way there is.

`link_express` hands over by `carry_on`, for which other things hold: see there.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from aiodist.buffers import arrays, tensors
from aiodist.buffers.kernels import Kernel, quietly
from aiodist.buffers.reductions import Group
from aiodist.buffers.vector import Vector
from aiodist.engine.executor import area_for
from aiodist.engine.operation import Program
from aiodist.engine.phase import Prepared
from aiodist.engine.tags import TagCounts
from aiodist.links.endpoint import Endpoint
from aiodist.phases import pulls
from aiodist.phases.base import Place
from aiodist.recorder import Recorder
from aiodist.schedules.plan import SHARED, Await, Copy, Plan, Publish, Reduce, Span, Step
from aiodist.shared_memory.board import digest_of
from aiodist.shared_memory.heap import Heap
from aiodist.shared_memory.lane import Lane
from aiodist.trace import Scope, Trace
from aiodist.types import ReduceOp
from aiodist.work import Work

Flat = NDArray[Any]

KEPT = 50_000
"""Most steps of all recipes of a group: some 10 MiB. Those of small arrays have three."""

_PUBLISH, _AWAIT, _GIVE, _TAKE, _COMBINE, _REDUCE, _CHOOSE = range(7)
Instruction = tuple[int, Any, Any, Any]
"""What to do; which part of the user's array is meant (None: all of it); and with what."""
Todo = tuple[Sequence[Instruction], int]
"""Instructions, and the first of them that is not done."""


class Recipe:
    """What is the same in all calls of one collective with one operator, dtype and shape.

    `needs`: bytes of shared memory. `shown`, `taken`: bytes that others see, and that are theirs.
    `direct`: the plan for arrays that all ranks see, if that is worth it. `is_whole`: everyone
    shows all it has and reduces it, see `LaneExpress._whole`.
    """

    __slots__ = (
        "_direct", "_found", "_staged", "_whole", "call", "digest", "direct", "is_whole",
        "kernel", "length", "nbytes", "needs", "op", "plain", "pulled", "shown", "taken",
        "weight",
    )  # fmt: skip

    def __init__(
        self, call: bytes, kernel: Kernel, op: ReduceOp, length: int, pulled: Prepared,
        direct: Prepared | None,
    ) -> None:  # fmt: skip
        self.call = call
        self.digest = digest_of(call)
        self.kernel = kernel
        self.plain = kernel.plain(length, disjoint=True)
        self.op = op  # kept alive: recipes are found by its identity
        itemsize = kernel.dtype.itemsize
        self.nbytes = length * itemsize
        self.pulled = pulled
        self.needs = pulled.plan.shared * itemsize
        self.shown, self.taken = pulled.shown * itemsize, pulled.taken * itemsize
        self.direct = direct.plan if direct is not None else None
        self.weight = len(pulled.plan.steps)
        self.length = length
        steps = [type(step) for step in pulled.plan.steps]
        self.is_whole = direct is None and steps == [Copy, Publish, Await, Reduce]
        self._whole: dict[int, tuple[Flat, list[Flat]]] = {}
        self._staged: dict[int, list[Instruction]] = {}
        self._found: dict[int, int] = {}
        self._direct: list[Instruction] = []

    def staged(self, lane: Lane, area: int) -> list[Instruction]:
        """What to do, by way of an area of shared memory."""
        made = self._staged.get(area)
        if made is None:
            shared = [vector.arrays[0] for vector in lane.vectors(area, self.kernel.dtype)]
            made = self._staged[area] = self._compile(self.pulled.plan, shared)
        return made

    def whole(self, lane: Lane, area: int) -> tuple[Flat, list[Flat]]:
        """Where this rank shows its elements, and where all do, by rank."""
        made = self._whole.get(area)
        if made is None:
            every = [v.arrays[0][: self.length] for v in lane.vectors(area, self.kernel.dtype)]
            made = self._whole[area] = every[lane.board.rank], every
        return made

    def where_it_lies(self, heap: Heap, places: dict[int, int]) -> list[Instruction]:
        """What to do where the others' arrays lie at `places`. Raises ProtocolError."""
        assert self.direct is not None
        if places != self._found:
            dtype = self.kernel.dtype
            shared: list[Flat | None] = [None] * self.direct.size
            for peer, place in places.items():
                shared[peer] = heap.find(peer, place, self.nbytes).view(dtype)
            self._direct = self._compile(self.direct, shared)
            self._found = places
        return self._direct

    def forget_arrays(self) -> None:
        """Let go of the others' arrays."""
        self._found = {}
        self._direct = []

    def _compile(self, plan: Plan, shared: Sequence[Flat | None]) -> list[Instruction]:
        return [self._instruction(step, shared) for step in plan.steps]

    def _instruction(self, step: Step, shared: Sequence[Flat | None]) -> Instruction:
        def view(span: Span) -> Flat | None:
            """None: it is the user's array here."""
            memory = None if span.buffer < SHARED else shared[span.buffer - SHARED]
            return None if memory is None else memory[span.start : span.stop]

        if isinstance(step, Publish):
            return _PUBLISH, None, None, None
        if isinstance(step, Await):
            return _AWAIT, None, step.peers, step.count
        kernel = self.kernel
        if isinstance(step, Copy):
            into = view(step.into)
            if into is not None:
                return _GIVE, self._part(step.source), into, None
            return _TAKE, self._part(step.into), view(step.source), None
        assert isinstance(step, Reduce)
        part = self._part(step.into)
        operands = [view(span) for span in step.operands]
        if len(operands) == 2 and (plain := kernel.plain(step.into.length)) is not None:
            return _COMBINE, part, plain, operands
        return _REDUCE, part, kernel.reduce_loudly, operands

    def _part(self, span: Span) -> slice | None:
        """Which part of the user's array it is; None: all of it."""
        return None if span.length == self.length else slice(span.start, span.stop)


class ExpressGroup(Place, Protocol):
    """A group whose collectives are done within the call. `trace` hears of operations, where
    somebody traces."""

    endpoint: Endpoint
    tags: TagCounts
    recorder: Recorder
    scope: Scope
    trace: Trace | None

    def started(self, work: Work[Any]) -> None:
        """Tells whoever traces that `work` begins."""
        ...


class LaneGroup(ExpressGroup, Protocol):
    """A group whose ranks share memory, and whose collectives are done within the call."""

    @property
    def heap(self) -> Heap: ...

    @property
    def is_calm(self) -> bool:
        """Whether nothing is known of collectives that were not called here yet."""
        ...

    def take_over(self, work: Work[Any], call: bytes, program: Program, seconds: float) -> None:
        """Goes on, as an operation that runs `program`, with the collective that is under way on
        the lane. It may take `seconds`."""
        ...


class Kept(Protocol):
    """A recipe. `weight`: its steps; `length`: elements."""

    call: bytes
    kernel: Kernel
    length: int
    nbytes: int
    weight: int


R = TypeVar("R", bound=Kept)
G = TypeVar("G", bound=ExpressGroup)


class Express(ABC, Generic[G, R]):
    """The recipes, of type `R`, of one group, of type `G`."""

    def __init__(self, context: G) -> None:
        self._size = context.size
        self._quietly = quietly()
        self._context = context
        self._loop = context.loop
        self._progress = context.endpoint.progress
        self._add = context.recorder.add
        self._recipes: dict[tuple[int, Any, Any], R | None] = {}
        self._weight = 0

    @abstractmethod
    def _make(self, call: bytes, kernel: Kernel, op: ReduceOp, length: int) -> R | None:
        """The recipe of an all-reduce of `length` elements, which the ranks name `call`."""

    @abstractmethod
    def _run(self, recipe: R, x: Any, flat: Flat, seconds: float) -> Work[Any] | None:
        """Reduce `x`, whose memory is `flat`, by `recipe`. None: nothing has happened."""

    def all_reduce(self, x: Any, op: Any, seconds: float) -> Work[Any] | None:
        """Reduce `x` in place. None: the fast path does not apply, nothing has happened."""
        cls = type(x)
        if cls is not np.ndarray and cls is not tensors.plain_type():
            return None
        try:
            key = (id(op), x.dtype, x.shape)
        except RuntimeError:  # a nested tensor has no shape
            return None  # and the ordinary way refuses it
        try:
            recipe = self._recipes[key]
        except KeyError:
            if arrays.plain(x) is None:
                return None
            recipe = self._keep(key, self._learn(x, op))
        if recipe is None:
            return None
        # Looked at anew in each call: what was there before may be freed by now.
        flat = arrays.flat(x, recipe.kernel.dtype, recipe.length)
        return None if flat is None else self._run(recipe, x, flat, seconds)

    def _done(self, work: Work[Any], seq: int, recipe: R, x: Any) -> None:
        """The collective `seq` is done, its result is in `x`."""
        context = self._context
        context.tags.pass_over(None)
        self._add(
            (context.scope, "all_reduce", None, seq, recipe.call, None, recipe.nbytes,
             work._started)
        )  # fmt: skip
        if context.trace is not None:
            context.started(work)
        if type(x) is not np.ndarray:
            tensors.mark_written(x)
        if self._progress.is_due():
            # The loop gets its turn before the caller goes on; the others need not wait for that.
            self._loop.call_soon(work.finish, x)
        else:
            work.finish(x)

    def _keep(self, key: Any, recipe: R | None) -> R | None:
        self._recipes[key] = recipe
        self._weight += 1 if recipe is None else recipe.weight
        while self._weight > KEPT and len(self._recipes) > 1:
            oldest = self._recipes.pop(next(iter(self._recipes)))
            self._weight -= 1 if oldest is None else oldest.weight
        return recipe

    def _learn(self, x: Any, op: Any) -> R | None:
        if not isinstance(op, ReduceOp) or op.function:
            return None
        try:
            item = arrays.view(x, "x")
            if item is None or not item.is_flat:
                return None
            kernel = Kernel.of(op, item.name)
        except TypeError:
            return None  # and the ordinary way raises it
        return self._make(f"all_reduce({op}, {item})".encode(), kernel, op, item.base.size)

    def forget_arrays(self) -> None:
        """Let go of arrays of others."""


class LaneExpress(Express[LaneGroup, Recipe]):
    """The recipes of one group whose ranks share memory."""

    def __init__(self, context: LaneGroup, lane: Lane) -> None:
        super().__init__(context)
        self.lane = lane

    def _make(self, call: bytes, kernel: Kernel, op: ReduceOp, length: int) -> Recipe | None:
        vector = Vector.of(np.empty(length, kernel.dtype))
        group = Group(kernel.name, kernel, vector, vector, [0, length])
        phase = pulls.all_reduce(self._context, group)
        direct = pulls.all_reduce_direct(self._context, group)
        return Recipe(call, kernel, op, length, phase.prepared, direct)

    def _run(self, recipe: Recipe, x: Any, flat: Flat, seconds: float) -> Work[Any] | None:
        context = self._context
        lane = self.lane
        tags = context.tags
        if not context.is_calm:
            return None
        seq = tags.upcoming(None)
        area = area_for(recipe.needs, seq, 0)
        place = 0
        if recipe.direct is not None and context.heap.shows_any:
            place = context.heap.place_of([flat])
        if not lane.try_enter(seq, area, recipe.digest, recipe.call, place):
            return None
        work: Work[Any] = Work.begin(self._loop, "all_reduce", None, seq, recipe.nbytes)
        try:
            if recipe.is_whole:
                left = self._whole(recipe, flat, area)
            elif place:
                choice: Instruction = (_CHOOSE, None, lane.others, recipe)
                left = self.go(([choice], 0), flat, area, lane.watch)
            else:
                left = self.go((recipe.staged(lane, area), 0), flat, area, lane.watch)
        except Exception as error:
            context.take_over(work, recipe.call, _failing(error), seconds)
            return work
        if left is None:
            lane.finish_inline(recipe.shown, recipe.taken)
            self._done(work, seq, recipe, x)
        else:
            run = Run(self, recipe, left, flat, area)
            context.take_over(work, recipe.call, run.go_on(x), seconds)
        return work

    def _whole(self, recipe: Recipe, flat: Flat, area: int) -> Todo | None:
        """What `go` does with the plan where everyone shows all and reduces all, without a look at
        each of its steps: small arrays take no longer than that."""
        lane = self.lane
        own, every = recipe.whole(lane, area)
        own[:] = flat
        lane.publish()
        if not lane.watch(lane.others, 1):
            return recipe.staged(lane, area), 2
        kernel = recipe.kernel
        if (plain := recipe.plain) is None:
            self._quietly(kernel.reduce_loudly, every, flat, self._size)
        elif self._size == 2:
            self._quietly(plain, every[0], every[1], out=flat)
        else:
            self._quietly(kernel.fold_loudly, every, flat)
        return None if lane.end(area) else (recipe.staged(lane, area), 4)

    def go(
        self,
        todo: Todo,
        flat: Flat,
        area: int,
        wait: Callable[[Sequence[int], int], bool],
    ) -> Todo | None:
        """Execute instructions until one has to wait for longer than `wait` does. Returns what is
        left to do; None: nothing."""
        lane = self.lane
        quietly = self._quietly
        instructions, pc = todo
        for code, part, a, b in instructions[pc:] if pc else instructions:
            if code == _AWAIT:
                if not wait(a, b):
                    return instructions, pc
            elif code == _PUBLISH:
                lane.publish()
            elif code == _CHOOSE:
                if not wait(a, 0):
                    return instructions, pc
                places = lane.places()
                if places is None:
                    chosen = b.staged(lane, area)
                else:
                    chosen = b.where_it_lies(self._context.heap, places)
                return self.go((chosen, 0), flat, area, wait)
            else:
                own = flat if part is None else flat[part]
                if code == _GIVE:
                    a[:] = own
                elif code == _TAKE:
                    own[:] = a
                elif code == _COMBINE:
                    quietly(
                        a, own if b[0] is None else b[0], own if b[1] is None else b[1], out=own
                    )
                else:
                    quietly(a, [own if x is None else x for x in b], own, self._size)
            pc += 1
        return None if lane.end(area) else (instructions, pc)

    def forget_arrays(self) -> None:
        """Let go of arrays of others."""
        for recipe in self._recipes.values():
            if recipe is not None:
                recipe.forget_arrays()


def _failing(error: Exception) -> Program:
    """The program of an operation that has failed already."""
    yield from ()
    raise error


class Run:
    """A recipe under way, as a phase of an operation."""

    __slots__ = ("_area", "_express", "_flat", "_recipe", "_todo")

    def __init__(
        self, express: LaneExpress, recipe: Recipe, todo: Todo, flat: Flat, area: int
    ) -> None:
        self._express = express
        self._recipe = recipe
        self._todo: Todo | None = todo
        self._flat = flat
        self._area = area

    def go_on(self, x: Any) -> Program:
        """The rest, as the program of an operation whose result is `x`."""
        yield self
        if type(x) is not np.ndarray:
            tensors.mark_written(x)
        return x

    def run(self) -> bool:
        """Go on, with whatever waiting that takes. Raises DifferentCallsError, ProtocolError."""
        express = self._express
        assert self._todo is not None
        self._todo = express.go(self._todo, self._flat, self._area, express.lane.wait_for)
        if self._todo is not None:
            return False
        express.lane.moved.add(self._recipe.shown, self._recipe.taken)
        return True

    def close(self) -> None:
        self._todo = None
