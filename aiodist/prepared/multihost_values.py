"""Prepared collectives of values in groups that span hosts.

Ranks show the same blobs as in `lane_values`, by the plan `team_whole.share`. When the lengths of
all blobs are known, each has its place in the area of its host's leader, in the order of ranks.
That is the layout at the end of the plan. So blobs are received there and sent from there, and no
step has to join or split them. A rank that tells the hub of its host, but is not the leader, has
the same places in its own area.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, cast

from aiodist.collectives.templates import LENGTH, Reading, Template
from aiodist.engine.executor import Executor
from aiodist.engine.operation import Program
from aiodist.engine.phase import Phase, Spans
from aiodist.prepared.lane_values import ValueRecipe
from aiodist.prepared.link_frames import LendingFrames, LinkGroup
from aiodist.prepared.link_values import LaidBlobs, LinkValues
from aiodist.prepared.taking import Given, Take, give
from aiodist.schedules.plan import SHARED, Copy, Send
from aiodist.schedules.teams import team_view
from aiodist.shared_memory.lane import Lane

Areas = Mapping[int, memoryview]
"""One area of each rank of a host."""


class BlobPlaces:
    """The places of all blobs in one area, as far as known.

    `shown` has the blobs in the area of the leader, by rank. `own` is what this rank writes.
    `gathers` says whether the blobs of this rank's mates come to its area, with its own among them.
    `take` makes the result; None: it cannot.
    """

    def __init__(
        self,
        rank: int,
        leader: int,
        templates: Sequence[Template],
        areas: Areas,
        *,
        gathers: bool,
    ) -> None:
        self._ends = [0, *accumulate(template.length for template in templates)]
        self.areas = areas
        self.is_leader = rank == leader
        self._whole = areas[rank if gathers else leader]  # memory of all frames
        self._pieces: dict[Spans, list[memoryview]] = {}
        self.shown = [
            Reading(template, areas[leader][start:])
            for start, template in zip(self._ends, templates, strict=False)
        ]
        self.all_shown = areas[leader][: self._ends[-1]]
        start = self._ends[rank] if gathers else 0
        self.written = areas[rank][start : start + templates[rank].length]
        self.own = Reading(templates[rank], areas[rank][start:])
        self.take: Take | None = None

    def pieces(self, spans: Spans) -> list[memoryview]:
        """Return the memory of the blobs of a frame: mostly one piece."""
        found = self._pieces.get(spans)
        if found is None:
            cuts: list[tuple[int, int]] = []
            for _, first, stop in spans:
                if cuts and cuts[-1][1] == first:
                    first, _ = cuts.pop()
                cuts.append((first, stop))
            found = [self._whole[self._ends[first] : self._ends[stop]] for first, stop in cuts]
            self._pieces[spans] = found
        return found

    def are_cut(self, spans: Spans) -> bool:
        """Say whether each blob of a frame that has come begins in its own place."""
        ranks = [rank for _, first, stop in spans for rank in range(first, stop)]
        return all(self.has_length(rank, self._whole[self._ends[rank] :]) for rank in ranks)

    def has_length(self, rank: int, shown: memoryview) -> bool:
        """Say whether the blob of `rank` is as long as expected."""
        length = int.from_bytes(shown[:LENGTH], "big") + LENGTH
        return length == self._ends[rank + 1] - self._ends[rank]

    def are_there(self) -> bool:
        """Say whether all blobs are as expected, but for their data."""
        return all(map(Reading.is_there, self.shown))


class PlacedBlobs(LaidBlobs[BlobPlaces]):
    """The blobs of one call. `taken` says whether `take` has made the result from blobs in the
    leader's area."""

    def __init__(self, rank: int, size: int, laid: BlobPlaces, take: Callable[[], bool]) -> None:
        super().__init__(rank, size, laid)
        self.taken = False
        self._take = take

    def copy(self, step: Copy) -> None:
        laid, into = self.laid, step.into
        if into.buffer >= SHARED:
            # This rank's own blob is in its place since the call began.
            if not self.is_laid:
                super().copy(step)
        elif into.length > 1 and laid.are_there():  # the leader shows all blobs
            self._come.append(((into,), [laid.all_shown]))
            self.taken = self._take()
        elif into.length == 1 and self.is_laid and self._fits(into.start):
            (place,) = laid.pieces((into,))
            place[:] = laid.areas[into.start][: len(place)]
            self._come.append(((into,), [place]))
        else:
            self.part()
            super().copy(step)

    def _fits(self, mate: int) -> bool:
        """Say whether the blob of a mate is as long as expected."""
        return self.laid.has_length(mate, self.laid.areas[mate])


class MultihostValues(LinkValues):
    """A recipe of a group that spans hosts, for values of known shapes."""

    on_lane = True

    __slots__ = ("_gathers", "_leader", "_places")

    frames: LendingFrames

    def __init__(self, context: LinkGroup, *args: Any) -> None:
        super().__init__(context, *args)
        self.frames = LendingFrames(context, self.call, self.phase.prepared.plan)
        self._leader = team_view(context.teams, context.rank).team[0]
        self._gathers = any(isinstance(step, Send) for step in self.phase.prepared.plan.steps)
        self._places: dict[int, BlobPlaces | None] = {}  # by area; None: see `_places_in`

    def _learnt(self) -> None:
        self._places.clear()

    def release(self) -> None:
        self._places.clear()

    def _places_in(self, lane: Lane, area: int) -> BlobPlaces | None:
        """Return the places in `area`. None: they are not known, or the area is too small."""
        if area in self._places:
            return self._places[area]
        rank, places = self._context.rank, None
        if all(known for peer, known in enumerate(self._known) if peer != rank):
            templates = [
                self._own if peer == rank else known[0] for peer, known in enumerate(self._known)
            ]
            areas = {peer: lane.board.area(peer, area) for peer in (rank, *lane.others)}
            if sum(template.length for template in templates) <= len(areas[rank]):
                places = BlobPlaces(rank, self._leader, templates, areas, gathers=self._gathers)
                places.take = self._taking(places.shown)
        self._places[area] = places
        return places

    def enter(self, x: Any, given: Given, lane: Lane, area: int) -> tuple[Executor, Program]:
        """Return the executor and the rest of a call: see `MultihostRecipe.enter`."""
        places, given = self._places_in(lane, area), self.keep(given)
        if places is None:
            program = self._make(self._context, *given.args).start(True)
            phase = cast(Phase, next(program))
            self.frames.memory = phase.memory  # it has no expected lengths
            executor = Executor(phase, self.frames, lane, area, within=True)
            return executor, self._rest(program, phase, given)
        if given.shown is not None:
            places.written[:] = given.shown
        else:
            places.own.write()
            shown = given.own.shown_flats(given.flats)
            for data, flat in zip(places.own.data, shown, strict=True):
                data.flat[:] = flat
        rank, size = self._context.rank, self._context.size
        memory = PlacedBlobs(rank, size, places, partial(self._taken, places, given))
        self.frames.memory = memory
        phase = self.phase._replace(memory=memory)
        executor = Executor(phase, self.frames, lane, area, within=True)
        return executor, self._ended(memory, given)

    def _taken(self, places: BlobPlaces, given: Given) -> bool:
        """Make the result from blobs that are there. Return whether that worked."""
        taken = give(places.take, given)
        self._hit = self._hit or taken
        return taken

    def is_done(self, executor: Executor, given: Given) -> bool:
        """See `MultihostRecipe.is_done`."""
        memory = executor.phase.memory
        return isinstance(memory, PlacedBlobs) and self._made(memory, given)

    def _made(self, memory: PlacedBlobs, given: Given) -> bool:
        laid = memory.laid
        if not memory.taken and laid.is_leader and memory.is_laid and laid.are_there():
            memory.taken = self._taken(laid, given)
        return memory.taken

    def _ended(self, memory: Any, given: Given) -> Program:
        if self._made(memory, given):
            return given.result.pop()
        return (yield from super()._ended(memory, given))

    # Large data uses shared memory, too.
    _to_all = ValueRecipe._to_all
    _from_all = ValueRecipe._from_all
