"""What a rank is doing: its answer when the coordinator asks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

from aiodist.runtime import deadlines, whereabouts
from aiodist.runtime.recorder import Record
from aiodist.runtime.work import Work
from aiodist.wire.activity import Activity, Wait, packed, shortened
from aiodist.wire.limits import MAX_PLACES, MAX_WAITS

if TYPE_CHECKING:
    from aiodist.runtime.context import Context
    from aiodist.runtime.seat import Seat


class Doings(Protocol):
    """Whoever can be asked what it is doing."""

    def now(self) -> Activity:
        """From the thread of its loop."""
        ...

    def busy(self, seconds: float, ident: int) -> Activity:
        """From another thread, where the loop, in thread `ident`, has not turned for `seconds`."""
        ...


class SeatDoings:
    """What the rank with a seat is doing, in all of its groups."""

    def __init__(self, seat: Seat) -> None:
        self._seat = seat

    def now(self) -> Activity:
        waits = [wait for context in self._contexts() for wait in self._waits(context)]
        waits.sort(key=lambda wait: -wait.seconds)
        return Activity(
            places=_places(whereabouts.of_tasks(self._seat.loop)),
            last=self._last(),
            waits=tuple(waits[:MAX_WAITS]),
        )

    def busy(self, seconds: float, ident: int) -> Activity:
        return Activity(seconds, _places(whereabouts.of_thread(ident)), self._last())

    def _contexts(self) -> Iterable[Any]:
        return list(self._seat.endpoint.contexts.values())

    def _last(self) -> str:
        context = self._seat.context
        return "" if context is None else shortened(context.recorder.last(context.scope))

    def _waits(self, context: Context) -> Iterator[Wait]:
        for work in context.pending:
            if work.seq is not None and (op := context.ops.get((work.tag, work.seq))) is not None:
                yield self._wait(context, work, work.seq, deadlines.missing(context, op))
        for work in context.p2p.pending:
            record = work.record
            if isinstance(record, Record) and not work.done():
                yield self._wait(context, work, None, [] if record.peer is None else [record.peer])

    def _wait(
        self, context: Context, work: Work[Any], seq: int | None, missing: Iterable[int]
    ) -> Wait:
        ranks = {root: rank for rank, root in enumerate(self._seat.roots)}
        roots = [context.ranks[rank] for rank in missing]
        return Wait(
            context.id,
            shortened(context.group),
            context.epoch,
            work.op,
            shortened(repr(work.tag)),
            seq,
            max(0.0, work.elapsed),
            packed([ranks[root] for root in roots if root in ranks]),
        )


def _places(found: Iterable[str]) -> tuple[str, ...]:
    return tuple([shortened(place) for place in found][:MAX_PLACES])
