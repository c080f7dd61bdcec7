"""Deadlines of operations.

Shortly before a deadline, this rank asks the missing ranks what they are doing, so that the error
can say it. It asks them directly about collectives. It also asks the coordinator, because that
knows about ranks whose event loop is blocked. If all ranks have entered a collective, it asks about
all others, because one of them may have stopped since.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from aiodist.engine import failures
from aiodist.engine.operation import Operation
from aiodist.engine.tags import TagCounts
from aiodist.errors import AiodistError, CollectiveTimeoutError
from aiodist.links.party import Party
from aiodist.recorder import name_of
from aiodist.types import ANY_TAG
from aiodist.wire import kinds
from aiodist.work import Work

ASK_SECONDS = 1.5
"""How many seconds before a deadline others are asked, but never before half of the time is over.
"""
LEAST_SILENCE = 0.25
"""A rank that has less time to answer is not taken for silent, because its loop may be busy."""
PART = 2 / 3
"""The part of the remaining time in which the coordinator waits for answers. Its report about
silent ranks has to be here in time, too."""


class Ending(Protocol):
    def failed(self, op: Operation, error: BaseException) -> None:
        """Fails `op` with `error`, and tells the others."""
        ...

    def locate(self, error: AiodistError, op: Operation) -> None:
        """Adds the group and the operation to `error`."""
        ...


class Collectives(Protocol):
    """The collectives of a group, which have deadlines."""

    party: Party
    tags: TagCounts

    @property
    def ends(self) -> Ending: ...


class Failing(Protocol):
    """The pending sends and receives."""

    def fail(self, work: Work[Any], error: AiodistError) -> None:
        """Fails `work`, if it is pending, and releases what it holds."""
        ...

    def is_unmatched(self, work: Work[Any]) -> bool:
        """Returns whether no other rank has begun to take, or to send, the message."""
        ...


def arm(calls: Collectives, op: Operation, seconds: float, passed: float = 0.0) -> None:
    """Make `op` fail `seconds` after its call, unless it is done. `passed` seconds are over
    already."""
    if op.done or seconds == math.inf:
        return
    ask = _ask_after(seconds)
    after = max(0.0, ask - passed)
    op.timer = calls.party.loop.call_later(after, _ask, calls, op, seconds - ask, seconds)


def _ask_after(seconds: float) -> float:
    """Return after how many seconds to ask, for a deadline of `seconds`."""
    return max(seconds - ASK_SECONDS, seconds / 2)


def _ask(calls: Collectives, op: Operation, rest: float, seconds: float) -> None:
    if op.done:
        return
    # First of all, so that an error of a question does not cost the deadline.
    op.timer = calls.party.loop.call_later(rest, _expire, calls, op, seconds)
    if op.seq >= 0:
        inquire(calls, op, rest)


def inquire(calls: Collectives, op: Operation, seconds: float) -> None:
    """Ask the missing ranks of `op`, and the coordinator, what these ranks are doing, or all others
    if none is missing. Answers have `seconds`."""
    party = calls.party
    late = ask_whether_entered(calls, op)

    def told(texts: Mapping[int, str]) -> None:
        for rank, text in texts.items():
            op.seen.setdefault(rank, text)

    others = [rank for rank in range(party.size) if rank != party.rank]
    if late or seconds * PART >= LEAST_SILENCE:
        _ask_coordinator(party, late or others, told, seconds)


def ask_whether_entered(calls: Collectives, op: Operation) -> list[int]:
    """Ask the missing ranks whether they have entered `op`, and return them."""
    calls.tags.keep(op.tag)
    late = missing(calls, op)
    for peer in late:
        calls.party.say(peer, kinds.INQUIRE, op.tag, op.seq)
    return late


def _ask_coordinator(
    party: Party,
    ranks: Sequence[int],
    tell: Callable[[Mapping[int, str]], None],
    seconds: float,
) -> None:
    """Ask the coordinator what `ranks` are doing. It calls `tell` with texts by rank, if they come
    within `seconds`."""
    by_root = {party.ranks[rank]: rank for rank in ranks}

    def told(texts: Mapping[int, str]) -> None:
        tell({by_root[root]: text for root, text in texts.items()})

    party.endpoint.owner.ask(list(by_root), told, seconds * PART)


def _expire(calls: Collectives, op: Operation, seconds: float) -> None:
    if op.done:
        return
    if op.seq < 0:
        # Other ranks know a collective by its number, so they cannot be told about this one. It
        # still gets a number in its turn, and `Calls._enter` tells them then.
        error = CollectiveTimeoutError(f"its tag was not free within {seconds:g} s")
        op.close()
        calls.ends.locate(error, op)
        op.work.fail(error)
        return
    late: Sequence[int] = missing(calls, op)
    if late:
        seen = {rank: op.seen[rank] for rank in late if rank in op.seen}
        text = failures.timeout_text(seconds, late, seen, name_of(op.work.op, op.tag, op.seq))
    else:
        late = sorted(seen := failures.silent(op.seen))
        text = failures.stuck_text(seconds, seen, op.waiting_for)
    calls.ends.failed(op, CollectiveTimeoutError(text, missing=late, last_seen=seen))


def missing(calls: Collectives, op: Operation) -> list[int]:
    """Return the other ranks that may not have entered `op`. If `op` has no number yet, it waits
    for its tag, and for no rank."""
    if op.seq < 0:
        return []
    entered = op.heard | {calls.party.rank}
    if op.lane is not None:
        entered |= set(op.lane.entered(op.seq))
    return sorted(set(range(calls.party.size)) - entered)


def arm_message(
    party: Party,
    messages: Failing,
    work: Work[Any],
    timeout: float | None,
    default: float,
    missing: Sequence[int],
) -> Work[Any]:
    """Make a send or receive of `messages` fail after `timeout` seconds (None: after `default`).

    `missing`: the rank that it waits for, or empty if any rank may come.
    """
    seconds = default if timeout is None else timeout
    if not work.done() and seconds != math.inf:
        deadline = _MessageDeadline(party, messages, work, seconds, missing)
        # Otherwise the timer would keep the Work and its message for the whole timeout. With many
        # small messages that is much memory.
        work.add_done_callback(deadline.disarm)
    return work


class _MessageDeadline:
    def __init__(
        self,
        party: Party,
        messages: Failing,
        work: Work[Any],
        seconds: float,
        missing: Sequence[int],
    ) -> None:
        self._party = party
        self._messages = messages
        self._work = work
        self._seconds = seconds
        self._missing = missing
        self._seen: dict[int, str] = {}  # by rank, what it is doing
        ask = _ask_after(seconds) if missing else seconds
        call = self._ask if missing else self._expire
        self._timer = party.loop.call_later(ask, call)  # for the next thing to do: ask, or fail

    def disarm(self, work: asyncio.Future[Any]) -> None:
        self._timer.cancel()

    def _ask(self) -> None:
        rest = self._seconds - _ask_after(self._seconds)
        self._timer = self._party.loop.call_later(rest, self._expire)
        _ask_coordinator(self._party, self._missing, self._seen.update, rest)

    def _expire(self) -> None:
        whom = ""
        if self._missing:
            [peer] = self._missing
            whom = f" by rank {peer} ({self._seen.get(peer, 'no answer')})"
        work = self._work
        what = "matched" if self._messages.is_unmatched(work) else "completed"
        error = self._party.error(
            CollectiveTimeoutError,
            f"not {what}{whom} within {self._seconds:g} s",
            op=work.op,
            tag=None if work.tag is ANY_TAG else work.tag,
            missing=self._missing,
            last_seen=self._seen,
        )
        self._messages.fail(work, error)
