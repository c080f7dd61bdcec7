"""Large all_reduces with a tag, prepared: the ranks meet by posts, and the rest is on berths.

What is posted says which berth a rank offers (`aiodist.shared_memory.berths`), where it shows its
array already: so the post is the first publish as well. Where all have posted, the berths are a
lane of its own, and what is done there is what is done with such an array on the lane of the group,
in one go if nothing has to be waited for long.

A call that goes on as an operation before all have posted begins with the steps of its plan anew,
once they have. What it copies to its berth then is what lies there, byte for byte, so it is no
matter who reads it meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from aiodist.buffers.reductions import Group
from aiodist.buffers.vector import Vector
from aiodist.collectives.express import ExpressGroup, Flat, Recipe, failing, rest_of
from aiodist.collectives.posted import KEPT_TAGS, Begin, Data, Otherwise, Posted
from aiodist.collectives.reductions import all_reduce_where
from aiodist.collectives.templates import LENGTH
from aiodist.engine.executor import ALL, Executor, Parts, area_for, in_parts
from aiodist.engine.operation import Program
from aiodist.engine.phase import Phase
from aiodist.errors import ProtocolError
from aiodist.phases import berths, pulls
from aiodist.phases.base import share_over_links
from aiodist.phases.memories import Blobs
from aiodist.shared_memory.berths import Berth, Berths
from aiodist.shared_memory.posts import prefixes
from aiodist.types import ReduceOp
from aiodist.wire.frames import pack_fields

SHOWN = LENGTH + berths.LENGTH
"""Bytes of a post."""
_HEAD = berths.LENGTH.to_bytes(LENGTH, "big")  # it looks like a frame of blobs


class BerthRecipe(Recipe):
    """A recipe of an all_reduce that has berths. What is posted is a `BerthedCall` of it."""

    in_one_go = None
    __slots__ = ("_begins", "_parts", "context", "group", "lengths", "offers")

    def __init__(
        self,
        context: ExpressGroup,
        offers: Berths,
        call: bytes,
        phase: Phase,
        group: Group,
        op: ReduceOp,
    ) -> None:
        super().__init__("all_reduce", call, phase, group.x, op)
        self.context = context
        self.offers = offers
        self.group = group
        self.lengths = [SHOWN] * context.size
        self._begins: dict[object, Begin] = {}  # by tag
        # By berth of this rank and area: the others' berths, and what does it there.
        self._parts: dict[tuple[int, int], tuple[Sequence[int], Parts]] = {}

    def prefixes(self, tag: object, number: int) -> Sequence[bytes]:
        begin = self._begins.get(tag)
        if begin is None:
            if len(self._begins) == KEPT_TAGS:
                self._begins.clear()
            begin = self._begins[tag] = prefixes(pack_fields(tag, self.call), SHOWN)
        return (begin(number),) * len(self.lengths)

    def parts(self, berth: Berth, area: int) -> Parts:
        """What does it on `berth`."""
        found = self._parts.get((berth.index, area))
        if found is None or found[0] != berth.along:
            found = self._parts[berth.index, area] = (
                berth.along,
                in_parts(self.phase, berth, area),
            )
        return found[1]

    def of(self, flat: Flat) -> Group:
        """What is reduced, of one call."""
        vector = Vector.of(flat)
        return replace(self.group, x=vector, out=vector)


class BerthedCall(Posted):
    """One call of such a recipe."""

    __slots__ = ("_area", "_offer", "_place", "_recipe", "call", "lengths", "nbytes", "op")

    def __init__(self, recipe: BerthRecipe, number: int, flat: Flat) -> None:
        phase = recipe.phase
        self._recipe = recipe
        self._area = area_for(phase.shared or 0, number, 0)
        # Where the array lies in memory that all see, if it does.
        self._place = 0 if phase.direct is None else recipe.context.heap.place_of((flat,))
        self._offer = recipe.offers.offer(number)
        if self._offer is not None and not self._place:
            self._offer.show(lambda berth: recipe.parts(berth, self._area).show(flat))
        self.op, self.call, self.nbytes = recipe.op, recipe.call, recipe.nbytes
        self.lengths = recipe.lengths

    def shown(self, given: Flat) -> Data:
        return _HEAD + berths.words_of(self._offer)

    def prefixes(self, tag: object, number: int) -> Sequence[bytes]:
        return self._recipe.prefixes(tag, number)

    def fits(self, nbytes: int) -> bool:
        return nbytes == SHOWN

    def result(self, values: Sequence[Data], x: Any, given: Flat) -> Any:
        recipe, offer = self._recipe, self._offer
        try:
            offers = berths.read([value[LENGTH:] for value in values])
        except ProtocolError:
            offers = None  # and the ordinary way finds it, too, and says whose it is
        if offer is None or offers is None:
            return self.begun(x, given)
        place = self._place
        berth = offer.moor(offers, place, within=True)
        executor = None
        try:
            if place:
                executor = self._executor(given, berth, 0)
                done = ALL if executor.run() else 0
            else:
                _, run, rest, shown = recipe.parts(berth, self._area)
                berth.publish()
                done = run(given, shown if all(each.shows for each in offers) else rest)
                if done != ALL:
                    executor = self._executor(given, berth, done)
        except Exception as error:
            return Otherwise(None, failing(error), berth)
        if done != ALL:
            return Otherwise(executor, rest_of(recipe, x), berth)
        if executor is not None:
            executor.close()
        berth.finish_inline()
        return x if recipe.finish is None else recipe.finish(x)

    def _executor(self, flat: Flat, berth: Berth, done: int) -> Executor:
        # Of its own, for of calls with one recipe many may be under way.
        phase = pulls.all_reduce(self._recipe.context, self._recipe.of(flat))
        return Executor(phase, None, berth, self._area, self._place, done)

    def begun(self, x: Any, given: Flat) -> Otherwise:
        recipe, offer = self._recipe, self._offer
        context = recipe.context
        memory = Blobs(context.rank, context.size, berths.words_of(offer))
        phase = Phase(share_over_links(context, first=True), memory)

        def rest() -> Program:
            on_lane = yield from berths.met(offer, memory.blobs)
            yield from all_reduce_where(context, [recipe.of(given)], on_lane)
            return (yield from rest_of(recipe, x))

        return Otherwise(Executor(phase, None, done=context.size - 1), rest())
