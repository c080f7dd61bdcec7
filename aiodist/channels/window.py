"""How many bytes of a version are in flight from one participant to another.

Requested data comes a round trip later. To keep the line busy meanwhile, the receiver waits for so
many bytes at once, and the sender sends as many, as collectives do between distant hosts
(`aiodist.schedules.costs`). If a participant dies, the bytes in flight are sent again.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np

from aiodist.group import Group
from aiodist.work import Work

WINDOW = 8 << 20
"""The most bytes in flight to distant hosts."""

SLICE = 64 << 10
"""Bytes of a message to a distant host. Larger messages would share the line and all arrive at the
end; in order, each part can be forwarded early."""

AHEAD = 2
"""Parts that are sent to a near host before the first of them has been taken."""


class FlightWindow:
    """The window between two participants, for parts of `chunk` bytes."""

    def __init__(self, pair: Group, chunk: int) -> None:
        nbytes = min(pair._context.costs.way, WINDOW)
        self._step = min(SLICE, chunk) if nbytes else chunk
        self.ahead = -(-nbytes // chunk)
        """How many parts the receiver waits for after the next one."""
        # Each part comes with its number.
        each = 1 + -(-chunk // self._step)
        self.messages = each * max(AHEAD, 1 + self.ahead)
        """How many messages the sender sends before the first of them has been taken."""

    def slices(self, part: memoryview) -> Iterator[np.ndarray[Any, Any]]:
        for at in range(0, len(part), self._step):
            yield np.frombuffer(part[at : at + self._step], np.uint8)


class MessagesInFlight:
    """Messages in flight. None may take longer than `patience` after it becomes the first."""

    def __init__(self, most: int, patience: float) -> None:
        self._most = most
        self._patience = patience
        self._sent: deque[Work[None]] = deque()

    def add(self, work: Work[None]) -> None:
        self._sent.append(work)

    async def until_few(self) -> None:
        """Wait until more may be sent. Raises TimeoutError."""
        await self._until(self._most)

    async def until_none(self) -> None:
        """Wait until all are taken. Raises TimeoutError."""
        await self._until(0)

    async def _until(self, most: int) -> None:
        while len(self._sent) > most:
            await self._sent[0].wait(self._patience)
            self._sent.popleft()

    def close(self) -> None:
        """Stop waiting for messages in flight."""
        give_up(self._sent)


def give_up(works: Any) -> None:
    """Cancel these, and ignore their errors."""
    for one in works:
        if one.done() and not one.cancelled():
            # mark it as seen, because the error of the participant itself is enough
            one.exception()
        one.cancel()


NO_DEADLINE = math.inf
"""For messages behind others, whose turn comes first."""
