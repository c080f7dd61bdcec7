"""Collectives that wait, and are not operations yet, because an operation takes time to make.

An `Operation` is ready for everything that may happen. Most small collectives need nothing of that:
their post comes, or their turn on a lane, and they are done. So they wait as they are, listed by
tag and number. Some know which frame they wait for, and take it themselves (`Taking`).

Everything else turns a waiting call into an operation (`to_operation`): another frame about it, a
cancel, the loss of a rank, or the end of the group. So does a wait of `LONG`, or of half its time.
So this module needs no deadlines, verdicts or cancellations.
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
"""Seconds after which a waiting call becomes an operation. A call with less than twice this time
becomes one after half of it."""


class WaitingCall(Protocol):
    """A call that waits. `key`: its tag and number. `call`: what was called, in words. `seconds`:
    its timeout."""

    @property
    def key(self) -> Key: ...

    @property
    def call(self) -> bytes: ...

    @property
    def work(self) -> Work[Any]: ...

    @property
    def seconds(self) -> float: ...

    def to_operation(self) -> Operation | None:
        """Becomes an operation, and does not wait here any more. None: the group has ended."""
        ...


class Taking(WaitingCall, Protocol):
    """A call that waits for a frame, and takes it itself."""

    def message(self, src: int, slot: int, call: bytes, nbytes: int) -> Landing | None:
        """Returns the landing for a frame of `src` that begins. None: another frame was expected,
        so the call has to become an operation, which takes this one."""
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
        self._records = records
        self._cancel = cancel  # gives an operation up, because the user cancelled it
        self._timer: asyncio.TimerHandle | None = None  # of the first that is due
        self._due = math.inf  # when it is due
        records.waiting = self.all

    def wait(self, call: WaitingCall) -> None:
        """Note that `call`, which is listed, is not done within the call."""
        self._records.waits(call.work, call.call)
        call.work._on_cancel = self._cancelled
        if (due := _due(call)) < self._due:
            self._arm(due)

    def all(self) -> list[tuple[Work[Any], bytes]]:
        """Return their Works, and what was called. Any thread may ask."""
        return [(call.work, call.call) for call in list(self.by_key.values())]

    def operation(self, key: Key) -> Operation | None:
        """Return the call with this tag and number as an operation. None: no such call waits."""
        call = self.by_key.get(key)
        return None if call is None else call.to_operation()

    def settle(self) -> None:
        """Make operations of all waiting calls."""
        for call in list(self.by_key.values()):
            if call.key in self.by_key:
                call.to_operation()
        self._arm(math.inf)

    def _arm(self, due: float) -> None:
        """Look at the calls again when the first is `due`. inf: none is."""
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
        """Make operations of calls that have waited long, because operations have deadlines."""
        now = self._due
        for call in list(self.by_key.values()):
            if _due(call) <= now and call.key in self.by_key:
                call.to_operation()
        self._arm(min(map(_due, self.by_key.values()), default=math.inf))


def _due(call: WaitingCall) -> float:
    """Return when `call` becomes an operation, by the clock of the loop."""
    seconds = call.seconds
    if seconds == math.inf:
        return seconds
    return call.work._started + (LONG if seconds >= 2 * LONG else seconds / 2)
