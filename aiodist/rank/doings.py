"""What a rank is doing: its answer when the coordinator asks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any, NamedTuple

from aiodist.engine import deadlines
from aiodist.engine.operation import Operation
from aiodist.engine.tags import SETUP_TAG
from aiodist.rank import whereabouts
from aiodist.rank.actor import RankActor
from aiodist.rank.context import Context
from aiodist.rank.counting import Counting
from aiodist.recorder import Record
from aiodist.wire.activity import Activity, Wait, packed, shortened
from aiodist.wire.counts import Counts
from aiodist.wire.limits import MAX_PLACES, MAX_WAITS
from aiodist.work import Work


class RankDoings:
    """What the rank of an actor is doing, in all of its groups."""

    def __init__(self, actor: RankActor) -> None:
        self._actor = actor
        self._counting = Counting(actor)

    def counts(self, *, measure: bool) -> Counts:
        if measure:
            self._counting.measure()
        return self._counting.now()

    def now(self) -> Activity:
        pending = [
            one
            for context in self._actor.contexts
            for one in _pending(context)
            if not one.work.done()
        ]
        pending.sort(key=lambda one: -one.work.elapsed)
        ranks = {root: rank for rank, root in enumerate(self._actor.roots)}
        return self._activity(
            places=_places(whereabouts.of_tasks(self._actor.loop, [one.work for one in pending])),
            waits=tuple([_wait(one, ranks) for one in pending[:MAX_WAITS]]),
        )

    def busy(self, seconds: float, ident: int) -> Activity:
        return self._activity(busy=seconds, places=_places(whereabouts.of_thread(ident)))

    def _activity(self, **known: Any) -> Activity:
        """With what any thread may ask for."""
        endpoint = self._actor.endpoint
        called = endpoint.called + sum([context.calls.called for context in self._actor.contexts])
        sent, received = endpoint.payload_bytes
        return Activity(
            **known, last=self._last(), collectives=called, sent=sent, received=received
        )

    def _last(self) -> str:
        context = self._actor.context
        return "" if context is None else shortened(context.calls.records.last())


class _Pending(NamedTuple):
    """`op`: of a collective. `seq`: its number, also one that it will get."""

    work: Work[Any]
    context: Context
    op: Operation | None = None
    seq: int | None = None


def _pending(context: Context) -> Iterator[_Pending]:
    context.calls.waiting.settle()
    for op in context.calls.ops.values():
        if op.tag != SETUP_TAG:
            yield _Pending(op.work, context, op, op.seq)
    upcoming = count(context.calls.tags.upcoming(None))
    for op in context.calls.deferred:
        # A tag that is not free may count anew.
        yield _Pending(op.work, context, op, next(upcoming) if op.tag is None else None)
    for work in context.p2p.pending:
        yield _Pending(work, context)


def _wait(pending: _Pending, ranks: Mapping[int, int]) -> Wait:
    """`ranks`: those of the view, by root."""
    work, context, op, seq = pending
    missing: Sequence[int] = ()
    if op is not None:
        missing = deadlines.missing(context.calls, op)
    elif isinstance(work.record, Record) and work.record.peer is not None:
        missing = (work.record.peer,)
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
