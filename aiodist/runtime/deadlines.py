"""Deadlines of collectives: a little before one passes, who has not entered is asked what it is
doing, so that the error can say."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiodist.errors import CollectiveTimeoutError
from aiodist.runtime import failures
from aiodist.runtime.operation import Operation

if TYPE_CHECKING:
    from aiodist.runtime.context import Context


def arm(context: Context, op: Operation, seconds: float) -> None:
    """`op` is to fail in `seconds`."""
    ask = max(seconds - 1.0, seconds * 0.8)
    op.timer = context.loop.call_later(ask, _ask, context, op, seconds - ask, seconds)


def _ask(context: Context, op: Operation, rest: float, seconds: float) -> None:
    if op.done:
        return
    if op.seq >= 0:
        context.inquire(op, missing(context, op))
    op.timer = context.loop.call_later(rest, _expire, context, op, seconds)


def _expire(context: Context, op: Operation, seconds: float) -> None:
    if op.done:
        return
    if op.seq < 0:
        op.close()
        error = CollectiveTimeoutError(f"its tag was not free within {seconds:g} s")
        context.locate(error, op)
        op.work.fail(error)
        return
    late = missing(context, op)
    seen = {rank: op.seen[rank] for rank in late if rank in op.seen}
    context.failed(
        op,
        CollectiveTimeoutError(
            failures.timeout_text(seconds, late, seen), missing=late, last_seen=seen
        ),
    )


def missing(context: Context, op: Operation) -> list[int]:
    """The other ranks that are not known to have entered `op`."""
    entered = op.heard | {context.rank}
    if op.lane is not None:
        entered |= set(op.lane.entered(op.seq))
    return sorted(set(range(context.size)) - entered)
