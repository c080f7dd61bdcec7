"""Large reductions with a tag, prepared: ranks meet by posts, and reduce on berths.

Each rank posts which berth it offers (`aiodist.shared_memory.berths`). When all ranks have posted,
the offered berths form a lane for this one operation. There it runs like a reduction on the group's
lane: within the call, if no wait takes long.

If the plan publishes once or twice, the recipe keeps its views of shared memory. Then the rank
writes its first data before it posts, so that the post counts as the first publish, too.

A call may become an operation before all have posted. After the last post, it then begins the steps
of its plan anew. It copies the same bytes to the same berth again, so other ranks may read them
meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from aiodist.buffers.reductions import DtypeGroup
from aiodist.buffers.vector import Vector
from aiodist.collectives.forms import Form
from aiodist.collectives.reductions import (
    all_reduce_where,
    goes_on_berths,
    has_berths,
    reduce_scatter_where,
    reduce_where,
    shows_slots,
)
from aiodist.collectives.templates import LENGTH
from aiodist.engine.executor import ALL, Executor, StepParts, area_for, in_parts
from aiodist.engine.operation import Program
from aiodist.engine.phase import Phase
from aiodist.errors import ProtocolError
from aiodist.phases import berths, lanes, pulls
from aiodist.phases.base import Call, share_over_links
from aiodist.phases.memories import Blobs
from aiodist.prepared import lane_reductions
from aiodist.prepared.express import ExpressGroup, Flat, Recipe, failing, rest_of
from aiodist.prepared.lane_reductions import ONE_ROUND, LaneRecipe
from aiodist.prepared.posted import ByTag, Data, Otherwise, Posted
from aiodist.shared_memory.berths import Berth, Berths
from aiodist.shared_memory.posts import prefixes
from aiodist.wire.frames import pack_fields

POST_BYTES = LENGTH + berths.LENGTH
"""The bytes of a post."""
_HEAD = berths.LENGTH.to_bytes(LENGTH, "big")  # a post looks like a frame of blobs


class BerthRecipe(Recipe):
    """A recipe of a reduction on berths; each call posts a `BerthedCall` of it.

    `how` is the recipe of the same reduction on a lane, and `group` has the arrays to reduce.
    """

    in_one_go = None
    __slots__ = (
        "_begins", "_how", "_make_phase", "_parts", "context", "goes_on", "group", "lengths",
        "offers", "shows",
    )  # fmt: skip

    def __init__(
        self,
        context: ExpressGroup,
        offers: Berths,
        how: LaneRecipe,
        group: DtypeGroup,
        dst: int = 0,
    ) -> None:
        super().__init__(how.op, how.call, how.phase, how.vector, how.keeps)
        self.finish, self.returns, self.unformed = how.finish, how.returns, how.unformed
        self.context = context
        self.offers = offers
        self.group = group
        self._how = how
        if how.op == "all_reduce":
            self._make_phase = pulls.all_reduce
            self.goes_on = all_reduce_where
        elif how.op == "reduce":
            self._make_phase = partial(pulls.reduce, root=dst)
            self.goes_on = partial(reduce_where, dst=dst)
        else:
            self._make_phase = pulls.reduce_scatter
            self.goes_on = reduce_scatter_where
        # Whether a call writes its first data before it posts.
        self.shows = how.phase.prepared.plan.publishes <= ONE_ROUND
        self.lengths = [POST_BYTES] * context.size
        self._begins = ByTag(lambda tag: prefixes(pack_fields(tag, self.call), POST_BYTES))
        # By this rank's berth and the area: the others' berths, and the functions for a call there.
        self._parts: dict[tuple[int, int], tuple[Sequence[int], StepParts]] = {}

    def for_call(self, number: int, given: Any) -> BerthedCall:
        """Return what stands for the call with this number: see `Posted.for_call`."""
        return BerthedCall(self, number, given)

    def lay_out(
        self, args: tuple[Any, ...], flats: list[Flat], words: list[Any]
    ) -> tuple[Any, Any] | None:
        return self._how.lay_out(args, flats, words)

    def form(self, args: tuple[Any, ...]) -> Form | None:
        return self._how.form(args)

    def place_of(self, given: Any) -> int:
        """Return the place of the call's input in memory that all ranks see; 0: it is not there."""
        if self.phase.direct is None:
            return 0
        return self.context.heap.place_of((self._how.shown(given),))

    def prefixes(self, tag: object, number: int) -> Sequence[bytes]:
        return (self._begins[tag](number),) * len(self.lengths)

    def parts(self, berth: Berth, area: int) -> StepParts:
        """Return the functions that do a call on `berth`."""
        found = self._parts.get((berth.index, area))
        if found is None or found[0] != berth.along:
            found = self._parts[berth.index, area] = (
                berth.along,
                in_parts(self.phase, berth, area),
            )
        return found[1]

    def of(self, given: Any) -> DtypeGroup:
        """Return the arrays that one call reduces."""
        group = self.group
        if group.out is group.x:
            x = out = Vector.of(given)
        else:
            x, out = map(Vector.of, given)
        return replace(group, x=x, out=out)

    def release(self) -> None:
        self._parts.clear()

    def phase_of(self, given: Any) -> Phase:
        """Make the phase of one call, because several calls of a recipe may be under way."""
        phase = self._make_phase(self.context, self.of(given))
        return phase if self.phase.direct is not None else phase._replace(direct=None)


def learn(
    context: ExpressGroup,
    offers: Berths,
    op: str,
    make: Callable[..., Call],
    args: tuple[Any, ...],
) -> BerthRecipe | None:
    """Make the recipe of one of `lane_reductions.OPS` with arrays like these, if it uses berths."""
    found = lane_reductions.learn_of(context, op, make, args)
    if found is None:
        return None
    how, group = found
    if op != "reduce_scatter":
        on_berths = goes_on_berths(context, [group], False)
    else:
        on_berths = has_berths(context, [group], False, lanes.can_slice) and not shows_slots(
            context, group.kernel, group.bounds
        )
    dst = args[1] if op == "reduce" else 0
    return BerthRecipe(context, offers, how, group, dst) if on_berths else None


class BerthedCall(Posted):
    """One call of a `BerthRecipe`."""

    __slots__ = (
        "_area", "_offer", "_place", "_recipe", "_shows", "call", "lengths", "nbytes", "op",
    )  # fmt: skip

    def __init__(self, recipe: BerthRecipe, number: int, given: Any) -> None:
        self._recipe = recipe
        self._area = area_for(recipe.phase.shared or 0, number, 0)
        self._place = recipe.place_of(given)
        self._offer = recipe.offers.offer(number)
        self._shows = recipe.shows and not self._place
        if self._shows and self._offer is not None:
            self._offer.show(lambda berth: recipe.parts(berth, self._area).show(given))
        self.op, self.call, self.nbytes = recipe.op, recipe.call, recipe.nbytes
        self.lengths = recipe.lengths

    def shown(self, given: Any) -> Data:
        return _HEAD + berths.words_of(self._offer)

    def prefixes(self, tag: object, number: int) -> Sequence[bytes]:
        return self._recipe.prefixes(tag, number)

    def fits(self, nbytes: int) -> bool:
        return nbytes == POST_BYTES

    def result(self, values: Sequence[Data], x: Any, given: Any) -> Any:
        recipe, offer = self._recipe, self._offer
        try:
            offers = berths.read([value[LENGTH:] for value in values])
        except ProtocolError:
            offers = None  # the operation finds the error, too, and names the rank
        if offer is None or offers is None:
            return self.begun(x, given)
        place = self._place
        berth = offer.moor(offers, place, within=True)
        executor = None
        try:
            if not self._shows:
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

    def _executor(self, given: Any, berth: Berth, done: int) -> Executor:
        phase = self._recipe.phase_of(given)
        return Executor(phase, None, berth, self._area, self._place, done)

    def begun(self, x: Any, given: Any) -> Otherwise:
        recipe, offer = self._recipe, self._offer
        context = recipe.context
        memory = Blobs(context.rank, context.size, berths.words_of(offer))
        phase = Phase(share_over_links(context, first=True), memory)

        def rest() -> Program:
            on_lane = yield from berths.met(offer, memory.blobs)
            yield from recipe.goes_on(context, [recipe.of(given)], on_lane)
            return (yield from rest_of(recipe, x))

        return Otherwise(Executor(phase, None, done=context.size - 1), rest())
