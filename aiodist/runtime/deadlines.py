"""Deadlines. Of collectives: a little before one passes, who has not entered is asked what it is
doing, so that the error can say."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from aiodist.errors import CollectiveTimeoutError
from aiodist.runtime import failures
from aiodist.runtime.operation import Operation
from aiodist.runtime.work import Work
from aiodist.types import ANY_TAG
from aiodist.wire import kinds
from aiodist.wire.frames import pack_fields

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
        inquire(context, holder)
    op.timer = context.loop.call_later(rest, _expire, context, op, seconds)


def inquire(context: Context, op: Operation) -> None:
    """Ask whoever is missing whether it has entered `op`."""
    context.tags.keep(op.tag)
    header = pack_fields(kinds.INQUIRE, context.id, op.tag, op.seq)
    for peer in missing(context, op):
        context.endpoint.send(context.ranks[peer], header, urgent=True)


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


def check_timeout(timeout: float | None) -> None:
    """Raises TypeError and ValueError for what is no deadline."""
    if timeout is None:
        return
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
        raise TypeError(f"timeout is a number of seconds or None, not {timeout!r}")
    if not timeout > 0:
        raise ValueError(f"timeout is more than 0 seconds, not {timeout!r}")


def arm_message(
    context: Context,
    work: Work[Any],
    timeout: float | None,
    default: float,
    missing: Sequence[int],
) -> Work[Any]:
    """A send or receive is to fail in `timeout` seconds (None: `default`), for want of the rank in
    `missing`, if any."""
    seconds = default if timeout is None else timeout
    if not work.done() and seconds != math.inf:
        timer = context.loop.call_later(seconds, _expire_message, context, work, seconds, missing)
        work.add_done_callback(partial(_disarm, timer))
    return work


def _expire_message(
    context: Context, work: Work[Any], seconds: float, missing: Sequence[int]
) -> None:
    whom = f" by rank {missing[0]}" if missing else ""
    error = context.error(
        CollectiveTimeoutError,
        f"not matched{whom} within {seconds:g} s",
        op=work.op,
        tag=None if work.tag is ANY_TAG else work.tag,
        missing=missing,
    )
    context.p2p.fail(work, error)


def _disarm(timer: asyncio.TimerHandle, work: asyncio.Future[Any]) -> None:
    timer.cancel()
