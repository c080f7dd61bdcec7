"""Reductions of several arrays, prepared: the arrays are joined into one.

To check and cut each array again takes many times as long as to copy a small one. So a call copies
its arrays into one, reduces that, and copies the result to its places. Other ranks cannot tell,
because the plan, the frames and the bytes in shared memory depend on the total length alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from aiodist.buffers import arrays, overlaps
from aiodist.buffers.arrays import Flat
from aiodist.buffers.dtypes import carrier
from aiodist.buffers.kernels import Kernel
from aiodist.buffers.reductions import DtypeGroup
from aiodist.buffers.vector import Vector
from aiodist.phases.base import Call, Place
from aiodist.types import ReduceOp

SMALL_LISTS = 2 * 1024 * 1024
"""The most bytes of a list of arrays that is prepared.

Its arrays are copied to be joined, which takes too long for larger ones.
"""
SMALL_ARRAYS = 64 * 1024
"""The most bytes, on average, of arrays that are joined for an operation.

To copy a larger one there and back takes as long as to check it.
"""

OPS = frozenset({"all_reduce", "reduce", "scan", "exscan"})

Makes = Callable[[], tuple[Any, Flat]]
"""Makes an array, and returns it with its memory."""


class Slots(NamedTuple):
    """Arrays that are reduced together.

    `bounds` says where each begins and ends. `like` is that of this rank. `keeps`: see `Recipe`.
    """

    kernel: Kernel
    bounds: list[int]
    like: arrays.UserArray
    keeps: object

    def maker(self) -> Makes:
        """Return a function that makes arrays like that of this rank."""
        kind, name, shape = self.like.kind, self.like.name, self.like.shape
        if kind != "torch":  # numpy needs one call
            dtype, is_flat = carrier(name), len(shape) == 1

            def new() -> tuple[Any, Flat]:
                made = np.empty(shape, dtype)
                return made, made if is_flat else made.reshape(-1)

            return new

        def empty() -> tuple[Any, Flat]:
            made = arrays.empty(kind, name, shape, "xs")
            return made.value, made.read()

        return empty


def slots_of(parts: list[Any], own: int, op: Any) -> Slots | None:
    """Return `parts` as slots, of which this rank has the one at `own`. None: they do not fit."""
    if not parts:  # the ordinary way reduces an empty list
        return None
    views = [arrays.view(part, "xs") for part in parts]
    mine = views[own]
    if mine is None or not isinstance(op, ReduceOp):
        return None
    bounds = [0]
    for view in views:
        if view is None or not (view.is_flat and view.base.size and view.name == mine.name):
            return None
        bounds.append(bounds[-1] + view.base.size)
    return Slots(Kernel.of(op, mine.name), bounds, mine, op)


def given_by(op: str, rank: int, args: tuple[Any, ...]) -> int | None:
    """Return the number of the argument that is the result. None: this rank has no result."""
    if op == "reduce" and rank != args[1]:
        return None
    return 0 if args[-1] is None else len(args) - 1


class JoinedCalls:
    """How the arrays of calls of one kind are joined, and where their result goes."""

    __slots__ = (
        "_apart", "_given", "_inputs", "_keeps", "_kernel", "_length", "_like", "op", "text",
    )  # fmt: skip

    def __init__(self, call: Call, slots: Slots, given: int | None) -> None:
        """`call`: one of these calls. `given`: see `given_by`."""
        self.op, self.text = call.op, call.text
        self._kernel = slots.kernel
        self._keeps = slots.keeps
        self._length = slots.bounds[-1]
        self._like = slots.like.kind, slots.like.name
        self._given = given
        self._inputs = len(slots.bounds) - 1  # how many arrays are the input
        self._apart = overlaps.Apart()  # checks whether the places share memory

    @property
    def returns(self) -> bool:
        """Whether this rank has a result."""
        return self._given is not None

    @property
    def are_small(self) -> bool:
        """Whether these are arrays that are worth joining for an operation."""
        nbytes = self._length * self._kernel.dtype.itemsize
        return self._inputs > 1 and nbytes <= self._inputs * SMALL_ARRAYS

    def group(self) -> DtypeGroup:
        """Return a group for one array that is joined, in place."""
        kernel, length = self._kernel, self._length
        vector = Vector.of(np.empty(length, kernel.dtype))
        return DtypeGroup(kernel.name, kernel, vector, vector, [0, length])

    def lay_out(
        self, args: tuple[Any, ...], flats: list[Flat], words: list[Any]
    ) -> tuple[Any, Any] | None:
        """See `Recipe.lay_out`."""
        inputs = flats[: self._inputs]
        # A single array that gets the result is reduced in place.
        in_place = len(flats) == 1 and self._given is not None
        flat = inputs[0] if in_place else np.concatenate(inputs)
        if self._given is None:
            return None, flat
        result, places = args[self._given], flats[self._inputs :] or inputs
        # If two places share memory, the ordinary way refuses the call.
        if len(places) > 1 and not self._apart.are(result, places):
            return None
        return (result, flat, places), flat

    def array(self, flat: Flat) -> Any:
        """Return joined arrays as one array of the user's dtype."""
        kind, name = self._like
        return arrays.over(flat.view(np.uint8), kind, name, flat.shape)


def learn(
    place: Place, op: str, make: Callable[..., Call], args: tuple[Any, ...]
) -> JoinedCalls | None:
    """Say how the arrays of calls like this one are joined. None: they are not."""
    if op not in OPS:
        return None
    x, *_, how, _ = args
    try:
        call = make(place, *args)
        parts = [*x] if isinstance(x, (list, tuple)) else [x]
        slots = slots_of(parts, 0, how) if call.nbytes <= SMALL_LISTS else None
    except (TypeError, ValueError, OverflowError):
        return None  # the ordinary way raises it again
    return None if slots is None else JoinedCalls(call, slots, given_by(op, place.rank, args))
