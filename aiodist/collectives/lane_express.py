"""Prepared collectives of ranks that share memory: all of one within its call.

There are two kinds. *Reductions* are one phase on arrays, which is kept with its memory. *Values*
(broadcast, all_gather and their like, see `lane_values`) are one phase of small blobs, whose bytes
are known but for the data. Which phase, and which bytes, the ordinary way has said: so the others
cannot tell, and each rank for itself may go either way.

What is of neither kind (numbers, trees, `out=`) is made as ever, and its program is run within the
call as far as that goes without waiting for long (`LaneExpress.begin`): all its phases in shared
memory.

Where calls before it have not ended yet, one of a known kind waits for its turn as a `QueuedCall`,
and is then done within that, as it would have been within its call. No function of the user's may
run in there, since it could call the next collective before this one has taken its number; so what
may have one goes the ordinary way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from aiodist.buffers import arrays
from aiodist.buffers.kernels import Kernel
from aiodist.buffers.reductions import Group, split_slots
from aiodist.buffers.vector import Vector
from aiodist.collectives import lane_values
from aiodist.collectives.express import (
    Express,
    ExpressGroup,
    Flat,
    Recipe,
    before,
    failing,
    marked,
    rest_of,
    returning,
)
from aiodist.engine import waiting_calls
from aiodist.engine.early import Key
from aiodist.engine.executor import ALL, Executor, all_at_once, area_for, area_of, in_steps
from aiodist.engine.operation import Failure, Operation, Program
from aiodist.engine.phase import Phase
from aiodist.phases import pulls
from aiodist.phases.base import Call
from aiodist.schedules.selection import EAGER_LIMIT
from aiodist.shared_memory.board import digest_of
from aiodist.shared_memory.lane import Lane
from aiodist.types import ReduceOp
from aiodist.work import Work

ONE_ROUND = 2
"""Most publishes of a plan whose views of shared memory are kept: those of 1.5 MiB and less."""
SMALL_SLOTS = EAGER_LIMIT
"""Most bytes of the slots of a reduce_scatter that is prepared: they are joined, or copied. With a
tag, larger ones do not show all they have at once."""
_NOTHING: Mapping[int, memoryview] = {}


class LaneRecipe(Recipe):
    """A recipe of ranks that share memory."""

    __slots__ = ("at_once", "fused", "makes", "out")

    def __init__(
        self,
        op: str,
        call: bytes,
        phase: Phase,
        vector: Vector,
        keeps: object,
        out: Vector | None = None,
    ) -> None:
        """`out`: where the result goes, if not to `vector`."""
        super().__init__(op, call, phase, vector, keeps)
        self.out = out
        if out is not None:
            self.phase = self.phase._replace(lent=(vector, out))
            out.lend(None)
        # What makes of the phase and an area a function that does it in one go; None: nothing.
        self.fused: Callable[[Phase, Lane, int], Callable[[Any], int]] | None = None
        if phase.whole:
            self.fused = all_at_once
        elif phase.prepared.plan.publishes <= ONE_ROUND:
            self.fused = in_steps
        self.at_once: dict[int, Callable[[Any], int]] = {}  # these functions, by area
        self.makes: Callable[[], arrays.Array] | None = None  # a new array for the result

    def lay_out(self, args: tuple[Any, ...], flats: list[Flat]) -> tuple[Any, Any]:
        flat = flats[0] if len(flats) == 1 else np.concatenate(flats)
        if self.makes is None:
            return args[0] if self.returns else None, flat
        made = self.makes()
        return made.value, (flat, made.read())

    def executor(self, flat: Any, lane: Lane, area: int, place: int = 0, done: int = 0) -> Executor:
        """What does it with `flat` on `lane`. The first steps are `done`."""
        self.lend(flat)
        return Executor(self.phase, None, lane, area, place, done)

    def lend(self, flat: Any) -> None:
        """Lend its phase the memory of one call."""
        if self.out is None:
            self.vector.lend(flat)
        else:
            x, out = flat
            self.vector.lend(x)
            self.out.lend(out)

    def resume(
        self, x: Any, flat: Any, lane: Lane, area: int, done: int
    ) -> tuple[Executor, Program]:
        """What goes on with it where it has to wait: with its phase, and with what comes after."""
        return self.executor(flat, lane, area, 0, done), rest_of(self, x)

    def keep(self, flat: Any) -> Any:
        """What is kept of `flat` while it waits for its turn."""
        return flat

    def program(self, x: Any, flat: Any) -> Program:
        """All of it, where nothing is done yet."""
        self.lend(flat)  # now that it is its turn: before, another call may have had them
        yield self.phase
        return (yield from rest_of(self, x))


class QueuedCall:
    """One call that waits for its turn on the lane."""

    __slots__ = ("express", "flat", "key", "recipe", "seconds", "seq", "work", "x")
    place = 0

    def __init__(
        self,
        express: LaneExpress,
        recipe: LaneRecipe | lane_values.ValueRecipe,
        work: Work[Any],
        seq: int,
        x: Any,
        flat: Any,
        seconds: float,
    ) -> None:
        self.express = express
        self.recipe = recipe
        self.work = work
        self.seq = seq
        self.key: Key = (None, seq)
        self.x = x  # what is known of its result
        self.flat = flat  # what it is done with, see `lay_out`
        self.seconds = seconds  # that it had when it was called

    @property
    def call(self) -> bytes:
        return self.recipe.call

    @property
    def digest(self) -> int:
        return self.recipe.digest

    def resume(self) -> None:
        """It is its turn."""
        self.express.at_turn(self)

    def to_operation(self) -> Operation | None:
        """It goes on as an operation."""
        return self.express.to_operation(self)


class LaneExpress(Express[ExpressGroup, LaneRecipe | lane_values.ValueRecipe]):
    """The recipes of a group whose ranks share memory."""

    _on_lane = True

    def __init__(self, context: ExpressGroup, lane: Lane) -> None:
        super().__init__(context)
        self._lane = lane

    def _prepare(
        self, op: str, call: bytes, phase: Phase, vector: Vector, keeps: object
    ) -> LaneRecipe | None:
        return LaneRecipe(op, call, phase, vector, keeps) if phase.shared is not None else None

    def _run(
        self,
        recipe: LaneRecipe | lane_values.ValueRecipe,
        x: Any,
        flat: Any,
        seconds: float,
        tag: object = None,
    ) -> Work[Any] | None:
        calls = self._calls
        lane = self._lane
        phase = recipe.phase
        seq, arrivals = calls.tags.upcoming(None), calls.arrivals
        if (arrivals.early or arrivals.verdicts or calls.deferred) and not self._is_next(seq):
            return None
        area = area_for(phase.shared or 0, seq, 0)
        place = 0 if phase.direct is None else self._context.heap.place_of((flat,))
        if not lane.try_enter(seq, area, recipe.digest, recipe.call, place):
            if not lane.idle and recipe.fused is not None and not place:
                return self._queue(recipe, seq, x, flat, seconds)
            return None
        work: Work[Any] = Work.begin(self._loop, recipe.op, None, seq, recipe.nbytes)
        executor = None
        try:
            if recipe.fused is not None and not place:
                made = recipe.at_once
                at_once = made.get(area) or made.setdefault(area, recipe.fused(phase, lane, area))
                done = at_once(flat)
            else:
                assert isinstance(recipe, LaneRecipe)
                executor = recipe.executor(flat, lane, area, place)
                done = ALL if executor.run() else 0
        except Exception as error:
            if executor is not None:
                executor.close()
            calls.take_over(work, recipe.call, None, failing(error), seconds)
            return work
        if done == ALL:
            if executor is not None:
                executor.close()
            lane.finish_inline()
            self._done(work, recipe, x)
            return work
        if executor is None:
            executor, rest = self._rest(recipe, x, flat, area, done)
        else:
            rest = rest_of(recipe, x)
        calls.take_over(work, recipe.call, executor, rest, seconds)
        return work

    def _rest(
        self,
        recipe: LaneRecipe | lane_values.ValueRecipe,
        x: Any,
        flat: Any,
        area: int,
        done: int,
    ) -> tuple[Executor | None, Program]:
        """What goes on with a call of which so many steps are `done`."""
        try:
            return recipe.resume(x, flat, self._lane, area, done)
        except Exception as error:
            return None, failing(error)

    def _is_next(self, seq: int) -> bool:
        """Whether nothing has come for this number, perhaps a verdict, and no call before this one
        waits for its own. The ordinary way sees to both."""
        return not self._calls.deferred and self._calls.arrivals.is_quiet((None, seq))

    # -- calls that wait for their turn -----------------------------------------------------------

    def _queue(
        self,
        recipe: LaneRecipe | lane_values.ValueRecipe,
        seq: int,
        x: Any,
        flat: Any,
        seconds: float,
    ) -> Work[Any] | None:
        """Have it wait for its turn, behind others. None: nothing has happened."""
        lane, calls = self._lane, self._calls
        if lane.is_broken or seconds < 2 * waiting_calls.LONG or self._records.trace is not None:
            return None
        work: Work[Any] = Work.begin(self._loop, recipe.op, None, seq, recipe.nbytes)
        call = QueuedCall(self, recipe, work, seq, x, recipe.keep(flat), seconds)
        calls.tags.take(None)
        calls.waiting.by_key[call.key] = call
        calls.waiting.wait(call)
        lane.add(call)
        return work.pending_for_user()

    def at_turn(self, call: QueuedCall) -> None:
        """Do `call`, whose turn it is, or let an operation go on with it."""
        lane, calls = self._lane, self._calls
        if lane.gives_way():
            return
        del calls.waiting.by_key[call.key]
        recipe, seq, work, x = call.recipe, call.seq, call.work, call.x
        phase, fused = recipe.phase, recipe.fused
        assert fused is not None
        area = area_for(phase.shared or 0, seq, 0)
        if not lane.try_enter(seq, area, recipe.digest, recipe.call, 0, call):
            self._take_over(call)
            return
        made = recipe.at_once
        try:
            at_once = made.get(area) or made.setdefault(area, fused(phase, lane, area))
            done = at_once(call.flat)
            if done == ALL and recipe.finish is not None:
                x = recipe.finish(x)
        except Exception as error:
            calls.take_over(work, recipe.call, None, failing(error), call.seconds, came=_NOTHING)
            return
        if done == ALL:
            lane.finish_turn()
            self._finish_waiting(work, recipe.op, recipe.call, recipe.nbytes, x)
            return
        executor, rest = self._rest(recipe, x, call.flat, area, done)
        calls.take_over(work, recipe.call, executor, rest, call.seconds, came=_NOTHING)

    def to_operation(self, call: QueuedCall) -> Operation | None:
        """`call`, which waits, goes on as an operation."""
        del self._calls.waiting.by_key[call.key]
        return self._take_over(call)

    def _take_over(self, call: QueuedCall) -> Operation | None:
        recipe = call.recipe
        program = recipe.program(call.x, call.flat)
        return self._calls.take_over(call.work, recipe.call, None, program, call.seconds, came={})

    # -- the other operations ---------------------------------------------------------------------

    # The steps are those of `Operation`, for a call that has the lane to itself: it enters, runs
    # one phase after the other, and ends. Wherever it cannot go on, an operation does, with the
    # phase that is under way, or that is next, and with what is left of the program.
    def begin(
        self, call: Call, args: tuple[Any, ...], seconds: float, tag: object = None
    ) -> Work[Any] | None:
        lane, calls = self._lane, self._calls
        seq, text = calls.tags.upcoming(None), call.text.encode()
        if not self._is_next(seq) or not self._may_begin(call, args):
            return None
        if not lane.try_enter(seq, seq & 1, digest_of(text), text, call.place):
            return None
        work: Work[Any] = Work.begin(self._loop, call.op, None, seq, call.nbytes)
        executor, program = None, call.start(True)
        try:
            phase, number = next(program), 0
            while isinstance(phase, Phase) and phase.shared is not None:
                area = area_of(phase, seq, number)
                executor = Executor(phase, None, lane, area, call.place)
                if not executor.run():
                    calls.take_over(work, text, executor, program, seconds)
                    return work
                executor.close()
                executor, phase = None, next(program)
                if isinstance(phase, Phase) and phase.shared is not None:
                    number = lane.next_phase()
            rest = before(phase, program)
        except StopIteration as stop:
            if not isinstance(stop.value, Failure):
                lane.finish_inline()
                self._finish(work, call.op, text, call.nbytes, stop.value)
                return work
            rest = returning(stop.value)
        except Exception as error:
            if executor is not None:
                executor.close()
            rest = failing(error)
        calls.take_over(work, text, None, rest, seconds)
        return work

    def _learn_other(
        self, op: str, make: Callable[..., Call], args: tuple[Any, ...]
    ) -> LaneRecipe | lane_values.ValueRecipe | None:
        context = self._context
        if op not in ("reduce", "reduce_scatter"):
            return lane_values.learn(lane_values.ValueRecipe, context, op, make, args)
        try:
            call = make(context, *args)
            return (_reduce if op == "reduce" else _reduce_scatter)(context, call, *args)
        except (TypeError, ValueError):
            return None  # and the ordinary way raises it


def _reduce(
    context: ExpressGroup, call: Call, x: Any, dst: int, op: Any, out: None
) -> LaneRecipe | None:
    item = arrays.view(x, "x")
    if item is None or not (item.is_flat and item.base.size and isinstance(op, ReduceOp)):
        return None
    kernel = Kernel.of(op, item.name)
    vector = Vector.of(np.empty(item.base.size, kernel.dtype))
    phase = pulls.reduce(
        context, Group(kernel.name, kernel, vector, vector, [0, vector.length]), dst
    )
    recipe = LaneRecipe("reduce", call.text.encode(), phase, vector, op)
    recipe.returns = context.rank == dst
    if recipe.returns and item.kind == "torch":
        recipe.finish = marked
    return recipe


class Slots(NamedTuple):
    """What a reduce_scatter is called with that may be prepared: where the slots begin and end, and
    what `makes` an array for the result. `keeps`: see `Recipe`."""

    kernel: Kernel
    bounds: list[int]
    makes: Callable[[], arrays.Array]
    keeps: object


def slots_of(context: ExpressGroup, call: Call, xs: Any, op: Any) -> Slots | None:
    """Those of a call; None where it is not to be prepared."""
    slots = [arrays.view(slot, "xs") for slot in split_slots(xs, context.size)]
    own = slots[context.rank]
    if call.nbytes > SMALL_SLOTS or own is None or not isinstance(op, ReduceOp):
        return None
    bounds = [0]
    for slot in slots:
        if slot is None or not (slot.is_flat and slot.base.size and slot.name == own.name):
            return None
        bounds.append(bounds[-1] + slot.base.size)
    makes = partial(
        arrays.empty, "torch" if own.kind == "torch" else "numpy", own.name, own.shape, "xs"
    )
    return Slots(Kernel.of(op, own.name), bounds, makes, op)


def _reduce_scatter(
    context: ExpressGroup, call: Call, xs: Any, op: Any, out: None
) -> LaneRecipe | None:
    slots = slots_of(context, call, xs, op)
    if slots is None:
        return None
    kernel, bounds, makes, _ = slots
    vector = Vector.of(np.empty(bounds[-1], kernel.dtype))
    own = bounds[context.rank + 1] - bounds[context.rank]
    result = Vector.of(np.empty(own, kernel.dtype))
    # What is as small as this is staged, wherever it lies.
    phase = pulls.reduce_scatter(
        context, Group(kernel.name, kernel, vector, result, bounds)
    )._replace(direct=None)
    recipe = LaneRecipe("reduce_scatter", call.text.encode(), phase, vector, op, result)
    recipe.makes = makes
    return recipe
