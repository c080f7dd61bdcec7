"""What a rank is doing: its answer when the coordinator asks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from aiodist.runtime import deadlines, whereabouts
from aiodist.runtime.lane_setup import SETUP_TAG
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
        pending = [
            (work, context)
            for context in self._contexts()
            for work in {id(one): one for one in _pending(context)}.values()
            if not work.done()
        ]
        pending.sort(key=lambda pair: -pair[0].elapsed)
        ranks = {root: rank for rank, root in enumerate(self._seat.roots)}
        return self._activity(
            places=_places(whereabouts.of_tasks(self._seat.loop)),
            waits=tuple([_wait(work, context, ranks) for work, context in pending[:MAX_WAITS]]),
        )

    def busy(self, seconds: float, ident: int) -> Activity:
        return self._activity(busy=seconds, places=_places(whereabouts.of_thread(ident)))

    def _activity(self, **known: Any) -> Activity:
        """With what any thread may ask for."""
        endpoint = self._seat.endpoint
        called = endpoint.called + sum([context.called for context in self._contexts()])
        sent, received = endpoint.payload_bytes
        return Activity(
            **known, last=self._last(), collectives=called, sent=sent, received=received
        )

    def _contexts(self) -> Iterable[Any]:
        return list(self._seat.endpoint.contexts.values())

    def _last(self) -> str:
        context = self._seat.context
        return "" if context is None else shortened(context.recorder.last(context.scope))


def _pending(context: Context) -> list[Work[Any]]:
    """What is pending: of collectives, those that have a number."""
    collectives = [op.work for op in context.ops.values() if op.tag != SETUP_TAG]
    return [*collectives, *context.p2p.pending]


def _wait(work: Work[Any], context: Context, ranks: Mapping[int, int]) -> Wait:
    """`ranks`: those of the view, by root."""
    op = None if work.seq is None else context.ops.get((work.tag, work.seq))
    missing: Sequence[int] = ()
    if op is not None:
        missing = deadlines.missing(context, op)
    elif isinstance(work.record, Record) and work.record.peer is not None:
        missing = (work.record.peer,)
    roots = [context.ranks[rank] for rank in missing]
    return Wait(
        context.id,
        shortened(context.group),
        context.epoch,
        work.op,
        shortened(repr(work.tag)),
        work.seq if op is not None else None,
        max(0.0, work.elapsed),
        packed([ranks[root] for root in roots if root in ranks]),
    )


def _places(found: Iterable[str]) -> tuple[str, ...]:
    return tuple([shortened(place) for place in found][:MAX_PLACES])
