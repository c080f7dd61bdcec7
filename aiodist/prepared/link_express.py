"""Prepared collectives of ranks that are joined by links: send and receive frames within the call.

The frames are those of the ordinary way, byte for byte, so other ranks see no difference. A recipe
keeps their prefixes, without the number of the call. The call accepts only the bytes that it
expects. If anything else comes, the ordinary way continues the call from there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from aiodist.buffers.kernels import quietly
from aiodist.buffers.vector import Vector
from aiodist.engine.executor import ALL, Executor
from aiodist.engine.operation import NoResult, Program
from aiodist.engine.phase import Phase
from aiodist.phases.base import Call, share_over_links
from aiodist.phases.memories import Blobs, Scratch, SmallReductions
from aiodist.prepared import lane_values
from aiodist.prepared.express import (
    Express,
    Flat,
    Recipe,
    before,
    failing,
    rest_of,
    returning,
)
from aiodist.prepared.joined import JoinedCalls
from aiodist.prepared.link_frames import KEPT_LENGTHS, Frames, LinkGroup, is_free
from aiodist.prepared.link_moves import MovingCall
from aiodist.prepared.link_values import ARENA, LinkValues
from aiodist.schedules.plan import Plan, Recv, Reduce, Send, Step
from aiodist.work import Work

KEPT_KINDS = 64
"""The most kinds of calls whose frames are kept: the latest ones."""

SHARE_FIRST = {
    "broadcast": True,
    "all_gather": False,
    "gather": False,
    "scatter": True,
    "all_to_all": False,
    "scan": False,
    "exscan": False,
    "barrier": True,
    "fence": True,
}
"""The collectives whose programs begin with small blobs of all ranks (`phases.base.share`).

The value says whether these blobs are `of_one`.
"""

Round = tuple[int, int, int, Flat, memoryview, bool]
"""A round in which two ranks exchange their data, and both reduce it.

Its items are the peer, the number of the step that receives, and the cell with this rank's data.
Then come the place for the peer's data, as an array and as bytes, and whether that data is the
first operand.
"""


class LinkRecipe(Recipe):
    """A recipe of ranks that are joined by links."""

    __slots__ = ("_memory", "_plain", "_quietly", "_rounds", "frames")

    def __init__(
        self,
        context: LinkGroup,
        op: str,
        call: bytes,
        phase: Phase,
        vector: Vector,
        keeps: object,
        scratch: Scratch,
    ) -> None:
        super().__init__(op, call, phase, vector, keeps)
        assert isinstance(phase.memory, SmallReductions)
        self._memory = phase.memory  # cells with the partial results of the plan
        self._memory.share(scratch)
        self.frames = Frames(context, call, phase.prepared.plan)
        self.frames.memory = phase.memory
        self._quietly = quietly()  # calls functions without warnings of numpy
        self._plain = phase.memory.plain  # reduces two arrays; None: there is no such function
        # Rounds need partial results in the user's dtype: see `at_once`.
        self._rounds = [] if self._plain is None else self._rounds_of(phase.prepared.plan.steps)

    def _rounds_of(self, steps: Sequence[Step]) -> list[Round]:
        """Return the rounds of a plan that has one Copy and then only rounds, or an empty list."""
        rounds: list[Round] = []
        for at in range(1, len(steps), 3):
            match steps[at : at + 3]:
                case [Send() as send, Recv() as receive, Reduce() as reduction]:
                    (span,) = receive.spans
                    into, arrays = self._memory.cell(span)
                    comes_first = reduction.operands[0] == span
                    cell = send.spans[0].start
                    rounds.append((receive.peer, at + 1, cell, arrays[0], into, comes_first))
                case _:
                    return []
        return rounds

    @property
    def has_rounds(self) -> bool:
        """Whether the plan has only rounds, so that it may be done `at_once`."""
        return bool(self._rounds)

    def begin(self, flat: Flat) -> tuple[int, Executor | None]:
        """Run `flat` as far as possible.

        Return the number of steps that are done, or `ALL`, and the executor, if one has begun.
        """
        if self.has_rounds:
            return self.at_once(flat), None
        executor = self._executor(flat, 0)
        try:
            return ALL if executor.run() else 0, executor
        except Exception:
            executor.close()
            raise

    def complete(self, x: Any, flat: Flat) -> bool:
        """Say whether the call is done when all its steps are."""
        return True

    def go_on(self, x: Any, flat: Flat, done: int) -> tuple[Executor, Program]:
        """Return the executor and the rest of a call after so many `done` steps."""
        return self._executor(flat, self.weight if done == ALL else done), rest_of(self, x)

    def _executor(self, flat: Flat, done: int) -> Executor:
        self.vector.lend(flat)
        return Executor(self.phase, self.frames, done=done)

    def at_once(self, flat: Flat) -> int:
        """Run a plan of rounds like the executor, but faster. Return the number of done steps, or
        `ALL`.

        It sends the same frames. It exists because two ranks wait for each microsecond before a
        frame leaves and after it has come. For a small array over sockets of one host, the executor
        takes about a tenth longer. If a frame does not come, an executor does the rest. Then the
        partial result is in its memory.
        """
        frames, quietly = self.frames, self._quietly
        links, prefix = frames.links, frames.prefix(self.nbytes)
        for peer, number, cell, other, into, comes_first in self._rounds:
            # Send a copy, because the array changes as soon as the frame of the peer is here.
            links[peer].send_copy(prefix, flat.data)
            if not frames.has_come(peer, prefix, into):
                self._memory.hold(cell, flat)
                return number
            if comes_first:
                quietly(self._plain, other, flat, out=flat)
            else:
                quietly(self._plain, flat, other, out=flat)
        return ALL


class Known(NamedTuple):
    """What is kept of calls with the same text that share small blobs.

    `frames` are their frames. `lengths` has the blob lengths of all ranks in the latest calls, by
    the length of this rank's blob.
    """

    frames: Frames
    lengths: dict[int, list[int]]


class KnownCalls(dict[bytes, Known]):
    """What is kept of the latest kinds of calls, by their text."""

    def of(self, context: LinkGroup, call: bytes, plan: Plan) -> Known:
        """Return what is kept of `call`, which does `plan`."""
        known = self.pop(call, None)
        if known is None or known.frames.plan is not plan:
            known = Known(Frames(context, call, plan), {})
            if len(self) >= KEPT_KINDS:
                del self[next(iter(self))]
        self[call] = known  # last in the dict, because it was used last
        return known


class LinkExpress(Express[LinkGroup, LinkRecipe | LinkValues]):
    """Keeps the recipes of a group whose ranks are joined by links."""

    _on_lane = False

    def __init__(self, context: LinkGroup) -> None:
        super().__init__(context)
        self._known = KnownCalls()
        self._arena = np.empty(ARENA, np.uint8).data  # the blobs of all ranks in the present call
        self._scratch = Scratch()  # the partial results of the present call

    def _prepare(
        self, op: str, call: bytes, phase: Phase, vector: Vector, keeps: object
    ) -> LinkRecipe | None:
        prepared = phase.prepared
        if not (vector.length and prepared.plan.eager and prepared.receives):
            return None
        return LinkRecipe(self._context, op, call, phase, vector, keeps, self._scratch)

    def _run(
        self,
        recipe: LinkRecipe | LinkValues,
        x: Any,
        flat: Any,
        seconds: float,
        tag: object = None,
    ) -> Work[Any] | None:
        context, calls = self._context, self._calls
        if not is_free(context, tag):
            return None
        key = tag, calls.tags.upcoming(tag)
        if not recipe.frames.begin(key):
            return None
        work: Work[Any] = Work.begin(self._loop, recipe.op, *key, recipe.nbytes)
        moving = self._moving(work, recipe, flat, seconds)
        try:
            done, executor = recipe.begin(flat)
            # The call has read links, so something may have come for its number. It may be a
            # verdict. Then this rank must not return a result, even if the result is complete.
            is_quiet = calls.arrivals.is_quiet(key)
            if done == ALL and is_quiet:
                if moving is not None:
                    if moving.begin():
                        self._finish(work, recipe.op, recipe.call, recipe.nbytes, moving.result)
                        return work
                    if moving.waits:
                        return work
                elif recipe.complete(x, flat):
                    if executor is not None:
                        executor.close()
                    self._done(work, recipe, x)
                    return work
            # It has to wait, or another rank has given up.
            elif moving is not None and is_quiet and moving.begin_with(done):
                return work
            if executor is None:
                executor, rest = recipe.go_on(x, flat, done)
            else:
                rest = rest_of(recipe, x)
        except Exception as error:
            executor, rest = None, failing(error)
        operation = calls.take_over(work, recipe.call, executor, rest, seconds)
        if moving is not None:
            moving.becomes(operation)
        return work

    def _moving(
        self, work: Work[Any], recipe: LinkRecipe | LinkValues, flat: Any, seconds: float
    ) -> MovingCall | None:
        """Return the call as one that can wait for its data without an operation, if it can."""
        if not isinstance(recipe, LinkValues) or (route := recipe.route(flat)) is None:
            return None
        if self._records.trace is not None:
            return None
        kept = recipe.keep(flat)
        return MovingCall(self._calls, recipe, route, kept, work, seconds, self._has_moved)

    def _has_moved(self, call: MovingCall) -> None:
        work = call.work
        self._finish_waiting(work, work.op, call.call, work.nbytes, call.result)

    def _learn_other(
        self, op: str, make: Callable[..., Call], args: tuple[Any, ...]
    ) -> LinkRecipe | LinkValues | JoinedCalls | None:
        if self._context.size == 1:
            return None
        recipe = lane_values.learn(LinkValues, self._context, op, make, args)
        if recipe is None:
            return self._learn_joined(op, make, args)
        recipe.arena = self._arena
        return recipe

    # Broadcast, gather, barrier and the like first share small blobs. If values are small, that is
    # all. The lengths of the blobs are known from the last call of the kind, so the call can look
    # for the frames like a reduction. The rest of the program, which interprets the blobs, runs in
    # the call, too.
    def begin(
        self, call: Call, args: tuple[Any, ...], seconds: float, tag: object = None
    ) -> Work[Any] | None:
        context, calls = self._context, self._calls
        if call.op not in SHARE_FIRST or context.size == 1 or not self._may_begin(call, args):
            return None
        if not is_free(context, tag):
            return None
        text, key = call.text.encode(), (tag, calls.tags.upcoming(tag))
        plan = share_over_links(context, first=True, of_one=SHARE_FIRST[call.op]).plan
        known = self._known.of(context, text, plan)
        # After this, the ordinary way cannot start the call, because a program may keep its
        # arguments and is started only once.
        if not known.frames.begin(key):
            return None
        work: Work[Any] = Work.begin(self._loop, call.op, *key, call.nbytes)
        program, executor = call.start(False), None
        try:
            phase = next(program)
            if isinstance(phase, Phase) and isinstance(phase.memory, Blobs):
                memory = phase.memory
                lengths = known.lengths.get(len(memory.blobs[context.rank]), ())
                memory.expect(lengths)
                known.frames.memory = memory
                executor = Executor(phase, known.frames)
                if not executor.run() or not calls.arrivals.is_quiet(key):
                    rest = learning(known, memory, context.rank, program)
                    calls.take_over(work, text, executor, rest, seconds)
                    return work
                phase = next(program)
                # Over links, a phase may concern only other ranks. Skip it.
                while isinstance(phase, Phase) and not phase.prepared.plan.steps:
                    phase = next(program)
            rest = before(phase, program)
        except StopIteration as stop:
            if not isinstance(stop.value, NoResult):
                if executor is not None:
                    executor.close()
                self._finish(work, call.op, text, call.nbytes, stop.value)
                return work
            rest = returning(stop.value)
        except Exception as error:
            if executor is not None:
                executor.close()
            calls.take_over(work, text, None, failing(error), seconds)
            return work
        finally:
            known.frames.memory = None
        calls.take_over(work, text, executor, rest, seconds)
        return work


def learning(known: Known, memory: Blobs, rank: int, program: Program) -> Program:
    """Run the rest of `program` the ordinary way, and learn the blob lengths of all ranks.

    `rank` is this rank.
    """
    result = yield from program
    lengths = [*map(len, memory.blobs)]
    if len(known.lengths) >= KEPT_LENGTHS:
        known.lengths.clear()
    known.lengths[lengths[rank]] = lengths
    return result
