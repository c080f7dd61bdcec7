"""Prepared reductions of ranks that share memory: all_reduce, reduce, reduce_scatter and scan.

A reduction is one phase on two vectors, for the input and the result, or on one vector that is
both. The choice of the phase depends on dtype, lengths and operator alone. So the recipe keeps it,
and each call lends it its arrays. A list of arrays is joined into one, reduced in place, and copied
back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from aiodist.buffers.descriptions import KnownCall, described, word
from aiodist.buffers.reductions import DtypeGroup, split_slots
from aiodist.buffers.vector import Vector
from aiodist.collectives.forms import Form, placing
from aiodist.engine.executor import Executor, all_at_once, area_of, in_steps
from aiodist.engine.operation import Program
from aiodist.engine.phase import Phase
from aiodist.phases import pulls
from aiodist.phases.base import Call
from aiodist.prepared.express import ExpressGroup, Flat, Recipe, rest_of, written
from aiodist.prepared.joined import SMALL_LISTS, JoinedCalls, Makes, given_by, slots_of
from aiodist.schedules.selection import EAGER_LIMIT
from aiodist.shared_memory.board import LEAST_IN_ROUND
from aiodist.shared_memory.lane import Lane

OPS = frozenset({"all_reduce", "reduce", "reduce_scatter"})
ONE_ROUND = 2
"""The most publishes of a plan whose views of shared memory are kept.

These are the plans for up to 1.5 MiB, or 4 MiB if there are more ranks than cores.
"""


class LaneRecipe(Recipe):
    """A recipe of ranks that share memory."""

    __slots__ = ("at_once", "fused", "given", "inputs", "makes", "out")

    def __init__(
        self,
        op: str,
        call: bytes,
        phase: Phase,
        vector: Vector,
        keeps: object,
        out: Vector | None = None,
    ) -> None:
        """`out`: the result goes there; None: to `vector`."""
        super().__init__(op, call, phase, vector, keeps)
        self.out = out
        if out is not None:
            self.phase = self.phase._replace(lent=(vector, out))
            out.lend(None)
        # Makes a function that does the phase in one area in one go; None: there is none.
        self.fused: Callable[[Phase, Lane, int], Callable[[Any], int]] | None = None
        if phase.whole:
            self.fused = all_at_once
        elif phase.prepared.plan.publishes <= ONE_ROUND:
            self.fused = in_steps
        # What `fused` has made, by area.
        self.at_once: dict[int, Callable[[Any], int]] = {}
        self.makes: Makes | None = None  # makes a new array for the result
        self.given: int | None = 0  # the argument for the result; None: none
        self.inputs = 1  # how many arrays are the input
        self.unformed = 1

    def lay_out(
        self, args: tuple[Any, ...], flats: list[Flat], words: list[Any]
    ) -> tuple[Any, Any] | None:
        if self.joined is not None:
            return self.joined.lay_out(args, flats, words)
        flat = np.concatenate(flats[: self.inputs]) if self.inputs > 1 else flats[0]
        if self.makes is not None:
            value, out = self.makes()
            return value, (flat, out)
        result: Any = None if self.given is None else args[self.given]
        if self.out is None:
            return result, flat
        out = flats[-1]
        # If the result would overwrite input, the ordinary way makes a copy first.
        return None if np.may_share_memory(flat, out) else (result, (flat, out))

    def known(self, args: tuple[Any, ...]) -> KnownCall | None:
        return None if self.makes is not None else known(args, self.given)

    def form(self, args: tuple[Any, ...]) -> Form | None:
        x, *how, out = args
        matches, takes = placing(x), None if out is None else placing(out)
        if matches is None or (takes is None and out is not None):
            return None
        (p, q, *_), cls = (*how, None), type(x)
        makes, returns = self.makes, self.given is not None

        def lay(
            args: tuple[Any, ...], x: Any = None, a: Any = None, b: Any = None, c: Any = None
        ) -> tuple[Any, Any] | None:
            # `out` comes after these arguments.
            if type(x) is not cls or a is not p or (q is not None and b is not q):
                return None
            if not matches(x, []):
                return None
            flat, given = x.reshape(-1), args[-1]
            if takes is not None:
                if not takes(given, []):
                    return None
                out = given.reshape(-1)
                return None if np.may_share_memory(flat, out) else (given, (flat, out))
            if given is not None:
                return None
            if makes is None:
                return x if returns else None, flat
            result, out = makes()
            return result, (flat, out)

        return lay

    def shown(self, flat: Any) -> Flat:
        """Return the input of a call."""
        shown: Flat = flat if self.out is None else flat[0]
        return shown

    def executor(self, flat: Any, lane: Lane, area: int, place: int = 0, done: int = 0) -> Executor:
        """Return the executor of a call with `flat`, whose first steps are `done`."""
        self.lend(flat)
        return Executor(self.phase, None, lane, area, place, done)

    def lend(self, flat: Any) -> None:
        """Lend the memory of one call to the phase."""
        if self.out is None:
            self.vector.lend(flat)
        else:
            x, out = flat
            self.vector.lend(x)
            self.out.lend(out)

    def resume(
        self, x: Any, flat: Any, lane: Lane, area: int, done: int
    ) -> tuple[Executor, Program]:
        """Return the executor and the rest of a call that has to wait."""
        if (self.phase.shared or 0) >= LEAST_IN_ROUND:
            area = area_of(self.phase, lane, lane.seq, 0)
        return self.executor(flat, lane, area, 0, done), rest_of(self, x)

    def keep(self, flat: Any) -> Any:
        """Return what a call that waits for its turn keeps of `flat`."""
        return flat

    def program(self, x: Any, flat: Any) -> Program:
        """Return the whole program of a call that has done nothing yet."""
        self.lend(flat)  # only in its turn, because other calls use the phase before
        yield self.phase
        return (yield from rest_of(self, x))


def known(args: tuple[Any, ...], given: int | None) -> KnownCall | None:
    """Describe a reduction of one array to the compiled part. `given`: see `joined.given_by`.

    None: Python does such calls.
    """
    x, *how, out = args
    if type(x) in (list, tuple) or type(out) in (list, tuple):
        return None
    into = described(out, is_place=out is not None)
    if (part := described(x, is_place=True)) is None or into is None:
        return None
    return KnownCall([part, *map(word, how), into], -1 if given is None else given, is_apart=True)


def learn(
    context: ExpressGroup, op: str, make: Callable[..., Call], args: tuple[Any, ...]
) -> LaneRecipe | None:
    """Make the recipe of one of `OPS`, or of a scan, of arrays. None: it cannot be prepared."""
    found = learn_of(context, op, make, args)
    return None if found is None else found[0]


def learn_of(
    context: ExpressGroup, op: str, make: Callable[..., Call], args: tuple[Any, ...]
) -> tuple[LaneRecipe, DtypeGroup] | None:
    """Return the recipe of `learn`, and the arrays to reduce."""
    try:
        call = make(context, *args)
        return _learn(context, op, call, args)
    except (TypeError, ValueError, OverflowError):
        return None  # the ordinary way raises it again


def _learn(
    context: ExpressGroup, op: str, call: Call, args: tuple[Any, ...]
) -> tuple[LaneRecipe, DtypeGroup] | None:
    x, *more, how, out = args
    listed, scatters = isinstance(x, (list, tuple)), op == "reduce_scatter"
    if listed and call.nbytes > SMALL_LISTS:
        return None
    parts = split_slots(x, context.size) if scatters else [*x] if listed else [x]
    slots = slots_of(parts, context.rank if scatters else 0, how)
    if slots is None:
        return None
    kernel, bounds, _, keeps = slots
    start, stop = bounds[context.rank : context.rank + 2] if scatters else (0, bounds[-1])
    vector = result = Vector.of(np.empty(bounds[-1], kernel.dtype))
    if scatters or (out is not None and not listed):
        result = Vector.of(np.empty(stop - start, kernel.dtype))
    group = DtypeGroup(kernel.name, kernel, vector, result, bounds if scatters else [0, stop])
    if scatters:
        phase = pulls.reduce_scatter(context, group)
    elif op == "all_reduce":
        phase = pulls.all_reduce(context, group)
    elif op == "scan":
        if not pulls.can_scan(group):
            return None
        phase = pulls.scan(context, group, False)
    else:
        phase = pulls.reduce(context, group, more[0])
    if listed or call.nbytes <= EAGER_LIMIT or not scatters:
        # Stage it, even if other ranks could read it in place.
        phase = phase._replace(direct=None)
    recipe = LaneRecipe(
        op, call.text.encode(), phase, vector, keeps, None if result is vector else result
    )
    recipe.inputs = len(parts) if listed else 1
    recipe.given = given_by(op, context.rank, args)
    if scatters and out is None:
        recipe.makes = slots.maker()
    elif listed and not scatters:
        recipe.join(JoinedCalls(call, slots, recipe.given))
    elif recipe.given is not None:
        recipe.finish = written
    return recipe, group
