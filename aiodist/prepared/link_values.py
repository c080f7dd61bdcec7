"""Prepared collectives of values between ranks that are joined by links: broadcast, all_gather,
gather, scatter, all_to_all, barrier.

What they show each other is that of `lane_values`, but in frames: once it is known which bytes the
blobs of all ranks have beside their data, all frames have known lengths, and there is nothing to
parse or to agree on. Blobs lie in one piece of memory, by rank, cyclically: so what is sent or
received in one frame is one view. The first is the own one where the plan is
`dissemination.all_gather`, and that of rank 0 where it is `star.all_gather`.

Arrays whose data is too large for a blob, and goes where it is wanted in a second phase, are
prepared as well (`LinkValues.moves`): a broadcast into arrays of all, an all_gather into one array.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, cast

from aiodist.collectives import exchange
from aiodist.collectives.templates import LENGTH, Reading
from aiodist.engine.executor import ALL, Executor
from aiodist.engine.operation import Program
from aiodist.engine.phase import Phase, Spans, prepared
from aiodist.phases.base import Part
from aiodist.phases.memories import Blobs
from aiodist.prepared.lane_values import Given, ValueRecipe, Views
from aiodist.prepared.link_frames import Frames, LinkGroup
from aiodist.schedules import star
from aiodist.schedules.choose_values import choose_all_gather, choose_broadcast
from aiodist.schedules.plan import Plan, Recv, Send, Span

ARENA = 640 * 1024
"""Most bytes of the blobs of all ranks. One call at a time has them, of all kinds of a group."""


class Move(NamedTuple):
    """A step of the plan: a frame to `peer`, or from it, with what is in `view`."""

    sends: bool
    peer: int
    view: memoryview


class Laid(NamedTuple):
    """Where all is, as far as known: the steps; what is in a frame, by its spans; the own blob; and
    what each rank shows, by rank."""

    moves: Sequence[Move]
    frames: Mapping[Spans, memoryview]
    own: memoryview
    shown: Sequence[Reading]


class Route(NamedTuple):
    """The way of the one frame: of which rank it comes, if of any, and to whom it goes, each with
    its number among all frames between the two."""

    comes: tuple[int, int] | None
    goes: Sequence[tuple[int, int]]


def route_of(words: Plan, data: Plan) -> Route | None:
    """The route of plan `data`, which follows plan `words`. None: it is none of one frame."""
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


class LaidBlobs(Blobs):
    """The blobs of a call that waits, in the arena: there is one such call at a time. Where a frame
    has another length than was known, they have to part, each to memory of its own."""

    def __init__(self, rank: int, size: int, laid: Laid, come: Iterable[Spans]) -> None:
        super().__init__(rank, size, b"")
        self.laid = laid
        self.is_laid = True
        self._come = [*come]  # the frames that have, in their places
        self._coming: set[Spans] = set()  # those that are to be in their places

    def outgoing(self, spans: Spans) -> Sequence[memoryview]:
        return (self.laid.frames[spans],) if self.is_laid else super().outgoing(spans)

    def incoming(self, spans: Spans, nbytes: int) -> memoryview:
        place = self.laid.frames[spans]
        if self.is_laid and nbytes == len(place):
            self._coming.add(spans)
            return place
        self.part()
        return super().incoming(spans, nbytes)

    def arrived(self, spans: Spans) -> None:
        if spans not in self._coming:
            super().arrived(spans)
            return
        self._coming.discard(spans)
        if self.is_laid:
            self._come.append(spans)
        else:
            self.read(spans, self.laid.frames[spans])

    def part(self) -> None:
        """Take the blobs out of the arena."""
        if self.is_laid:
            self.is_laid = False
            self.blobs[self._rank] = bytes(self.laid.own[LENGTH:])
            for spans in self._come:
                self.read(spans, self.laid.frames[spans])


class LinkValues(ValueRecipe):
    """A recipe of ranks that are joined by links, for values of known shapes."""

    on_lane = False
    moves = frozenset({"broadcast", "all_gather"})

    __slots__ = ("_first", "_is_routed", "_laid", "_route", "arena", "frames")

    def __init__(self, context: LinkGroup, *args: Any) -> None:
        super().__init__(context, *args)
        self.frames = Frames(context, self.call, self.phase.prepared.plan)
        self.arena: memoryview  # where blobs are, see `ARENA`
        self._laid: Laid | None = None  # made where all templates are known
        self._route: Route | None = None  # see `route`, where that was looked for
        self._is_routed = True
        # The rank whose blob lies first.
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
        frames: dict[Spans, memoryview] = {}
        for step in self.phase.prepared.plan.steps:
            assert isinstance(step, (Send, Recv))
            first = (step.spans[0].start - origin) % size
            stop = first + sum(map(_length, step.spans))
            view = frames.setdefault(step.spans, self.arena[ends[first] : ends[stop]])
            moves.append(Move(isinstance(step, Send), step.peer, view))
        shown = [
            Reading(template, self.arena[start:])
            for start, template in zip(ends, templates, strict=False)
        ]
        at = (rank - origin) % size
        own = self.arena[ends[at] : ends[at + 1]]
        self._laid = Laid(moves, frames, own, [shown[p - origin] for p in range(size)])

    def begin(self, given: Given) -> tuple[int, Executor | None]:
        """See `LinkRecipe.begin`. The steps are those of the executor, which would have more to
        look at in each of them."""
        laid = self._laid
        if laid is None:
            self.frames.look_at_all()
            return 0, None
        own = laid.shown[self._context.rank]
        if given.shown is not None:
            laid.own[:] = given.shown
        else:
            own.write()
            for data, flat in zip(own.data, given.flats, strict=False):
                data.flat[:] = flat
        frames = self.frames
        last, made = None, b""
        for number, (sends, peer, view) in enumerate(laid.moves):
            prefix = frames.prefix(len(view))
            if sends:
                if view is not last:  # else another one gets the same frame
                    last, made = view, prefix + view
                frames.links[peer].send_copy(prefix, view, made)
            elif not frames.has_come(peer, prefix, view):
                return number, None
        return ALL, None

    def complete(self, x: Any, given: Given) -> bool:
        """All frames are here: whether they are what they were known to be. Then there is the
        result."""
        assert self._laid is not None
        shown = self._laid.shown
        return all(map(Reading.is_there, shown)) and self.take(shown, given)

    def route(self, given: Given) -> Route | None:
        """The way of the data of a broadcast, where that is one frame behind blobs that are what
        they are known to be."""
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
        """Where so many steps are done, and all that is left is to take one frame: of which rank,
        and where it goes."""
        assert self._laid is not None
        if done != len(self._laid.moves) - 1:
            return None
        last = self._laid.moves[done]
        return None if last.sends else (last.peer, last.view)

    @property
    def is_known(self) -> bool:
        """All frames are here: whether the blobs are what they were known to be."""
        assert self._laid is not None
        return all(map(Reading.is_there, self._laid.shown))

    def go_on(self, x: Any, given: Given, done: int) -> tuple[Executor, Program]:
        """What goes on with it the ordinary way, where so many steps are done."""
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

    def _ended(self, memory: LaidBlobs, given: Given) -> Program:
        """The blobs of all are here. Where they are what they were known to be, that is all; else
        the call is made anew, and goes on from there."""
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
