"""Prepared collectives of values: broadcast, all_gather, gather, scatter, all_to_all, barrier.

All begin with one phase in which every rank shows a blob (`phases.base.share`), and where values
are small there is nothing after it: the data is in the blobs. What a rank shows for arrays of one
dtype and shape is a `Template`; and where the blobs of all have the bytes of known templates, which
fit together, there is nothing to parse or to agree on: the data lies in known places.

**What is not known goes the ordinary way**: the first call of a kind, an array of another shape at
the root of a broadcast, whoever asks for what does not fit. What this rank shows is the same in
either case, so the call becomes an operation with its first two steps done, and what the blobs were
is learnt when it has ended well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np

from aiodist.buffers import tensors
from aiodist.buffers.vector import Vector
from aiodist.collectives import fitting
from aiodist.collectives.express import ExpressGroup, Flat, Recipe
from aiodist.collectives.templates import Reading, Template, template_of
from aiodist.engine.executor import ALL, Executor
from aiodist.engine.operation import Program
from aiodist.engine.phase import Phase
from aiodist.phases.base import Call
from aiodist.phases.memories import Blobs
from aiodist.shared_memory.lane import Lane

KNOWN = 4
"""Most templates of one rank that are kept for one kind of call: those that came last."""
LATER = 16
"""So many calls of a kind are left to the ordinary way after one in which a rank gave no arrays."""
MANY = 16
"""With more ranks, what each has for each other one is not prepared."""
BEGUN = 2
"""Steps that are done before a call waits: what this rank shows is copied, and published."""

Make = Callable[..., Call]


class Given(NamedTuple):
    """The arguments of one call, and the memory of the arrays among them; `result` is for its
    result."""

    args: tuple[Any, ...]
    flats: list[Flat]
    result: list[Any]


class Exchanged(NamedTuple):
    """What an operation makes of the blobs.

    `counts`: how many arrays each rank shows. `takes`: the arrays that this rank takes, by source
    and number. Its result is a list of them, or the one if it is not `listed`, or None without any;
    or the argument `given`, where that is the number of one. `sources`: whose arrays have to fit
    what others have said that they take; none: nobody says anything.
    """

    counts: Sequence[int]
    takes: Sequence[tuple[int, int]] = ()
    listed: bool = False
    given: int | None = None
    sources: Sequence[int] = ()


def _exchanged(op: str, rank: int, size: int, args: tuple[Any, ...]) -> Exchanged | None:
    """What `op` is, of those who exchange values; None for others."""
    one, none = [1] * size, [0] * size
    first = [(src, 0) for src in range(size)]
    match op:
        case "broadcast":
            value, src = args
            counts = [int(each == src) for each in range(size)]
            if rank == src:
                return Exchanged(counts, given=0, sources=[src])
            given = None if value is None else 0
            return Exchanged(counts, [(src, 0)], given=given, sources=[src])
        case "all_gather":
            given = None if args[1] is None else 1
            return Exchanged(one, first, listed=True, given=given, sources=range(size))
        case "gather":
            return Exchanged(one, first if rank == args[1] else (), listed=True)
        case "scatter" if size <= MANY:
            src = args[1]
            return Exchanged([size * (each == src) for each in range(size)], [(src, rank)])
        case "all_to_all" if size <= MANY:
            takes = [(src, rank) for src in range(size)]
            return Exchanged([size] * size, takes, listed=True)
        case "barrier":
            return Exchanged(none)
    return None


def learn(
    recipe: type[V], context: ExpressGroup, op: str, make: Make, args: tuple[Any, ...]
) -> V | None:
    """The `recipe` of a call; None where it is not to be prepared."""
    exchanged = _exchanged(op, context.rank, context.size, args)
    if exchanged is None:
        return None
    try:
        call = make(context, *args)
    except (TypeError, ValueError):
        return None  # and the ordinary way raises it
    program = call.start(recipe.on_lane)
    phase = cast(Phase, next(program))
    program.close()
    own = cast(Blobs, phase.memory).blobs[context.rank]
    moves = recipe.moves and exchanged.given is not None
    template = template_of(own, exchanged.counts[context.rank], context.rank, moves=moves)
    if template is None or template.want == fitting.LOOK:  # it has to look at what comes
        return None
    return recipe(context, call, phase, make, exchanged, template)


class ValueRecipe(Recipe):
    """A recipe of ranks that share memory, for values of known shapes."""

    on_lane = True
    moves = False
    """Whether it may be of arrays whose data travels apart, into others that are given."""

    __slots__ = ("_context", "_exchanged", "_known", "_later", "_make", "_own", "at_once", "fused")

    def __init__(
        self,
        context: ExpressGroup,
        call: Call,
        phase: Phase,
        make: Make,
        exchanged: Exchanged,
        own: Template,
    ) -> None:
        super().__init__(call.op, call.text.encode(), phase, Vector([], np.uint8), None)
        self.nbytes = call.nbytes
        self.finish = list.pop
        self._context = context
        self._make = make  # makes the call anew, for the ordinary way
        self._exchanged = exchanged
        self._own = own  # what this rank shows
        self._known: list[list[Template]] = [[] for _ in range(context.size)]  # what others show
        self._later = 0  # so many calls are not for here, see `LATER`
        self.fused = self._bound
        self.at_once: dict[int, Callable[[Any], int]] = {}  # what does it, by area

    def lay_out(self, args: tuple[Any, ...], flats: list[Flat]) -> tuple[Any, Any] | None:
        if self._later:
            self._later -= 1
            return None
        result: list[Any] = []
        return result, Given(args, flats, result)

    def _bound(self, phase: Phase, lane: Lane, area: int) -> Callable[[Given], int]:
        """What carries it out in `area`, as `executor.all_at_once` does other phases."""
        own = Reading(self._own, lane.area(self._context.rank, area))
        gaps = [data.flat for data in own.data]
        known = [
            (peer, [Reading(template, lane.area(peer, area)) for template in self._known[peer]])
            for peer in lane.others
        ]
        found: list[Reading] = [own] * self._context.size
        take = self._take
        _, _, shown, taken = phase.prepared
        shown, taken = shown * phase.itemsize, taken * phase.itemsize
        moved = lane.moved

        def run(call: Given) -> int:
            own.write()
            for gap, flat in zip(gaps, call.flats, strict=False):
                gap[:] = flat
            lane.publish()
            if not lane.watch(lane.others, 1):
                return BEGUN
            for peer, readings in known:
                for reading in readings:
                    if reading.is_there():
                        found[peer] = reading
                        break
                else:
                    return BEGUN
            if not take(found, call):
                return BEGUN
            if not lane.end(area):
                return BEGUN
            moved.sent += shown
            moved.received += taken
            return ALL

        return run

    def _take(self, found: Sequence[Reading], call: Given) -> bool:
        """Make the result of `found`, what each rank shows. False: it does not fit everywhere."""
        args, flats, result = call
        _, takes, listed, given, sources = self._exchanged
        if sources and not fit(found, sources):
            return False
        # Only now: where it does not fit on one rank, nothing is written on any.
        if given is not None:
            x, at = args[given], 0
            for peer, number in takes:
                data = found[peer].data[number].flat
                flats[-1][at : at + len(data)] = data
                at += len(data)
            if takes and type(x) is not np.ndarray:
                tensors.mark_written(x)
            result.append(x)
        elif listed and takes:
            result.append([found[peer].data[number].copy() for peer, number in takes])
        elif takes:
            ((peer, number),) = takes
            result.append(found[peer].data[number].copy())
        else:
            result.append(None)
        return True

    def resume(
        self, result: Any, given: Given, lane: Lane, area: int, done: int
    ) -> tuple[Executor, Program]:
        """What goes on with it the ordinary way."""
        program = self._make(self._context, *given.args).start(True)
        phase = cast(Phase, next(program))
        return Executor(phase, None, lane, area, 0, done), self._rest(program, phase)

    def keep(self, given: Given) -> Given:
        """What is left of it if the program changes the list that it has called with."""
        value, *more = given.args or (None,)
        return given._replace(args=([*value], *more)) if type(value) is list else given

    def program(self, result: Any, given: Given) -> Program:
        """All of it the ordinary way, where nothing is done yet."""
        program = self._make(self._context, *given.args).start(True)
        phase = cast(Phase, next(program))
        yield phase
        return (yield from self._rest(program, phase))

    def _rest(self, program: Program, phase: Phase) -> Program:
        """The rest of the ordinary way, of which is learnt what others show."""
        result = yield from program
        blobs = cast(Blobs, phase.memory).blobs
        if self._are_known(blobs):
            return result
        moves = self.moves and self._exchanged.given is not None
        for peer, count in enumerate(self._exchanged.counts):
            template = template_of(blobs[peer], count, peer, moves=moves)
            if template is None or (template.want and not self._exchanged.sources):
                self._later = LATER  # who sends a tree will send another one
                continue
            others = [each for each in self._known[peer] if each != template]
            self._known[peer] = [template, *others][:KNOWN]
        self._learnt()
        return result

    def _are_known(self, blobs: Sequence[bytes]) -> bool:
        """Whether each other rank shows what it did the last time, but for the data."""
        others = (peer for peer in range(len(blobs)) if peer != self._context.rank)
        return all(
            known[0].is_of(blobs[peer]) if (known := self._known[peer]) else False
            for peer in others
        )

    def _learnt(self) -> None:
        """What others show is known, or better known."""
        self.at_once.clear()


V = TypeVar("V", bound=ValueRecipe)


def fit(readings: Sequence[Reading], sources: Sequence[int]) -> bool:
    """Whether what `sources` give is what all take who say so: see `fitting.all_fit`."""
    first = readings[sources[0]]
    for reading in readings:
        if reading.want and (reading.want != first.given or reading.want == fitting.LOOK):
            return False
        if reading.want:
            # Of other metadata, if only of another library's arrays, it is not known: on no rank.
            for src in sources:
                if readings[src].spec != first.spec:
                    return False
    return True
