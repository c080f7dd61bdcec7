"""Collectives that wait and are no operations yet: of many calls at once, each is no more than what
it was called with.

An `Operation` is ready for whatever may come. Most small collectives meet nothing of it: what they
wait for comes as expected, from a post or with their turn on a lane, and then they are done. So
they wait as what they are, found by tag and number; some know which frames come, and take these
(`Taking`). Whatever else happens to one (a frame that is about it, a cancel, the loss of a rank,
the end of the group, or that it has waited for `LONG` or half its time) makes an operation of it,
`to_operation`, and is dealt with as ever. So there is no deadline, verdict or cancellation in here.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any, Protocol

from aiodist.engine.early import Key
from aiodist.engine.operation import Operation
from aiodist.recorder import Records
from aiodist.transports.base import Landing
from aiodist.work import Work

LONG = 1.0
"""Seconds after which a call that waits becomes an operation. A call that was given less than twice
that becomes one after half its time."""


class WaitingCall(Protocol):
    """One that waits. `key` is its tag and number, `call` what was called, in words, and `seconds`
    the time that it was given."""

    @property
    def key(self) -> Key: ...

    @property
    def call(self) -> bytes: ...

    @property
    def work(self) -> Work[Any]: ...

    @property
    def seconds(self) -> float: ...

    def to_operation(self) -> Operation | None:
        """Become an operation, and wait here no more; None: the group has ended."""
        ...


class Taking(WaitingCall, Protocol):
    """One that waits for a frame, and takes that itself."""

    def message(self, src: int, slot: int, call: bytes, nbytes: int) -> Landing | None:
        """A frame of `src` begins: where its payload goes. None: it is not the one that is waited
        for, and is for the operation that the call becomes by that."""
        ...


class WaitingCalls:
    """The waiting calls of one group."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        records: Records,
        cancel: Callable[[Operation, Work[Any]], None],
    ) -> None:
        self.by_key: dict[Key, WaitingCall] = {}  # the oldest first
        self.takers: dict[Key, Taking] = {}  # those of them that take frames
        self._loop = loop
        self._records = records  # hear of each of them
        self._cancel = cancel  # gives an operation up, as its user has cancelled it
        self._timer: asyncio.TimerHandle | None = None  # of the first that is due
        self._due = math.inf  # when that is
        records.waiting = self.all

    def wait(self, call: WaitingCall) -> None:
        """`call`, which is among them, is not done within the call."""
        self._records.waits(call.work, call.call)
        call.work._on_cancel = self._cancelled
        if (due := _due(call)) < self._due:
            self._arm(due)

    def all(self) -> list[tuple[Work[Any], bytes]]:
        """Their Works, and what was called. Any thread may ask."""
        return [(call.work, call.call) for call in list(self.by_key.values())]

    def operation(self, key: Key) -> Operation | None:
        """The call with this tag and number, as an operation from here on; None: none waits."""
        call = self.by_key.get(key)
        return None if call is None else call.to_operation()

    def settle(self) -> None:
        """All go on as operations."""
        for call in list(self.by_key.values()):
            if call.key in self.by_key:
                call.to_operation()
        self._arm(math.inf)

    def _arm(self, due: float) -> None:
        """Look at them when the first one is `due`; inf: none is."""
        if self._timer is not None:
            self._timer.cancel()
        self._due = due
        self._timer = None if due == math.inf else self._loop.call_at(due, self._waits_long)

    def _cancelled(self, work: Work[Any]) -> None:
        assert work.seq is not None
        operation = self.operation((work.tag, work.seq))
        if operation is not None and not operation.done:
            self._cancel(operation, work)

    def _waits_long(self) -> None:
        """Have those that have waited for long go on as operations, which have deadlines."""
        now = self._due
        for call in list(self.by_key.values()):
            if _due(call) <= now and call.key in self.by_key:
                call.to_operation()
        self._arm(min(map(_due, self.by_key.values()), default=math.inf))


def _due(call: WaitingCall) -> float:
    """When `call` becomes an operation, by the clock of the loop."""
    seconds = call.seconds
    if seconds == math.inf:
        return seconds
    return call.work._started + (LONG if seconds >= 2 * LONG else seconds / 2)
