"""All-reduce of small arrays within the call, for ranks that are joined by sockets.

What travels are the frames of `recursive_doubling.all_reduce`, byte for byte those of an ordinary
operation, so that nobody can tell. Kept are the prefixes of these frames, but for the number of the
call, and the memory that they are received in. Of what comes, nothing but the expected bytes counts
in here. Everything else goes the ordinary way, and so does the call from there on: as an operation
the first steps of whose plan are done.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from aiodist.buffers import tensors
from aiodist.buffers.kernels import Kernel
from aiodist.buffers.vector import Vector
from aiodist.collectives.express import Express, ExpressGroup, Flat
from aiodist.engine.arrivals import Arrivals
from aiodist.engine.operation import Phase, Program, Start, prepared
from aiodist.links.progress import cores
from aiodist.phases.memories import SmallReductions
from aiodist.schedules import recursive_doubling
from aiodist.schedules.choose_reductions import goes_whole
from aiodist.schedules.plan import OUT, TMP, Copy, Recv, Reduce, Send, Step
from aiodist.transports.base import Link
from aiodist.transports.stream import StreamLink
from aiodist.types import ReduceOp
from aiodist.wire import kinds
from aiodist.wire.frames import Stencil
from aiodist.work import Work

_GIVE, _GIVE_RESULT, _COMBINE, _COMBINE_FIRST, _TAKE_RESULT, _STORE = range(6)
Instruction = tuple[int, int, int, int]
"""What to do; with which of the peers; the number of the step of the plan; and which cell of TMP
the partial result of this rank is in when that step begins."""


class LinkGroup(ExpressGroup, Protocol):
    """A group whose ranks are joined by links, and whose collectives are done within the call."""

    id: bytes
    arrivals: Arrivals

    @property
    def is_idle(self) -> bool:
        """Whether nothing is pending, nothing was given up early, and nobody is lost."""
        ...

    def link(self, peer: int) -> Link | None:
        """Returns the link to rank `peer`, if there is one."""
        ...

    def carry_on(
        self, work: Work[Any], call: bytes, start: Start, done: Sequence[Step], seconds: float
    ) -> None:
        """Goes on, as an operation that `start` starts, with a collective the first steps of whose
        plan are `done`. It may take `seconds`."""
        ...


class Recipe:
    """What is the same in all calls of one all-reduce with one operator, dtype and shape."""

    __slots__ = (
        "call", "combine", "instructions", "kernel", "length", "nbytes", "op", "partial", "peers",
        "prepared", "result", "stencils", "weight",
    )  # fmt: skip

    def __init__(
        self, context: LinkGroup, call: bytes, kernel: Kernel, op: ReduceOp, length: int
    ) -> None:
        self.call = call
        self.kernel = kernel
        self.combine = kernel.plain(length)  # None: partial results are not what is stored
        self.op = op  # kept alive: recipes are found by its identity
        self.length = length
        self.nbytes = length * kernel.dtype.itemsize
        self.partial = _inbox(length, kernel.wire_dtype)
        self.result = _inbox(length, kernel.dtype)
        # No two ranks send each other more than one frame: slot 0.
        self.stencils = [
            Stencil((kinds.MESSAGE, context.id, None), (0, call), len(view))
            for view in (self.partial[1], self.result[1])
        ]
        self.prepared = prepared(recursive_doubling.all_reduce, context.rank, context.size)
        steps = self.prepared.plan.steps
        self.peers = sorted({step.peer for step in steps if isinstance(step, Send)})
        self.instructions = self._compiled(steps)
        self.weight = len(steps)

    def _compiled(self, steps: tuple[Step, ...]) -> list[Instruction]:
        made: list[Instruction] = []
        cell = 0
        for number, step in enumerate(steps):
            if isinstance(step, Send):
                code = _GIVE if step.spans[0].buffer == TMP else _GIVE_RESULT
                made.append((code, self.peers.index(step.peer), number, cell))
            elif isinstance(step, Recv):
                (span,) = step.spans
                code = _TAKE_RESULT
                if span.buffer == TMP:  # and is reduced next
                    reduction = steps[number + 1]
                    assert isinstance(reduction, Reduce)
                    code = _COMBINE_FIRST if reduction.operands[0] == span else _COMBINE
                made.append((code, self.peers.index(step.peer), number, cell))
            elif isinstance(step, Reduce):
                cell = step.into.start
                if step.into.buffer == OUT and self.combine is None:
                    made.append((_STORE, -1, number, cell))
            else:
                assert isinstance(step, Copy)
        return made


def _inbox(length: int, dtype: np.dtype[Any]) -> tuple[Flat, memoryview]:
    """Memory to receive in, and its bytes."""
    array = np.empty(length, dtype)
    return array, array.view(np.uint8).data


class LinkExpress(Express[LinkGroup, Recipe]):
    """The recipes of one group whose ranks are joined by links."""

    def __init__(self, context: LinkGroup) -> None:
        super().__init__(context)
        self._crowded = context.size > cores()

    def _make(self, call: bytes, kernel: Kernel, op: ReduceOp, length: int) -> Recipe | None:
        context = self._context
        size = length * kernel.wire_dtype.itemsize
        if context.size == 1 or not length:
            return None
        if not goes_whole(size, context.size, kernel.sliceable):
            return None
        return Recipe(context, call, kernel, op, length)

    def _run(self, recipe: Recipe, x: Any, flat: Flat, seconds: float) -> Work[Any] | None:
        context = self._context
        if context.arrivals.early:
            # If a peer has given it up already, its word may have arrived, behind its contribution.
            context.endpoint.poll()
        if not context.is_idle:
            return None
        links: list[StreamLink] = []
        for peer in recipe.peers:
            link = context.link(peer)
            if type(link) is not StreamLink or not link.is_clear:
                return None
            links.append(link)
        seq = context.tags.upcoming(None)
        partial, result = [stencil.fill(seq) for stencil in recipe.stencils]
        kernel, combine = recipe.kernel, recipe.combine
        total = flat if combine is not None else kernel.load(flat)
        for code, at, step, cell in recipe.instructions:
            if code == _GIVE:
                links[at].send_copy(partial, total.data)
            elif code in (_COMBINE, _COMBINE_FIRST):
                other, view = recipe.partial
                if not self._come(recipe, seq, at, links[at], partial, view):
                    return self._go_on(recipe, x, flat, seconds, step, cell, total)
                a, b = (total, other) if code == _COMBINE else (other, total)
                if combine is None:
                    kernel.combine(total, a, b)
                else:
                    self._quietly(combine, a, b, out=total)
            elif code == _STORE:
                kernel.store(total, flat, context.size)
            elif code == _GIVE_RESULT:
                links[at].send_copy(result, flat.data)
            else:
                other, view = recipe.result
                if not self._come(recipe, seq, at, links[at], result, view):
                    return self._go_on(recipe, x, flat, seconds, step, cell, total)
                flat[:] = other
        if not context.arrivals.is_quiet((None, seq)):  # given up by another rank, most likely
            steps = len(recipe.prepared.plan.steps)
            return self._go_on(recipe, x, flat, seconds, steps, 0, total)
        work: Work[Any] = Work.begin(self._loop, "all_reduce", None, seq, recipe.nbytes)
        self._done(work, seq, recipe, x)
        return work

    def _come(
        self, recipe: Recipe, seq: int, at: int, link: StreamLink, prefix: bytes, into: memoryview
    ) -> bool:
        """Whether the frame that is due from a peer has come, for its payload is `into` then."""
        context = self._context
        if context.arrivals.early and context.arrivals.take_early(
            (None, seq), recipe.peers[at], recipe.call, into
        ):
            return True
        return self._progress.look(link, prefix, into, crowded=self._crowded) is True

    def _go_on(
        self, recipe: Recipe, x: Any, flat: Flat, seconds: float, done: int, cell: int, total: Flat
    ) -> Work[Any]:
        """Make it an operation, which goes on with step `done`, the partial result in `cell`."""
        context = self._context
        vector = Vector.of(flat)
        memory = SmallReductions([(recipe.kernel, vector, vector)], context.size)
        memory.hold(cell, [total])

        def program(_: bool) -> Program:
            yield Phase(recipe.prepared, memory, done=done)
            if type(x) is not np.ndarray:
                tensors.mark_written(x)
            return x

        work: Work[Any] = Work.begin(self._loop, "all_reduce", None, None, recipe.nbytes)
        context.carry_on(work, recipe.call, program, recipe.prepared.plan.steps[:done], seconds)
        return work
