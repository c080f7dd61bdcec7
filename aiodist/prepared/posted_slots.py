"""A reduce_scatter that is posted: each rank shows what others need, and reduces its own slot.

Two ranks need one slot of each other, so each shows the slot of the other. If there are more ranks,
each shows all its slots (see `reductions.shown_by`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import numpy as np

from aiodist.buffers.descriptions import KnownCall
from aiodist.buffers.reductions import split_slots
from aiodist.buffers.vector import Vector
from aiodist.collectives.forms import Form, placing
from aiodist.collectives.reductions import LEAD, shown_by, shows_slots
from aiodist.collectives.templates import LENGTH
from aiodist.engine.executor import Executor
from aiodist.engine.phase import Phase
from aiodist.links.moved import Moved
from aiodist.phases.base import Call
from aiodist.prepared import lane_reductions
from aiodist.prepared.express import ExpressGroup, Flat, written
from aiodist.prepared.joined import Slots, slots_of
from aiodist.prepared.posted import (
    Begin,
    Data,
    InOneGo,
    Otherwise,
    PostRecipe,
)
from aiodist.prepared.taking import kept
from aiodist.prepared.tapes import ReducedParts
from aiodist.shared_memory.posts import HEAD, Posts, Reader, padded, prefixes
from aiodist.wire.frames import pack_fields


class SlotsGiven(NamedTuple):
    """All slots of this rank, the place for the result, and the arguments of the call."""

    flat: Flat
    out: Flat
    args: tuple[Any, ...]


class PostedSlots(PostRecipe):
    """A recipe of a reduce_scatter of arrays, in which all ranks show equally many bytes."""

    __slots__ = ("_context", "_make", "_makes", "_own", "_shown", "first", "parts")

    def __init__(
        self,
        context: ExpressGroup,
        call: Call,
        phase: Phase,
        make: Callable[..., Call],
        slots: Slots,
    ) -> None:
        vector = Vector.of(np.empty(slots.bounds[-1], slots.kernel.dtype))
        super().__init__(call.op, call.text.encode(), phase, vector, slots.keeps, slots.kernel)
        self.finish = written
        own = start, stop = slots.bounds[self._rank], slots.bounds[self._rank + 1]
        self._plain = slots.kernel.plain(stop - start)
        self._context = context
        self._make = make  # makes the call again, for the ordinary way
        self._makes = slots.maker()
        self.unformed = 1
        self._own = slice(*own)
        self._shown = slice(*shown_by(self._rank, slots.bounds))
        # A post looks like a frame of blobs: see `phases.memories.Blobs`.
        nbytes = len(LEAD) + (self._shown.stop - self._shown.start) * self.dtype.itemsize
        self.first = nbytes.to_bytes(LENGTH, "big") + LEAD
        self.lengths = [LENGTH + nbytes] * self._size
        shown = [shown_by(rank, slots.bounds)[0] for rank in range(self._size)]
        begins = [len(self.first) + (start - first) * self.dtype.itemsize for first in shown]
        begins[self._rank] = start * self.dtype.itemsize
        self.parts = ReducedParts(stop - start, self._shown.start * self.dtype.itemsize, begins)

    def lay_out(
        self, args: tuple[Any, ...], flats: list[Flat], words: list[Any]
    ) -> tuple[Any, Any] | None:
        if args[-1] is None:
            value, out = self._makes()
        else:
            value, out = args[-1], flats.pop()
            if any(np.may_share_memory(out, flat) for flat in flats):
                return None  # the ordinary way makes a copy first
        flat = flats[0] if len(flats) == 1 else np.concatenate(flats)
        return value, SlotsGiven(flat, out, args)

    def known(self, args: tuple[Any, ...]) -> KnownCall | None:
        # Without `out`, the result is a new array, and the compiled part makes none.
        return None if args[-1] is None else lane_reductions.known(args, len(args) - 1)

    def form(self, args: tuple[Any, ...]) -> Form | None:
        xs, op, place = args
        matches = placing(xs)
        if matches is None or place is not None:
            return None
        makes = self._makes

        def lay(
            args: tuple[Any, ...], x: Any = None, a: Any = None, out: Any = None
        ) -> tuple[Any, Any] | None:
            if a is op and out is None and matches(x, []):
                value, out = makes()
                return value, SlotsGiven(x.reshape(-1), out, args)
            return None

        return lay

    def keep(self, given: SlotsGiven) -> SlotsGiven:
        return given._replace(args=tuple(map(kept, given.args)))

    def shown(self, given: SlotsGiven) -> Data:
        return self.first + self.numbers(given)

    def numbers(self, given: SlotsGiven) -> memoryview:
        """Return the numbers that this rank shows."""
        shown: memoryview = given.flat[self._shown].view(np.uint8).data
        return shown

    def _begin(self, tag: object) -> Begin:
        """Return what makes the bytes before the numbers in a post."""
        return prefixes(pack_fields(tag, self.call), self.lengths[0], self.first)

    def prefixes(self, tag: object, number: int) -> Sequence[bytes]:
        return (self.begins[tag](number)[: -len(self.first)],) * self._size

    def result(self, values: Sequence[Data], x: Any, given: SlotsGiven) -> Any:
        if any(bytes(value[: len(self.first)]) != self.first for value in values):
            return self.begun(x, given)  # the operation finds the error, too, and names the rank
        slots, (count, _, begins) = [given.flat] * self._size, self.parts
        for rank, value in enumerate(values):
            if rank != self._rank:
                slots[rank] = np.frombuffer(value, self.dtype, count, begins[rank])
        self.reduce_slots(slots, given)
        return written(x)

    def reduce_slots(self, slots: list[Flat], given: SlotsGiven) -> None:
        """Reduce `slots`, this rank's slot of each other rank."""
        slots[self._rank] = given.flat[self._own]
        self.reduce(slots, given.out)

    def begun(self, x: Any, given: SlotsGiven) -> Otherwise:
        program = self._make(self._context, *given.args).start(False)
        return Otherwise(Executor(cast(Phase, next(program)), None, done=self._size - 1), program)


def learn(
    context: ExpressGroup, call: Call, make: Callable[..., Call], xs: Any, op: Any, out: Any
) -> PostedSlots | None:
    """Make the recipe of a reduce_scatter. None: it is not posted."""
    slots = slots_of(split_slots(xs, context.size), context.rank, op)
    if slots is None or not shows_slots(context, slots.kernel, slots.bounds):
        return None
    program = call.start(False)
    phase = next(program)
    program.close()
    assert isinstance(phase, Phase)
    return PostedSlots(context, call, phase, make, slots)


def slots_in_one_go(
    recipe: PostedSlots,
    posts: Posts,
    wake: Callable[[list[int]], bool],
    comes: Callable[[Reader], bool],
    moved: Moved,
) -> InOneGo:
    """Return a function that does a whole reduce_scatter within its call: see
    `posted.in_one_go`."""
    dtype, length, (count, _, begins) = recipe.dtype, recipe.lengths[0], recipe.parts

    def run(tag: object, number: int, x: Any, given: SlotsGiven) -> bool | None:
        head = recipe.begins[tag](number)
        whole = len(head) - len(recipe.first) + padded(length)
        if posts.put_parts(head, (recipe.numbers(given),), whole) < 0:
            return None
        woken = posts.tell()
        if woken and not wake(woken):
            return False
        slots, passes = [given.flat] * len(begins), [(each, each.taken) for each in posts.readers]
        for reader in posts.readers:
            if reader.words[HEAD] == reader.taken and not comes(reader):
                return False
            at, ring = reader.next_at(), reader.ring
            if ring[at : at + len(head)].tobytes() != head or at + whole > len(ring):
                return False
            data = at + len(head) - len(recipe.first) + begins[reader.rank]
            slots[reader.rank] = np.ndarray((count,), dtype, ring, data)
        try:
            recipe.reduce_slots(slots, given)
            written(x)
        finally:
            for reader, taken in passes:
                reader.passed_by(whole, taken)
        moved.add(length, length * len(posts.readers))
        return True

    return run
