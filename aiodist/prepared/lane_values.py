"""Prepared collectives of values: broadcast, all_gather, gather, scatter, all_to_all, barrier; and
reductions of numbers.

All begin with one phase in which every rank shows a blob (`phases.base.share`). If values are
small, that is all, because the data is in the blobs. What a rank shows for one kind of value (see
`express.kind_of`) is a `Template`. If all blobs match known templates that fit together, there is
nothing to parse and nothing to agree on: the data lies in known places.

**Unknown blobs take the ordinary way.** Examples are the first call of a kind, and an array of
another shape at the root of a broadcast. Another example is a rank that wants something that does
not fit. This rank shows the same blob either way. So the call becomes an operation whose first two
steps are done. When that has ended well, this rank learns the templates of the blobs.

**Large arrays travel behind the blobs**, in the phases of the ordinary way (`ValueRecipe.moved`).
Known blobs spare the work before: to describe the data of this rank, to read the descriptions of
others, and to make the places for theirs. That took a third of the processor time of an all_to_all
of 2.5 MiB.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar, cast

import numpy as np

from aiodist.buffers import overlaps
from aiodist.buffers.copying import copy_in
from aiodist.buffers.descriptions import A_NUMBER, KnownCall, described, word
from aiodist.buffers.descriptions import Part as FormPart
from aiodist.buffers.vector import Vector
from aiodist.collectives import fitting, numbers
from aiodist.collectives.device_transfer import copy
from aiodist.collectives.exchange import exchange
from aiodist.collectives.forms import Form, Matches, matching, placing, showing
from aiodist.collectives.templates import Reading, Template, Tree
from aiodist.engine.executor import ALL, Executor
from aiodist.engine.operation import Program
from aiodist.engine.phase import Phase
from aiodist.phases import lanes
from aiodist.phases.base import Call, Part
from aiodist.phases.memories import Blobs
from aiodist.prepared import plain
from aiodist.prepared.exchanged import Exchanged, exchanged_by
from aiodist.prepared.express import A_STEP, ExpressGroup, Flat, Recipe, written
from aiodist.prepared.taking import (
    AwaitedBlobs,
    Collect,
    Given,
    Move,
    Take,
    Views,
    filling,
    fit,
    give,
    in_order,
    kept,
)
from aiodist.prepared.tapes import ALL_SHOWN, MOST_LEAVES, is_tape, tape_of_values
from aiodist.shared_memory.lane import Lane
from aiodist.shared_memory.posts import CHEAP_COPY

KNOWN = 4
"""The most templates of one rank that one recipe keeps: the latest ones."""
LATER = 16
"""If templates were of no use several times in a row, nothing is learnt from so many calls.

A rank that shows something else each time will do so again. The number doubles each time.
"""
RARELY = 1024
"""The most calls from which nothing is learnt."""
MOST_TAKES = 16
"""The most combinations of templates for which the way to the result is kept."""
BEGUN = 2
"""Steps that are done before a call waits: the blob of this rank is copied and published."""
Make = Callable[..., Call]


_new = tuple.__new__
"""Makes a `Given` in half the time."""


def learn(
    recipe: type[V], context: ExpressGroup, op: str, make: Make, args: tuple[Any, ...]
) -> V | None:
    """Make the `recipe` of a call. None: it cannot be prepared."""
    exchanged = exchanged_by(op, context.rank, context.size, args)
    if exchanged is None:
        return None
    try:
        call = make(context, *args)
    except (TypeError, ValueError, OverflowError):
        return None  # the ordinary way raises it again
    program = call.start(recipe.on_lane)
    phase = cast(Phase, next(program))
    program.close()
    exchanged = exchanged._replace(moves=exchanged.given is not None and op in recipe.moves)
    own = recipe.own_of(exchanged, phase, context.rank)
    return None if own is None else recipe(context, call, phase, make, exchanged, own)


class ValueRecipe(Recipe):
    """A recipe of ranks that share memory, for values of known shapes."""

    on_lane = True
    moves = frozenset({"broadcast", "all_gather", "all_to_all"})
    """The operations on arrays whose data may travel apart, into arrays of the user."""

    __slots__ = (
        "_apart", "_collects", "_context", "_exchanged", "_hit", "_known", "_later", "_make",
        "_misses", "_other_words", "_own", "_words", "at_once", "fused",
    )  # fmt: skip

    def __init__(
        self,
        context: ExpressGroup,
        call: Call,
        phase: Phase,
        make: Make,
        exchanged: Exchanged,
        own: Template,
    ) -> None:
        # The calls have memories of their own. That of the first call has its values.
        phase = phase._replace(memory=Blobs(context.rank, context.size, b""))
        super().__init__(call.op, call.text.encode(), phase, Vector([], np.uint8), None)
        self.nbytes = call.nbytes
        self.finish: Callable[[Any], Any] | None = list.pop
        self._context = context
        self._make = make  # makes the call again, for the ordinary way
        self._exchanged = exchanged
        self._own = own  # what this rank shows
        self.weight += exchanged.bytes_kept(own, context.rank) // A_STEP
        self.unformed = 1
        # What others show, by rank.
        self._known: list[list[Template]] = [[] for _ in range(context.size)]
        self._words: list[Any] | None = None  # what the value of this rank has beside arrays
        # The `words` of the last call, if they were others.
        self._other_words: list[Any] | None = None
        self._apart = overlaps.Apart()  # checks whether the places of a list share memory
        self._hit = True  # whether the templates were of use since they were learnt
        self._misses = 0  # how often in a row they were not
        self._later = 0  # nothing is learnt from so many calls: see `LATER`
        self.fused = self._bound
        self.at_once: dict[int, Callable[[Any], int]] = {}  # functions that do a call, by area
        self._collects: dict[int, Collect] = {}  # their last part, by area

    @staticmethod
    def own_of(exchanged: Exchanged, phase: Phase, rank: int) -> Template | None:
        """Return the template of what this `rank` shows in that phase.

        None: the call does more than that, or the rank has to look at what it gets.
        """
        own = exchanged.template_of(cast(Blobs, phase.memory).blobs[rank], rank)
        return None if own is None or own.want == fitting.LOOK else own

    def lay_out(
        self, args: tuple[Any, ...], flats: list[Flat], words: list[Any]
    ) -> tuple[Any, Any] | None:
        result: list[Any] = []
        if self._exchanged.number is not None:
            (number, *_) = args
            data = numbers.bytes_of(number)
            if data is None:
                return None
            return result, Given(args, [], result, self._own, None, self._own.shown(data))
        if words != self._words and not self._shows(args, words):
            return None
        if self._own.is_apart:
            mine = flats[: self._exchanged.counts[self._context.rank]]
            if any(self._context.heap.place_of((flat,)) for flat in mine):
                return None  # other ranks can read it in place
        own, given = self._own, self._exchanged.given
        place = None if given is None else args[given]
        # All ranks copy what they show before they write results, so results may go over inputs.
        # But of two places in the same memory only one would keep its value, so the ordinary way
        # refuses them.
        takes_many = self._exchanged.takes and isinstance(place, (list, tuple, dict))
        if takes_many and not self._are_apart(place, flats):
            return None
        shown = own.shown_of(flats) if own.length <= CHEAP_COPY else None
        return result, Given(args, flats, result, own, place, shown)

    def _are_apart(self, place: Any, flats: Sequence[Flat]) -> bool:
        """Say whether the arrays of `place`, a list or a tree, share no memory."""
        if self._exchanged.listed:
            return self._apart.are(place, flats[len(flats) - len(place) :])
        return not overlaps.Ranges(flats[len(self._own.gaps) :]).overlap

    @property
    def template(self) -> Template:
        return self._own

    def known(self, args: tuple[Any, ...]) -> KnownCall | None:
        own, exchanged = self._own, self._exchanged
        if own.is_apart:
            return None
        parts: list[FormPart] = []
        for at, x in enumerate(args):
            if not at and exchanged.number is not None:
                part: FormPart | None = (A_NUMBER, exchanged.number, None, False)
            elif not at or at == exchanged.given:
                is_place = at == exchanged.given and len(exchanged.takes) > 0
                part = described(x, is_place=is_place)
            else:
                part = word(x)
            if part is None:
                return None
            parts.append(part)
        return KnownCall(parts, -1 if exchanged.given is None else exchanged.given)

    def form(self, args: tuple[Any, ...]) -> Form | None:
        # Only for small values, because a form copies twice what they show. Calls with `out=` need
        # more checks.
        own, exchanged = self._own, self._exchanged
        if own.length > CHEAP_COPY or own.is_apart or exchanged.given:
            return None
        value, p, q, r, *_ = (*args, None, None, None, None)
        cls = type(value)
        takes_place = exchanged.given is not None and len(exchanged.takes) > 0
        if exchanged.number is not None:
            matches: Matches | None = numbers.matching(exchanged.number)
        else:
            matches = placing(value) if takes_place else matching(value)
        shows = showing(own, value, matches)
        if shows is None:
            return None

        def lay(
            args: tuple[Any, ...], x: Any = None, a: Any = None, b: Any = None, c: Any = None
        ) -> tuple[Any, Any] | None:
            if type(x) is cls and a is p and b is q and c is r and self._own is own:
                shown = shows(x)
                if shown is not None:
                    result: list[Any] = []
                    flats = (x.reshape(-1),) if takes_place else ()
                    place = None if exchanged.given is None else x
                    return result, _new(Given, (args, flats, result, own, place, shown))
            return None

        return lay

    def _shows(self, args: tuple[Any, ...], words: list[Any]) -> bool:
        """Say whether the kept template may show a value that has other `words` than the last one.

        If the same words come twice, the template is made anew for them.
        """
        if self._words is not None:
            if words != self._other_words:
                self._other_words = words
                return False
            program = self._make(self._context, *args).start(self.on_lane)
            own = self.own_of(self._exchanged, cast(Phase, next(program)), self._context.rank)
            program.close()
            if own is None:
                return False
            self._own = own
            self.unformed = 1
            self._learnt()
        self._words = words
        return True

    def _bound(self, phase: Phase, lane: Lane, area: int) -> Callable[[Given], int]:
        """Return the function that does a call in `area`, as `executor.all_at_once` does for
        others."""
        template = self._own
        own = Reading(template, lane.board.area(self._context.rank, area))
        gaps = [data.flat for data in own.data]
        shows = [at for at in range(len(gaps)) if at != self._unshown()]
        blob = lane.board.area(self._context.rank, area)[: template.length]
        areas = {peer: lane.board.area(peer, area) for peer in lane.others}
        known = [
            (peer, [Reading(template, areas[peer]) for template in self._known[peer]])
            for peer in lane.others
        ]
        takes: dict[tuple[Reading, ...], Take | None] = {}  # by the blobs of all ranks
        all_areas = areas_of(lane, area)
        # What the others showed the last time, without the data, and what makes the result of it.
        found = [own] * self._context.size
        expected, expected_take = [_NEVER], cast("Take | None", None)

        def find(call: Given) -> bool:
            nonlocal found, expected, expected_take
            are_newest, now = True, [own] * len(found)
            for peer, readings in known:
                for reading in readings:
                    if reading.is_there():
                        now[peer] = reading
                        are_newest = are_newest and reading is readings[0]
                        break
                else:
                    return False  # `found` stays that of `expected`
            self._hit = self._hit or are_newest
            all_found = tuple(now)
            if all_found not in takes:
                if len(takes) == MOST_TAKES:
                    takes.clear()
                takes[all_found] = self._taking(now)
            found, expected_take = now, takes[all_found]
            expected = [pair for peer, _ in known for pair in found[peer].fixed]
            # A tape that these functions kept would keep them, too, until the collector comes.
            tape: Any = self.at_once.get(area)
            if expected_take is not None and is_tape(tape) and not self._fills_tree(found):
                moves, *rest = self._compiled(found, call, expected_take)
                if len(gaps) + len(moves) <= MOST_LEAVES:
                    tape.expects(expected, moves, *rest)
            return True

        def collect(call: Given) -> bool | None:
            for view, part in expected:
                if view.tobytes() != part:
                    if not find(call):
                        return self.is_plainly_read(all_areas, call)
                    break
            made = give(expected_take, call)
            return None if not made and self.may_move(found, call) else made

        def show(call: Given) -> int:
            if call.own is not template:
                return 0  # the template has changed while it waited
            shown_bytes = call.shown
            if shown_bytes is not None:
                blob[:] = shown_bytes
            else:
                own.write()
                shown_flats = template.shown_flats(call.flats)
                for at in shows:
                    copy_in(gaps[at], shown_flats[at])
            return True

        made: Any = self.bound(phase, lane, area, show, collect)
        if is_tape(made) and len(gaps) <= MOST_LEAVES:
            order = template.order or range(len(gaps))
            made.shows(template, [*own.fixed, *((own.data[at].memory, order[at]) for at in shows)])
        return cast("Callable[[Given], int]", made)

    def bound(
        self, phase: Phase, lane: Lane, area: int, show: Callable[[Given], int], collect: Collect
    ) -> Callable[[Given], int]:
        """Return the function that does a call in `area`: `show`, wait for the others, `collect`.

        `show` returns 0 if it cannot, else True.
        """
        _, _, shown, taken, _ = phase.prepared
        shown, taken = shown * phase.itemsize, taken * phase.itemsize
        moved, steps = lane.moved, len(phase.prepared.plan.steps)

        def take(call: Given) -> int:
            made = collect(call)
            return steps if made is None else made or ALL_SHOWN

        def run(call: Given) -> int:
            if show(call) is not True:
                return 0
            lane.publish()
            if not lane.watch(lane.others, 1):
                return BEGUN
            done = take(call)
            if done is not True:
                return done
            if not lane.end(area):
                return ALL_SHOWN
            moved.sent += shown
            moved.received += taken
            return ALL

        self._collects[area] = collect
        return tape_of_values(self, phase, lane, area, run, show, take)

    def is_plainly_read(self, blobs: Sequence[bytes | memoryview], call: Given) -> bool:
        """Make the result of plain values, if nothing is to be learnt from them. False: that was
        not done."""
        if not self._later or not self.read_plainly(blobs, call):
            return False
        self._later -= 1
        return True

    def read_plainly(self, blobs: Sequence[bytes | memoryview], call: Given) -> bool:
        """Make the result of plain values. False: a rank shows anything else."""
        exchanged = self._exchanged
        if exchanged.number is not None or self._own.want:
            return False
        values = plain.read(exchanged, blobs, self._context.max_message_bytes)
        if values is None:
            return False
        if exchanged.listed and exchanged.takes:
            call.result.append(values)
        else:
            call.result.append(values[0] if values else call.place)
        return True

    def _compiled(
        self, found: Sequence[Reading], call: Given, take: Take
    ) -> tuple[list[Move], tuple[Callable[[], Any], ...], bool]:
        """Describe to the compiled part what `take` does with `found`.

        Returns what goes to places of the user, what makes new values, and whether the result is a
        list of these.
        """
        exchanged, takes = self._exchanged, self._exchanged.takes
        if exchanged.given is not None:
            data = [found[src].data[number] for src, number in takes]
            before, own = len(self._own.gaps), self._unshown()
            is_one = len(call.flats) - before != len(data)
            moves: list[Move] = []
            for at, each, part in in_order(data, own):
                what = at if at == own else each.place
                if is_one:
                    moves.append((what, before, part.start * each.flat.itemsize))
                else:
                    moves.append((what, before + at, 0))
            return moves, (), False
        if exchanged.number is not None and takes:
            return [], (partial(take, call),), False
        return [], tuple(found[src].values[n].copy for src, n in takes), exchanged.listed

    def take(self, found: Sequence[Reading], call: Given) -> bool:
        """Make the result from `found`, the blobs of all ranks. False: take the ordinary way."""
        return give(self._taking(found), call)

    def _taking(self, found: Sequence[Reading]) -> Take | None:
        """Return what makes the result from `found`. None: blobs do not fit, or data travels
        apart."""
        exchanged, takes = self._exchanged, self._exchanged.takes
        if any(found[src].is_apart for src in exchanged.sources):
            return None
        if exchanged.number is not None and takes:
            shown = [found[src] for src, _ in takes]
            reduce = numbers.reducing(shown, exchanged.number, exchanged.op)
            return lambda call: reduce()
        if exchanged.sources and not fit(found, exchanged.sources):
            return None
        if self._fills_tree(found):
            ((src, number),) = takes
            tree = cast(Tree, found[src].values[number])
            return lambda call: tree.fill(call.place)
        if exchanged.given is not None:
            data = [found[src].data[number] for src, number in takes]
            return filling(data, len(self._own.gaps), self._unshown())
        copies = [found[src].values[number].copy for src, number in takes]
        if exchanged.listed and copies:
            return lambda call: [copy() for copy in copies]
        if not copies:
            return lambda call: None
        (copy,) = copies
        return lambda call: copy()

    def _fills_tree(self, found: Sequence[Reading]) -> bool:
        """Say whether the result goes to the arrays of a tree."""
        exchanged = self._exchanged
        return exchanged.given is not None and any(
            type(found[src].values[number]) is Tree for src, number in exchanged.takes
        )

    def _unshown(self) -> int | None:
        """Return the number of the array that only this rank takes. None: there is none.

        It is not shown, because this rank has it already, and would copy it twice.
        """
        exchanged, rank = self._exchanged, self._context.rank
        is_own = self.op == "all_to_all" and exchanged.given is not None
        return rank if is_own and len(self._own.gaps) == exchanged.counts[rank] else None

    def resume(
        self, result: Any, given: Given, lane: Lane, area: int, done: int
    ) -> tuple[Executor, Program]:
        """Return the executor and the rest of a call that has to wait, or take the ordinary way."""
        if done > ALL_SHOWN:
            return Executor(self.phase, None, lane, area, 0, done), self.moved(self.keep(given))
        if done != BEGUN:
            program = self._make(self._context, *given.args).start(True)
            phase = cast(Phase, next(program))
            return Executor(phase, None, lane, area, 0, done), self._rest(program, phase, given)
        collect = partial(self._collects[area], given)
        memory = AwaitedBlobs(self._context.rank, self._context.size, collect)
        phase = self.phase._replace(memory=memory)
        return Executor(phase, None, lane, area, 0, done), self._awaited(memory, self.keep(given))

    def _awaited(self, memory: AwaitedBlobs, given: Given) -> Program:
        """Continue with the blobs of all ranks."""
        if memory.made:
            return given.result.pop()
        if memory.made is None:
            return (yield from self.moved(given))
        memory.check()
        return (yield from self.remade(memory, given))

    def remade(self, memory: Blobs, given: Given) -> Program:
        """Take the ordinary way from the first phase on, with the blobs that have been shown."""
        program = self._make(self._context, *given.args).start(self.on_lane)
        phase = cast(Phase, next(program))
        cast(Blobs, phase.memory).blobs[:] = memory.blobs
        return (yield from self._rest(program, phase, given))

    # -- arrays whose data travels apart ----------------------------------------------------------

    def may_move(self, found: Sequence[Reading], given: Given) -> bool:
        """Say whether all sources give what is wanted, with data that travels apart."""
        sources = self._exchanged.sources
        return (
            self._exchanged.moves
            and all(found[src].is_apart for src in sources)
            and fit(found, sources)
        )

    def moved(self, given: Given) -> Program:
        """Move the data as in the ordinary way. The blobs have said that all of it fits."""
        exchanged, rank, size = self._exchanged, self._context.rank, self._context.size
        flats = given.flats
        if not exchanged.listed:
            view = [_bytes(flats[0])]
            ways = ([], view) if exchanged.takes else (view, [])
            yield from self._to_all(exchanged.sources[0], *ways)
            return written(given.place) if exchanged.takes else given.place
        count = exchanged.counts[rank]
        places = flats[count:]
        slots = places if len(places) == size else [*places[0].reshape(size, -1)]
        parts = [_bytes(slot) for slot in slots]
        # Arrays are sent without a copy, even if an array is its own place. But if it overlaps
        # another place, it has to be copied, because data of others may arrive before it has left.
        written_to = overlaps.Ranges(slots)
        own = 0 if count == 1 else rank
        shown = [
            _bytes(
                flat.copy()
                if written_to.touch(flat) and not (at == own and overlaps.same(flat, slots[rank]))
                else flat
            )
            for at, flat in enumerate(flats[:count])
        ]
        if count == 1:
            yield from self._from_all(shown[0], parts[:rank] + parts[rank + 1 :])
        else:
            yield from self._each_to_each(shown, parts)
        copy(parts[rank], shown[own])
        return written(given.place)

    def _to_all(self, src: int, give: Views, take: Views) -> Part[None]:
        """Send the bytes of `src` to all others."""
        yield from lanes.broadcast(self._context, src, give, take)

    def _from_all(self, own: memoryview, places: Views) -> Part[None]:
        """Send the own bytes to all others, and take as many from each into its place."""
        lengths = (own.nbytes,) * self._context.size
        yield from lanes.all_gather(self._context, lengths, [own], places)

    def _each_to_each(self, shown: Views, places: Views) -> Part[None]:
        """Send each other rank its bytes, which are equally many for all ranks."""
        others = [rank for rank in range(len(shown)) if rank != self._context.rank]
        sends = {rank: [shown[rank]] for rank in others}
        receives = {rank: [places[rank]] for rank in others}
        yield from exchange(self._context, sends, receives, shown[0].nbytes, True)

    def keep(self, given: Given) -> Given:
        """Return what a waiting call keeps, because the program may change the list that it
        gave."""
        return given._replace(args=tuple(map(kept, given.args)))

    def program(self, result: Any, given: Given) -> Program:
        """Return the ordinary program of a call that has done nothing yet."""
        program = self._make(self._context, *given.args).start(True)
        phase = cast(Phase, next(program))
        yield phase
        return (yield from self._rest(program, phase, given))

    def _rest(self, program: Program, phase: Phase, given: Given) -> Program:
        """Run the rest of the ordinary way, and learn what others show."""
        result = yield from program
        at = self._exchanged.given
        if at is not None and result is given.args[at]:
            result = given.place  # the kept arguments may have a copy of this list
        self._learn_from(cast(Blobs, phase.memory).blobs)
        return result

    def _learn_from(self, blobs: Sequence[bytes]) -> None:
        """Learn the templates of what all ranks have shown."""
        if self._are_known(blobs):
            return
        if self._later:
            self._later -= 1
            return
        self._misses = 0 if self._hit else self._misses + 1
        self._hit = False
        if self._misses >= KNOWN:
            self._later = min(LATER << self._misses - KNOWN, RARELY)
        for peer, blob in enumerate(blobs):
            template = self._exchanged.template_of(blob, peer)
            if template is not None:
                others = [each for each in self._known[peer] if each != template]
                self._known[peer] = [template, *others][:KNOWN]
        self._learnt()

    def _are_known(self, blobs: Sequence[bytes]) -> bool:
        """Say whether each other rank shows what it showed last, but for the data."""
        others = (peer for peer in range(len(blobs)) if peer != self._context.rank)
        return all(
            known[0].is_of(blobs[peer]) if (known := self._known[peer]) else False
            for peer in others
        )

    def _learnt(self) -> None:
        """Use the templates that were just learnt."""
        self._forget_areas()

    def release(self) -> None:
        self._forget_areas()

    def _forget_areas(self) -> None:
        self.tapes = (None, None)
        self.at_once.clear()
        self._collects.clear()


def areas_of(lane: Lane, area: int) -> list[memoryview]:
    """Return that area of all ranks, by rank."""
    return [lane.board.area(rank, area) for rank in range(1 + len(lane.others))]


_NEVER = memoryview(b""), b"?"
"""A pair that no blob matches."""

V = TypeVar("V", bound=ValueRecipe)


def _bytes(flat: Flat) -> memoryview:
    return flat.view(np.uint8).data
