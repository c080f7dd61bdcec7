"""Prepared collectives of values between ranks that are joined by links: broadcast, all_gather,
gather, scatter, all_to_all, barrier.

Ranks show the same blobs as in `lane_values`, but in frames. When the bytes of all blobs beside
their data are known, all frames have known lengths. Then there is nothing to parse and nothing to
agree on. The blobs lie in one piece of memory in the order of ranks, as in a ring, so each frame is
one view of it. The first blob is this rank's own if the plan is `dissemination.all_gather`, and
that of rank 0 if it is `star.all_gather`.

Arrays that are too large for a blob move in a second phase. They are prepared for two operations
(`LinkValues.moves`): a broadcast into arrays of all ranks, and an all_gather into one array.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, Generic, NamedTuple, Protocol, TypeVar, cast

from aiodist.collectives import exchange
from aiodist.collectives.templates import LENGTH, Reading
from aiodist.engine.executor import ALL, Executor
from aiodist.engine.operation import Program
from aiodist.engine.phase import Phase, Spans, prepared
from aiodist.phases.base import Part
from aiodist.phases.memories import Blobs
from aiodist.prepared.lane_values import ValueRecipe
from aiodist.prepared.link_frames import Frames, LinkGroup
from aiodist.prepared.taking import Given, Views
from aiodist.schedules import star
from aiodist.schedules.choose_values import choose_all_gather, choose_broadcast
from aiodist.schedules.plan import Plan, Recv, Send, Span

ARENA = 640 * 1024
"""The most bytes of the blobs of all ranks. All calls of a group use this memory, one at a time."""


Cuts = Sequence[tuple[memoryview, bytes]]
"""The length of each blob of a frame but the last: its place, and what it has to be."""


class Move(NamedTuple):
    """A step of the plan: a frame with the bytes of `view` to `peer`, or from it."""

    sends: bool
    peer: int
    view: memoryview
    cuts: Cuts


class Laid(NamedTuple):
    """The places of everything, as far as known.

    `moves` are the steps. `frames` has the memory and cuts of each frame, by its spans. `written`
    is the own blob. `shown` has what each rank shows, by rank.
    """

    moves: Sequence[Move]
    frames: Mapping[Spans, tuple[memoryview, Cuts]]
    written: memoryview
    shown: Sequence[Reading]

    def pieces(self, spans: Spans) -> list[memoryview]:
        """Return the memory of the blobs of a frame: always one piece."""
        return [self.frames[spans][0]]

    def are_cut(self, spans: Spans) -> bool:
        """Say whether each blob of a frame that has come lies in its own place."""
        return are_cut(self.frames[spans][1])


class Route(NamedTuple):
    """The way of the one frame with the data.

    `comes` is the rank from which it comes; None: it starts here. `goes` are the ranks to which it
    goes. Each has the number of this frame among all frames between the two ranks.
    """

    comes: tuple[int, int] | None
    goes: Sequence[tuple[int, int]]


def route_of(words: Plan, data: Plan) -> Route | None:
    """Return the route of plan `data`, which follows plan `words`. None: it is not one frame."""
    received = Counter(step.peer for step in words.steps if isinstance(step, Recv))
    sent = Counter(step.peer for step in words.steps if isinstance(step, Send))
    if not (data.eager and data.steps):
        return None
    comes, rest = None, [*data.steps]
    if isinstance(first := rest[0], Recv):
        del rest[0]
        comes = first.peer, received[first.peer]
    goes = [(step.peer, sent[step.peer]) for step in rest if isinstance(step, Send)]
    is_whole = len(goes) == len(rest) == len({peer for peer, _ in goes})
    return Route(comes, goes) if is_whole else None


class Places(Protocol):
    """Where the blobs of a call are, and what this rank writes."""

    @property
    def written(self) -> memoryview: ...

    def pieces(self, spans: Spans) -> list[memoryview]: ...

    def are_cut(self, spans: Spans) -> bool: ...


P = TypeVar("P", bound=Places)


class LaidBlobs(Blobs, Generic[P]):
    """The blobs of one call, in their places. Those of `come` are there.

    If a frame or a blob has an unexpected length, each blob moves to memory of its own.
    """

    def __init__(self, rank: int, size: int, laid: P, come: Iterable[Spans] = ()) -> None:
        super().__init__(rank, size, b"")
        self.laid = laid
        self.is_laid = True
        # Blobs that have come, with their places.
        self._come: list[tuple[Spans, Sequence[memoryview]]] = []
        for spans in come:
            self.arrived(spans)

    def outgoing(self, spans: Spans) -> Sequence[memoryview]:
        if not self.is_laid:
            return super().outgoing(spans)
        pieces = self.laid.pieces(spans)
        return pieces if len(pieces) == 1 else (memoryview(b"".join(pieces)),)

    def due(self, spans: Spans) -> memoryview | None:
        if not self.is_laid:
            return None
        return self.incoming(spans, sum(map(len, self.laid.pieces(spans))))

    def incoming(self, spans: Spans, nbytes: int) -> memoryview:
        pieces = self.laid.pieces(spans)
        if self.is_laid and len(pieces) == 1 and nbytes == len(pieces[0]):
            self._inbox.pop(spans, None)
            return pieces[0]
        return super().incoming(spans, nbytes)

    def arrived(self, spans: Spans) -> None:
        data, pieces = self._inbox.get(spans), self.laid.pieces(spans)
        if data is not None and self.is_laid and len(data) == sum(map(len, pieces)):
            at = 0
            for piece in pieces:
                piece[:] = data[at : at + len(piece)]
                at += len(piece)
            data = None
            del self._inbox[spans]
        if data is None and self.is_laid and self.laid.are_cut(spans):
            self._come.append((spans, pieces))
            return
        self.part()
        if data is not None:
            super().arrived(spans)
        else:
            self.read(spans, memoryview(b"".join(pieces)))

    def part(self) -> None:
        """Move the blobs out of their places."""
        if self.is_laid:
            self.is_laid = False
            self.blobs[self._rank] = bytes(self.laid.written[LENGTH:])
            for spans, pieces in self._come:
                self.read(spans, memoryview(b"".join(pieces)))


def are_cut(cuts: Cuts) -> bool:
    """Say whether each blob of a frame that has come lies in its own place.

    If not, a later frame with a part of these blobs would begin or end within a blob.
    """
    return all(place.tobytes() == length for place, length in cuts)


class LinkValues(ValueRecipe):
    """A recipe of ranks that are joined by links, for values of known shapes."""

    on_lane = False
    moves = frozenset({"broadcast", "all_gather"})

    __slots__ = ("_first", "_is_routed", "_laid", "_route", "arena", "frames")

    def __init__(self, context: LinkGroup, *args: Any) -> None:
        super().__init__(context, *args)
        self.frames = Frames(context, self.call, self.phase.prepared.plan)
        self.arena: memoryview  # memory for blobs: see `ARENA`
        self._laid: Laid | None = None  # made when all templates are known
        self._route: Route | None = None  # the answer of `route`, if that has looked
        self._is_routed = True
        # The rank whose blob comes first.
        by_hub = self.phase.prepared.plan.name == star.ALL_GATHER
        self._first = star.HUB if by_hub else self._context.rank

    def _learnt(self) -> None:
        super()._learnt()
        rank, size, origin = self._context.rank, self._context.size, self._first
        self._laid = self._route = None
        self._is_routed = False
        if not all(known for peer, known in enumerate(self._known) if peer != rank):
            return
        around = [(origin + distance) % size for distance in range(size)]
        templates = [self._own if peer == rank else self._known[peer][0] for peer in around]
        ends = [0, *accumulate(template.length for template in templates)]
        if ends[-1] > ARENA:
            return
        moves: list[Move] = []
        frames: dict[Spans, tuple[memoryview, Cuts]] = {}
        for step in self.phase.prepared.plan.steps:
            assert isinstance(step, (Send, Recv))
            first = (step.spans[0].start - origin) % size
            stop = first + sum(map(_length, step.spans))
            if step.spans not in frames:
                cuts = [
                    (self.arena[start : start + LENGTH], (end - start - LENGTH).to_bytes(LENGTH))
                    for start, end in itertools.pairwise(ends[first:stop])
                ]
                frames[step.spans] = self.arena[ends[first] : ends[stop]], cuts
            moves.append(Move(isinstance(step, Send), step.peer, *frames[step.spans]))
        shown = [
            Reading(template, self.arena[start:])
            for start, template in zip(ends, templates, strict=False)
        ]
        at = (rank - origin) % size
        own = self.arena[ends[at] : ends[at + 1]]
        self._laid = Laid(moves, frames, own, [shown[p - origin] for p in range(size)])

    def begin(self, given: Given) -> tuple[int, Executor | None]:
        """Run the plan as far as possible: see `LinkRecipe.begin`.

        It does the steps of the executor, with fewer checks in each.
        """
        laid = self._laid
        if laid is None:
            self.frames.look_at_all()
            return 0, None
        own = laid.shown[self._context.rank]
        if given.shown is not None:
            laid.written[:] = given.shown
        else:
            own.write()
            for data, flat in zip(own.data, given.own.shown_flats(given.flats), strict=True):
                data.flat[:] = flat
        frames = self.frames
        last, made = None, b""
        for number, (sends, peer, view, cuts) in enumerate(laid.moves):
            prefix = frames.prefix(len(view))
            if sends:
                if view is not last:  # else another peer gets the same frame
                    last, made = view, prefix + view
                frames.links[peer].send_copy(prefix, view, made)
            elif not frames.has_come(peer, prefix, view):
                return number, None
            elif cuts and not are_cut(cuts):
                return number + 1, None
        return ALL, None

    def complete(self, x: Any, given: Given) -> bool:
        """Check that all blobs are as expected, and make the result. False: they are not."""
        assert self._laid is not None
        shown = self._laid.shown
        return all(map(Reading.is_there, shown)) and self.take(shown, given)

    def may_move(self, found: Sequence[Reading], given: Given) -> bool:
        # Ranks of one host that could not share memory offer large data in another way.
        return not self._context.may_post and super().may_move(found, given)

    def route(self, given: Given) -> Route | None:
        """Return the route of a broadcast's data, if that is one frame behind known blobs."""
        if not self._is_routed:
            self._is_routed = True
            laid = self._laid
            if laid is not None and not self._exchanged.listed and self.may_move(laid.shown, given):
                place, (src,) = self._context, self._exchanged.sources
                chosen = choose_broadcast(given.flats[0].nbytes, place.size, src, place.costs)
                data = prepared(chosen.algorithm, place.rank, place.size, *chosen.args).plan
                self._route = route_of(self.phase.prepared.plan, data)
        return self._route

    def last_words(self, done: int) -> tuple[int, memoryview] | None:
        """Return the rank and the place of the last frame, if `done` steps leave only that."""
        assert self._laid is not None
        if done != len(self._laid.moves) - 1:
            return None
        last = self._laid.moves[done]
        return None if last.sends else (last.peer, last.view)

    @property
    def is_known(self) -> bool:
        """Whether all blobs are as expected; all frames have to be here."""
        assert self._laid is not None
        return all(map(Reading.is_there, self._laid.shown))

    def go_on(self, x: Any, given: Given, done: int) -> tuple[Executor, Program]:
        """Return the executor and the rest of a call after so many `done` steps."""
        laid, rank = self._laid, self._context.rank
        if laid is None:
            program = self._make(self._context, *given.args).start(False)
            phase = cast(Phase, next(program))
            return Executor(phase, self.frames), self._rest(program, phase, given)
        steps = self.phase.prepared.plan.steps
        done = len(steps) if done == ALL else done
        come = (step.spans for step in steps[:done] if isinstance(step, Recv))
        memory = LaidBlobs(rank, self._context.size, laid, come)
        phase = Phase(self.phase.prepared, memory)
        return Executor(phase, self.frames, done=done), self._ended(memory, self.keep(given))

    def _ended(self, memory: LaidBlobs[Laid], given: Given) -> Program:
        """Finish with the blobs of all ranks if they are as expected.

        If they are not, make the call again, and continue from there.
        """
        shown = memory.laid.shown
        if memory.is_laid and all(map(Reading.is_there, shown)):
            if self.take(shown, given):
                return given.result.pop()
            if self.may_move(shown, given):
                return (yield from self.moved(given))
        memory.part()
        return (yield from self.remade(memory, given))

    def _to_all(self, src: int, give: Views, take: Views) -> Part[None]:
        yield exchange.one_to_all(self._context, src, give, take)

    def _from_all(self, own: memoryview, places: Views) -> Part[None]:
        place = self._context
        chosen = choose_all_gather((own.nbytes,) * place.size, place.costs)
        yield exchange.by(place, chosen, [own], places)


def _length(span: Span) -> int:
    return span.length
