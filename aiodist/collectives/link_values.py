"""Prepared collectives of values between ranks that are joined by links: broadcast, all_gather,
gather, scatter, all_to_all, barrier.

What they show each other is that of `lane_values`, but in frames: once it is known which bytes the
blobs of all ranks have beside their data, all frames have known lengths, and there is nothing to
parse or to agree on. Blobs lie in one piece of memory, the own one first and the others' behind it
by rank, cyclically: so what `dissemination.all_gather` sends or receives in one round is one view.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple, cast

from aiodist.collectives.lane_values import Given, ValueRecipe
from aiodist.collectives.link_frames import Frames, LinkGroup
from aiodist.collectives.templates import LENGTH, Reading
from aiodist.engine.executor import ALL, Executor
from aiodist.engine.operation import Program
from aiodist.engine.phase import Phase
from aiodist.phases.memories import Blobs
from aiodist.schedules.plan import Recv, Send, Span

ARENA = 640 * 1024
"""Most bytes of the blobs of all ranks. One call at a time has them, of all kinds of a group."""


class Move(NamedTuple):
    """A step of the plan: a frame to `peer`, or from it, with what is in `view`."""

    sends: bool
    peer: int
    view: memoryview


class Laid(NamedTuple):
    """Where all is, as far as known: the steps; what each rank shows, by rank."""

    moves: Sequence[Move]
    shown: Sequence[Reading]


class LinkValues(ValueRecipe):
    """A recipe of ranks that are joined by links, for values of known shapes."""

    on_lane = False

    __slots__ = ("_laid", "arena", "frames")

    def __init__(self, context: LinkGroup, *args: Any) -> None:
        super().__init__(context, *args)
        self.frames = Frames(context, self.call, self.phase.prepared.plan)
        self.arena: memoryview  # where blobs are, see `ARENA`
        self._laid: Laid | None = None  # made where all templates are known

    def _learnt(self) -> None:
        super()._learnt()
        rank, size = self._context.rank, self._context.size
        self._laid = None
        if not all(known for peer, known in enumerate(self._known) if peer != rank):
            return
        around = [(rank + distance) % size for distance in range(size)]
        templates = [self._own if peer == rank else self._known[peer][0] for peer in around]
        ends = [0, *accumulate(template.length for template in templates)]
        if ends[-1] > ARENA:
            return
        moves: list[Move] = []
        for step in self.phase.prepared.plan.steps:
            assert isinstance(step, (Send, Recv))
            first = (step.spans[0].start - rank) % size
            stop = first + sum(map(_length, step.spans))
            view = self.arena[ends[first] : ends[stop]]
            moves.append(Move(isinstance(step, Send), step.peer, view))
        shown = [
            Reading(template, self.arena[start:])
            for start, template in zip(ends, templates, strict=False)
        ]
        self._laid = Laid(moves, [shown[(peer - rank) % size] for peer in range(size)])

    def begin(self, given: Given) -> tuple[int, Executor | None]:
        """See `LinkRecipe.begin`. The steps are those of the executor, which would have more to
        look at in each of them."""
        laid = self._laid
        if laid is None:
            return 0, None
        own = laid.shown[self._context.rank]
        own.write()
        for data, flat in zip(own.data, given.flats, strict=False):
            data.flat[:] = flat
        frames = self.frames
        for number, (sends, peer, view) in enumerate(laid.moves):
            prefix = frames.prefix(len(view))
            if sends:
                frames.links[peer].send_copy(prefix, view)
            elif not frames.has_come(peer, prefix, view):
                return number, None
        return ALL, None

    def complete(self, x: Any, given: Given) -> bool:
        """All frames are here: whether they are what they were known to be. Then there is the
        result."""
        assert self._laid is not None
        shown = self._laid.shown
        return all(map(Reading.is_there, shown)) and self.take(shown, given)

    def go_on(self, x: Any, given: Given, done: int) -> tuple[Executor, Program]:
        """What goes on with it the ordinary way, where so many steps are done."""
        laid, rank = self._laid, self._context.rank
        if laid is None:
            program = self._make(self._context, *given.args).start(False)
            phase = cast(Phase, next(program))
            return Executor(phase, self.frames), self._rest(program, phase, given)
        steps = self.phase.prepared.plan.steps
        done = len(steps) if done == ALL else done
        own = bytes(self.arena[LENGTH : self._own.length])
        memory = Blobs(rank, self._context.size, own)
        for step, move in zip(steps[:done], laid.moves, strict=False):
            if isinstance(step, Recv):
                memory.incoming(step.spans, len(move.view))[:] = move.view
                memory.arrived(step.spans)
        phase = Phase(self.phase.prepared, memory)
        return Executor(phase, self.frames, done=done), self._ended(memory, self.keep(given))

    def _ended(self, memory: Blobs, given: Given) -> Program:
        """The blobs of all are here. Where they are what they were known to be, that is all; else
        the call is made anew, and goes on from there."""
        if self._are_known(memory.blobs):
            templates = [known[0] if known else self._own for known in self._known]
            shown = [
                Reading(template, memoryview(bytes(LENGTH) + blob))
                for template, blob in zip(templates, memory.blobs, strict=True)
            ]
            if self.take(shown, given):
                return given.result.pop()
        return (yield from self.remade(memory, given))


def _length(span: Span) -> int:
    return span.length
