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
    holder = _holder(context, op)
    if holder is not None:
        context.inquire(holder, missing(context, holder))
    op.timer = context.loop.call_later(rest, _expire, context, op, seconds)


def _expire(context: Context, op: Operation, seconds: float) -> None:
    if op.done:
        return
    holder = _holder(context, op)
    late = [] if holder is None else missing(context, holder)
    seen = {} if holder is None else {r: holder.seen[r] for r in late if r in holder.seen}
    text = failures.timeout_text(seconds, late, seen)
    if holder is None:
        text = f"its tag was not free within {seconds:g} s"
    elif holder is not op:
        text = f"ranks of this host have not agreed on shared memory: {text}"
    error = CollectiveTimeoutError(text, missing=late, last_seen=seen)
    if op.seq >= 0:
        context.failed(op, error)
    else:
        op.close()
        context.locate(error, op)
        op.work.fail(error)


def _holder(context: Context, op: Operation) -> Operation | None:
    """The operation that others have not entered: `op`, or while it waits for its number, the one
    that it waits for, if that is one."""
    if op.seq >= 0:
        return op
    return context.setting_up if op.tag is None else None


def missing(context: Context, op: Operation) -> list[int]:
    """The other ranks that are not known to have entered `op`."""
    entered = op.heard | {context.rank}
    if op.lane is not None:
        entered |= set(op.lane.entered(op.seq))
    return sorted(set(range(context.size)) - entered)
