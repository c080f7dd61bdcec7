"""Deadlines. A little before one passes, the ranks that are waited for are asked what they are
doing, so that the error can say: directly, of collectives, and by way of the coordinator, who also
knows of those whose event loop does not turn."""

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
from aiodist.types import ANY_TAG
from aiodist.wire import kinds
from aiodist.work import Work

ASK_SECONDS = 1.5
"""So long before a deadline others are asked; but not before half of it is over."""
PART = 2 / 3
"""For so much of the time that is left then the coordinator waits for answers: what it knows of who
gives none has to be here in time, too."""


class Ending(Protocol):
    """What ends a collective."""

    def failed(self, op: Operation, error: BaseException) -> None:
        """Fails `op` with `error`, and tells the others."""
        ...

    def locate(self, error: AiodistError, op: Operation) -> None:
        """Has `error` say in which group, and in what, it happened."""
        ...


class Collectives(Protocol):
    """The collectives of a group. They have deadlines."""

    party: Party
    tags: TagCounts

    @property
    def ends(self) -> Ending: ...

    @property
    def setting_up(self) -> Operation | None:
        """The collective by which the ranks agree on shared memory, if one is pending: others may
        wait for it."""
        ...


class Failing(Protocol):
    """Whoever has the sends and receives that are pending."""

    def fail(self, work: Work[Any], error: AiodistError) -> None:
        """Fails `work`, if it is pending, and lets go of what it has."""
        ...


def arm(calls: Collectives, op: Operation, seconds: float, passed: float = 0.0) -> None:
    """`op` is to fail `seconds` after its call; some have `passed`."""
    ask = _ask_after(seconds)
    after = max(0.0, ask - passed)
    op.timer = calls.party.loop.call_later(after, _ask, calls, op, seconds - ask, seconds)


def _ask_after(seconds: float) -> float:
    """When to ask, for a deadline of `seconds`."""
    return max(seconds - ASK_SECONDS, seconds / 2)


def _ask(calls: Collectives, op: Operation, rest: float, seconds: float) -> None:
    if op.done:
        return
    holder = _holder(calls, op)
    if holder is not None:
        inquire(calls, holder, rest)
    op.timer = calls.party.loop.call_later(rest, _expire, calls, op, seconds)


def inquire(calls: Collectives, op: Operation, seconds: float) -> None:
    """Ask what they do who are missing in `op`, them and the coordinator: there are `seconds` for
    answers."""
    late = ask_whether_entered(calls, op)

    def told(texts: Mapping[int, str]) -> None:
        for rank, text in texts.items():
            op.seen.setdefault(rank, text)

    _ask_coordinator(calls.party, late, told, seconds)


def ask_whether_entered(calls: Collectives, op: Operation) -> list[int]:
    """Ask whoever is missing whether it has entered `op`: these."""
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
    """Ask what `ranks` are doing: `tell` gets it by rank, if it comes within `seconds`."""
    by_root = {party.ranks[rank]: rank for rank in ranks}

    def told(texts: Mapping[int, str]) -> None:
        tell({by_root[root]: text for root, text in texts.items()})

    party.endpoint.ask(list(by_root), told, seconds * PART)


def _expire(calls: Collectives, op: Operation, seconds: float) -> None:
    if op.done:
        return
    holder = _holder(calls, op)
    late = missing(calls, op)
    seen = {} if holder is None else {r: holder.seen[r] for r in late if r in holder.seen}
    text = failures.timeout_text(seconds, late, seen)
    if holder is None:
        text = f"its tag was not free within {seconds:g} s"
    elif holder is not op:
        text = f"ranks of this host have not agreed on shared memory: {text}"
    error = CollectiveTimeoutError(text, missing=late, last_seen=seen)
    if op.seq >= 0:
        calls.ends.failed(op, error)
    else:
        op.close()
        calls.ends.locate(error, op)
        op.work.fail(error)


def _holder(calls: Collectives, op: Operation) -> Operation | None:
    """The operation that others have not entered: `op`, or while it waits for its number, the one
    that it waits for, if that is one."""
    # The others know a collective by its number, so as long as it has none they cannot be told. It
    # stays in line for one, and `Calls._enter` tells them then.
    if op.seq >= 0:
        return op
    return calls.setting_up if op.tag is None else None


def missing(calls: Collectives, op: Operation) -> list[int]:
    """The other ranks that are not known to have entered `op`; while it waits for its number, what
    it waits for."""
    holder = _holder(calls, op)
    if holder is None:
        return []
    entered = holder.heard | {calls.party.rank}
    if holder.lane is not None:
        entered |= set(holder.lane.entered(holder.seq))
    return sorted(set(range(calls.party.size)) - entered)


def arm_message(
    party: Party,
    messages: Failing,
    work: Work[Any],
    timeout: float | None,
    default: float,
    missing: Sequence[int],
) -> Work[Any]:
    """A send or receive, one of `messages`, is to fail in `timeout` seconds (None: `default`), for
    want of the rank in `missing`, if any."""
    seconds = default if timeout is None else timeout
    if not work.done() and seconds != math.inf:
        deadline = _MessageDeadline(party, messages, work, seconds, missing)
        # Otherwise the timer would hold the Work, and what was received with it, for the whole
        # timeout: of many small messages that is much memory.
        work.add_done_callback(deadline.disarm)
    return work


class _MessageDeadline:
    """The deadline of a send or receive."""

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
        self._seen: dict[int, str] = {}  # what the missing rank is doing, in words, by rank
        ask = _ask_after(seconds) if missing else seconds
        call = self._ask if missing else self._expire
        self._timer = party.loop.call_later(ask, call)  # of what is next: to ask, or to fail

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
        error = self._party.error(
            CollectiveTimeoutError,
            f"not matched{whom} within {self._seconds:g} s",
            op=work.op,
            tag=None if work.tag is ANY_TAG else work.tag,
            missing=self._missing,
            last_seen=self._seen,
        )
        self._messages.fail(work, error)
