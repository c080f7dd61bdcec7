"""Prepared collectives of ranks that share memory: a whole collective within its call.

There are two kinds of recipes. *Reductions* (`lane_reductions`) are one phase on arrays, which is
kept with its memory. *Values* (broadcast, all_gather and the like: `lane_values`) are one phase of
small blobs, of which all bytes but the data are known. The phase and the bytes are those of the
ordinary way. So other ranks see no difference, and each rank may go either way on its own.

Other calls make their program as ever, and run its phases in shared memory as far as they need not
wait long (`LaneExpress.begin`). The rest of a call with values goes the same way if other ranks
have shown something unknown.

A call of a known kind may find earlier calls that have not ended. It then waits for its turn as a
`QueuedCall`, and is done in one go during its turn. No function of the user may run there, because
it could call the next collective before this one has taken its number. So calls that may run one go
the ordinary way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from aiodist.buffers.vector import Vector
from aiodist.engine.early import Key
from aiodist.engine.executor import ALL, Executor, area_for, area_of, by_turn, goes_round
from aiodist.engine.operation import NoResult, Operation, Program
from aiodist.engine.phase import Phase
from aiodist.phases.base import Call
from aiodist.prepared import lane_reductions, lane_values
from aiodist.prepared.express import (
    Express,
    ExpressGroup,
    before,
    failing,
    rest_of,
    returning,
)
from aiodist.prepared.joined import JoinedCalls
from aiodist.prepared.lane_reductions import LaneRecipe
from aiodist.prepared.plain_values import PlainRecipe
from aiodist.prepared.tapes import ALL_SHOWN, is_tape, tape_of
from aiodist.shared_memory.board import LEAST_IN_ROUND, digest_of
from aiodist.shared_memory.lane import Lane
from aiodist.work import Work

_NOTHING: Mapping[int, memoryview] = {}


class QueuedCall:
    """A call that waits for its turn on the lane."""

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
        self.x = x  # what is known of the result
        self.flat = flat  # memory or arguments: see `lay_out`
        self.seconds = seconds  # time limit at the call

    @property
    def call(self) -> bytes:
        return self.recipe.call

    def resume(self) -> None:
        """Do the call, because its turn has come."""
        self.express.at_turn(self)

    def to_operation(self) -> Operation | None:
        """Make an operation of this call."""
        return self.express.to_operation(self)


class LaneExpress(Express[ExpressGroup, LaneRecipe | lane_values.ValueRecipe]):
    """Keeps the recipes of a group whose ranks share memory."""

    _on_lane = True

    def __init__(self, context: ExpressGroup, lane: Lane) -> None:
        super().__init__(context)
        self._lane = lane
        turns = lane.turns
        self._use_compiled(
            (turns.queue,),
            ((turns, "current"), (lane, "is_broken")),
            said=lane.board.said,
            first=lane.first,
            unfinished=self._unfinished,
            broke=self._broke,
        )

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
        area = area_for(phase.shared or 0, seq, 0, lane.by_turns)
        place = 0
        if phase.direct is not None:
            assert isinstance(recipe, LaneRecipe)
            place = self._context.heap.place_of((recipe.shown(flat),))
        if not lane.try_enter(seq, area, recipe.digest, recipe.call, place):
            if not lane.idle and recipe.fused is not None and not place:
                return self._queue(recipe, seq, x, flat, seconds)
            return None
        work: Work[Any] = Work.begin(self._loop, recipe.op, None, seq, recipe.nbytes)
        executor = None
        try:
            if recipe.fused is not None and not place:
                done = (recipe.at_once.get(area) or self._fused(recipe, area))(flat)
            else:
                assert isinstance(recipe, LaneRecipe)
                executor = recipe.executor(flat, lane, area_of(phase, lane, seq, 0), place)
                done = ALL if executor.run() else 0
        except Exception as error:
            if executor is not None:
                executor.close()
            self._broke(work, recipe, error, seconds)
            return work
        if done == ALL:
            if executor is not None:
                executor.close()
            lane.finish_inline()
            self._done(work, recipe, x)
        elif executor is None:
            self._unfinished(work, recipe, x, flat, area, done, seconds)
        else:
            calls.take_over(work, recipe.call, executor, rest_of(recipe, x), seconds)
        return work

    def _fused(
        self, recipe: LaneRecipe | lane_values.ValueRecipe, area: int
    ) -> Callable[[Any], int]:
        """Make the function that runs `recipe` in `area`."""
        phase, lane = recipe.phase, self._lane
        assert recipe.fused is not None
        fused = recipe.fused
        turns = (phase.shared or 0) >= LEAST_IN_ROUND and goes_round(phase, lane)
        run = by_turn(fused, phase, lane) if turns else fused(phase, lane, area)
        run = tape_of(recipe, phase, lane, area, run, goes_round=turns) or run
        if is_tape(run):
            even, odd = recipe.tapes
            recipe.tapes = (even if area == 1 else run, odd if area == 0 else run)
        recipe.at_once[area] = run
        return run

    def _unfinished(
        self,
        work: Work[Any],
        recipe: LaneRecipe | lane_values.ValueRecipe,
        x: Any,
        flat: Any,
        area: int,
        done: int,
        seconds: float,
    ) -> None:
        """Continue a call that has to wait after so many `done` steps."""
        executor, rest = self._rest(recipe, x, flat, area, done)
        if done >= ALL_SHOWN and executor is not None and not self._runs_others():
            self._go_on(work, recipe.call, executor, rest, seconds)
        else:
            self._calls.take_over(work, recipe.call, executor, rest, seconds)

    def _broke(
        self,
        work: Work[Any],
        recipe: LaneRecipe | lane_values.ValueRecipe,
        error: Exception,
        seconds: float,
    ) -> None:
        """Fail a call, because one of its steps has raised `error`."""
        self._calls.take_over(work, recipe.call, None, failing(error), seconds)

    def _rest(
        self,
        recipe: LaneRecipe | lane_values.ValueRecipe,
        x: Any,
        flat: Any,
        area: int,
        done: int,
    ) -> tuple[Executor | None, Program]:
        """Return what continues a call after so many `done` steps."""
        try:
            return recipe.resume(x, flat, self._lane, area, done)
        except Exception as error:
            return None, failing(error)

    def _is_next(self, seq: int) -> bool:
        """Say whether the call with this number may start within itself.

        It may not if something has come for it, perhaps a verdict, or if an earlier call still
        waits for its number. The ordinary way handles both.
        """
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
        """Let a call wait for its turn behind others. None: nothing has happened."""
        lane, calls = self._lane, self._calls
        if lane.is_broken or self._records.trace is not None:
            return None
        work: Work[Any] = Work.begin(self._loop, recipe.op, None, seq, recipe.nbytes)
        call = QueuedCall(self, recipe, work, seq, x, recipe.keep(flat), seconds)
        calls.tags.take(None)
        calls.waiting.by_key[call.key] = call
        calls.waiting.wait(call)
        lane.turns.add(call)
        return work

    def at_turn(self, call: QueuedCall) -> None:
        """Do `call` in its turn, or let an operation continue it."""
        lane, calls = self._lane, self._calls
        if lane.waiting.gives_way():
            return
        lane.waiting.is_fresh = False
        del calls.waiting.by_key[call.key]
        recipe, seq, work, x = call.recipe, call.seq, call.work, call.x
        area = area_for(recipe.phase.shared or 0, seq, 0, lane.by_turns)
        if not lane.try_enter(seq, area, recipe.digest, recipe.call, 0, call):
            self._take_over(call)
            return
        try:
            done = (recipe.at_once.get(area) or self._fused(recipe, area))(call.flat)
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
        """Make an operation of `call`, which waits for its turn."""
        del self._calls.waiting.by_key[call.key]
        return self._take_over(call)

    def _take_over(self, call: QueuedCall) -> Operation | None:
        recipe = call.recipe
        program = recipe.program(call.x, call.flat)
        return self._calls.take_over(call.work, recipe.call, None, program, call.seconds, came={})

    # -- the other operations ---------------------------------------------------------------------

    # These are the steps of `Operation`, for a call that has the lane to itself: enter, run one
    # phase after the other, end. If it cannot go on, an operation does, with the present or next
    # phase and the rest of the program.
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
        return self._go_on(work, text, None, call.start(True), seconds, call.place)

    def _go_on(
        self,
        work: Work[Any],
        text: bytes,
        executor: Executor | None,
        program: Program,
        seconds: float,
        place: int = 0,
    ) -> Work[Any]:
        """Run a call that has entered: its present phase, if it has one, and then `program`."""
        lane, seq = self._lane, work.seq
        assert seq is not None
        begun = executor is not None  # whether the first phase has begun
        try:
            while True:
                if executor is None:
                    phase = next(program)
                    if not isinstance(phase, Phase) or phase.shared is None:
                        if not begun:  # nothing published tells others of this call
                            lane.show_entry()
                        rest = before(phase, program)
                        break
                    number = lane.next_phase() if begun else 0
                    executor = Executor(phase, None, lane, area_of(phase, lane, seq, number), place)
                begun = True
                if not executor.run():
                    self._calls.take_over(work, text, executor, program, seconds)
                    return work
                executor.close()
                executor = None
        except StopIteration as stop:
            if not isinstance(stop.value, NoResult):
                lane.finish_inline()
                self._finish(work, work.op, text, work.nbytes, stop.value)
                return work
            rest = returning(stop.value)
        except Exception as error:
            if executor is not None:
                executor.close()
            rest = failing(error)
        self._calls.take_over(work, text, None, rest, seconds)
        return work

    def _learn_other(
        self, op: str, make: Callable[..., Call], args: tuple[Any, ...]
    ) -> LaneRecipe | lane_values.ValueRecipe | JoinedCalls | None:
        context = self._context
        if op == "exscan":
            return self._learn_joined(op, make, args)
        found = lane_values.learn(lane_values.ValueRecipe, context, op, make, args)
        if found is None and (op in lane_reductions.OPS or op == "scan"):
            return lane_reductions.learn(context, op, make, args)
        return found

    def _learn_plain(
        self, op: str, make: Callable[..., Call], args: tuple[Any, ...]
    ) -> lane_values.ValueRecipe | None:
        return lane_values.learn(PlainRecipe, self._context, op, make, args)
