"""Prepared collectives of groups that span hosts: on the lane within a host, and over links between
hosts.

The whole collective is done within the call, if it need not wait. If it becomes an operation, two
sets of reasons hold. `lane_express` explains why a call that has entered its lane can go on at any
step. `link_express` explains why a call that has sent and taken frames can. Here an executor runs a
plan with both kinds of steps, and the operation gets this executor as it is. Other ranks see the
same stamps and frames as ever, so each rank may go either way on its own.

Most calls have to wait for other hosts. Calls of known kinds wait without an operation, because
their text, frames and places are ready (`multihost_waiting`). Other calls become operations.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from aiodist.buffers.vector import Vector
from aiodist.engine.executor import Executor, area_of, begin_area
from aiodist.engine.operation import NoResult, Program
from aiodist.engine.phase import Phase
from aiodist.phases.base import Call
from aiodist.phases.memories import Blobs, Partials, Scratch
from aiodist.prepared import lane_values
from aiodist.prepared.express import (
    Express,
    Recipe,
    before,
    failing,
    rest_of,
    returning,
)
from aiodist.prepared.joined import JoinedCalls
from aiodist.prepared.link_express import Known, KnownCalls, learning
from aiodist.prepared.link_frames import LendingFrames, LinkGroup, is_free
from aiodist.prepared.multihost_values import MultihostValues
from aiodist.prepared.multihost_waiting import MultihostCall
from aiodist.shared_memory.board import digest_of
from aiodist.shared_memory.lane import Lane
from aiodist.work import Work


class MultihostRecipe(Recipe):
    """A reduction that is one phase."""

    __slots__ = ("frames",)

    def __init__(
        self, context: LinkGroup, op: str, call: bytes, phase: Phase, vector: Vector, keeps: object
    ) -> None:
        super().__init__(op, call, phase, vector, keeps)
        self.frames = LendingFrames(context, call, phase.prepared.plan)

    def enter(self, x: Any, flat: Any, lane: Lane, area: int) -> tuple[Executor, Program]:
        """Return the executor and the rest of a call that has entered the lane."""
        self.vector.lend(flat)
        self.frames.memory = self.phase.memory
        executor = Executor(self.phase, self.frames, lane, area, within=True)
        return executor, rest_of(self, x)

    def is_done(self, executor: Executor, flat: Any) -> bool:
        """Say whether the call is done when all its steps are."""
        return True


class MultihostExpress(Express[LinkGroup, MultihostRecipe | MultihostValues]):
    """Keeps the recipes of a group that spans hosts, whose ranks share memory if they can."""

    _on_lane = True

    def __init__(self, context: LinkGroup, lane: Lane) -> None:
        super().__init__(context)
        self._lane = lane
        self._known = KnownCalls()
        self._scratch = Scratch()  # the partial results of the present call

    def _prepare(
        self, op: str, call: bytes, phase: Phase, vector: Vector, keeps: object
    ) -> MultihostRecipe | None:
        if not (vector.length and phase.prepared.plan.eager and phase.shared is not None):
            return None
        assert isinstance(phase.memory, Partials)
        phase.memory.share(self._scratch)
        return MultihostRecipe(self._context, op, call, phase, vector, keeps)

    def _learn_other(
        self, op: str, make: Callable[..., Call], args: tuple[Any, ...]
    ) -> MultihostRecipe | MultihostValues | JoinedCalls | None:
        found = lane_values.learn(MultihostValues, self._context, op, make, args)
        return self._learn_joined(op, make, args) if found is None else found

    def _may_enter(self) -> bool:
        """Say whether nothing is under way here."""
        return is_free(self._context) and self._calls.lane is self._lane

    def _run(
        self,
        recipe: MultihostRecipe | MultihostValues,
        x: Any,
        flat: Any,
        seconds: float,
        tag: object = None,
    ) -> Work[Any] | None:
        calls, lane = self._calls, self._lane
        if not self._may_enter():
            return None
        seq, frames = calls.tags.upcoming(None), recipe.frames
        area = area_of(recipe.phase, lane, seq, 0)
        if not frames.begin((None, seq)):
            return None
        if not lane.try_enter(seq, area, recipe.digest, recipe.call, 0):
            return None
        lane.show_entry()
        work: Work[Any] = Work.begin(self._loop, recipe.op, None, seq, recipe.nbytes)
        executor: Executor | None = None
        try:
            begin_area(recipe.phase, lane, seq)
            executor, rest = recipe.enter(x, flat, lane, area)
            if not executor.run():
                done = partial(self._has_waited, recipe, executor, x, flat)
                call = MultihostCall(calls, lane, work, recipe, executor, rest, seconds, done)
                # In the first calls of a kind, the lengths of frames are not known.
                is_known = type(executor.phase.memory) is not Blobs
                if is_known and self._records.trace is None and call.begin():
                    return work
            # The call has read links, so a verdict may have come for its number.
            elif calls.arrivals.is_quiet((None, seq)) and recipe.is_done(executor, flat):
                executor.close()
                lane.finish_inline()
                self._done(work, recipe, x)
                return work
        except Exception as error:
            if executor is not None:
                executor.close()
            executor, rest = None, failing(error)
        finally:
            frames.settle()
            frames.memory = None  # else it would keep the user's arrays alive
        calls.take_over(work, recipe.call, executor, rest, seconds)
        return work

    def _has_waited(
        self,
        recipe: MultihostRecipe | MultihostValues,
        executor: Executor,
        x: Any,
        flat: Any,
        call: MultihostCall,
    ) -> bool:
        """Finish a call that has waited, after all its steps. Return whether it is done."""
        if not recipe.is_done(executor, flat):
            return False
        executor.close()
        self._lane.finish_turn()
        if recipe.finish is not None:
            x = recipe.finish(x)
        self._finish_waiting(call.work, recipe.op, recipe.call, recipe.nbytes, x)
        return True

    # -- the other operations ---------------------------------------------------------------------

    def begin(
        self, call: Call, args: tuple[Any, ...], seconds: float, tag: object = None
    ) -> Work[Any] | None:
        lane, calls = self._lane, self._calls
        if not (self._may_begin(call, args) and self._may_enter()):
            return None
        seq, text = calls.tags.upcoming(None), call.text.encode()
        if not lane.try_enter(seq, seq & 1, digest_of(text), text, 0):
            return None
        lane.show_entry()
        work: Work[Any] = Work.begin(self._loop, call.op, None, seq, call.nbytes)
        executor: Executor | None = None
        known: Known | None = None
        try:
            program = call.start(True)
            phase = next(program)
            known = self._known_of(text, phase, seq)
            if known is None or not isinstance(phase, Phase):
                rest = before(phase, program)
            else:
                memory: Any = phase.memory
                rest = program
                if isinstance(memory, Blobs):
                    memory.expect(known.lengths.get(len(memory.blobs[self._context.rank]), ()))
                    rest = learning(known, memory, self._context.rank, program)
                known.frames.memory = memory
                executor = Executor(
                    phase, known.frames, lane, begin_area(phase, lane, seq), within=True
                )
                if executor.run() and calls.arrivals.is_quiet((None, seq)):
                    rest = before(next(program), program)
        except StopIteration as stop:
            if not isinstance(stop.value, NoResult):
                if executor is not None:
                    executor.close()
                lane.finish_inline()
                self._finish(work, call.op, text, call.nbytes, stop.value)
                return work
            rest = returning(stop.value)
        except Exception as error:
            if executor is not None:
                executor.close()
            executor, rest = None, failing(error)
        finally:
            if known is not None:
                known.frames.memory = None
        calls.take_over(work, text, executor, rest, seconds)
        return work

    def _known_of(self, call: bytes, phase: object, seq: int) -> Known | None:
        """Return what is kept of `call`, with its frames set to the number `seq`.

        None: its first phase cannot be done within the call.
        """
        if not (isinstance(phase, Phase) and phase.shared is not None):
            return None
        plan = phase.prepared.plan
        if not plan.eager:
            return None
        known = self._known.of(self._context, call, plan)
        return known if known.frames.begin((None, seq)) else None
