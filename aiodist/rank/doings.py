"""What a rank is doing: its answer to the coordinator."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
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
        for context in self._actor.contexts:
            context.calls.waiting.settle()
        pending = [
            one
            for context in self._actor.contexts
            for one in pending_in(context)
            if not one.work.done()
        ]
        pending.sort(key=lambda one: -one.work.elapsed)
        ranks = {root: rank for rank, root in enumerate(self._actor.roots)}
        return self._activity(
            places=_places(whereabouts.of_tasks(self._actor.loop, [one.work for one in pending])),
            waits=tuple([wait_of(one, ranks) for one in pending[:MAX_WAITS]]),
        )

    def busy(self, seconds: float, ident: int) -> Activity:
        return self._activity(busy=seconds, places=_places(whereabouts.of_thread(ident)))

    def _activity(self, **known: Any) -> Activity:
        """Add what any thread may read."""
        traffic = self._actor.endpoint.traffic
        called = traffic.called + sum([context.calls.called for context in self._actor.contexts])
        sent, received = traffic.payload
        return Activity(
            **known,
            last=self._last(),
            collectives=called,
            sent=sent,
            received=received,
            saved=traffic.saved,
        )

    def _last(self) -> str:
        context = self._actor.context
        return "" if context is None else shortened(context.calls.records.last())


class Pending(NamedTuple):
    """An operation that waits.

    `op` is set for collectives, and `seq` is its number.
    """

    work: Work[Any]
    context: Context
    op: Operation | None = None
    seq: int | None = None


def pending_in(context: Context) -> Iterator[Pending]:
    """Yield what waits in a context, except aiodist's own works, and calls that are not operations
    yet."""
    for op in context.calls.ops.values():
        if op.tag != SETUP_TAG:
            yield Pending(op.work, context, op, op.seq)
    for op in context.calls.deferred:  # without a number, because a tag may count anew
        yield Pending(op.work, context, op)
    if not context.records.hides_messages:
        for work in context.p2p.pending:
            yield Pending(work, context)
    for work in context.requests:
        yield Pending(work, context)


def wait_of(pending: Pending, ranks: Mapping[int, int]) -> Wait:
    """Describe it for the coordinator. `ranks` are those of the view, by root."""
    work, context, _, seq = pending
    missing = missing_in(pending)
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


def missing_in(pending: Pending) -> Sequence[int]:
    """Return the ranks of its group that an operation waits for, as far as known here."""
    work, context, op, _ = pending
    if op is not None:
        return deadlines.missing(context.calls, op)
    if work in context.requests:
        return (context.requests[work],)
    if isinstance(work.record, Record) and work.record.peer is not None:
        return (work.record.peer,)
    return ()


def _places(found: Iterable[str]) -> tuple[str, ...]:
    return tuple([shortened(place) for place in found][:MAX_PLACES])
