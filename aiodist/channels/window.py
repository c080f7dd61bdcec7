"""How much of a version is on its way from one participant to another.

What one asks for comes a round trip later. So that the line between them is busy meanwhile, the one
that takes a version waits for so many bytes at once, and the one that gives it sends as many, as
collectives do between hosts that are far from each other (`aiodist.schedules.costs`). If one of
them dies, what was on its way is sent again.
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
"""Most bytes that are on their way to hosts that are far."""

SLICE = 64 << 10
"""Bytes of a message to a host that is far. Larger messages share the line, and all of those that
are on their way would be there at the end only; one part after the other can be handed on."""

AHEAD = 2
"""Parts that are sent to a host that is near before the first of them has been taken."""


class Window:
    """That between two participants, for parts of `chunk` bytes."""

    def __init__(self, pair: Group, chunk: int) -> None:
        nbytes = min(pair._context.costs.way, WINDOW)
        self._step = min(SLICE, chunk) if nbytes else chunk
        self.ahead = -(-nbytes // chunk)
        """How many parts the receiver waits for beyond the next one."""
        # With each part goes its number.
        each = 1 + -(-chunk // self._step)
        self.messages = each * max(AHEAD, 1 + self.ahead)
        """How many the sender sends before the first of them has been taken."""

    def slices(self, part: memoryview) -> Iterator[np.ndarray[Any, Any]]:
        """The messages that bring a part."""
        for at in range(0, len(part), self._step):
            yield np.frombuffer(part[at : at + self._step], np.uint8)


class Sending:
    """Messages that were sent. None may take longer than `patience` once it is the first."""

    def __init__(self, most: int, patience: float) -> None:
        self._most = most
        self._patience = patience
        self._sent: deque[Work[None]] = deque()

    def add(self, work: Work[None]) -> None:
        self._sent.append(work)

    async def until_few(self) -> None:
        """Wait until so few are under way that more may be sent. Raises TimeoutError."""
        await self._until(self._most)

    async def until_none(self) -> None:
        """Wait until all are taken. Raises TimeoutError."""
        await self._until(0)

    async def _until(self, most: int) -> None:
        while len(self._sent) > most:
            await self._sent[0].wait(self._patience)
            self._sent.popleft()

    def close(self) -> None:
        """What is under way is not waited for."""
        give_up(self._sent)


def give_up(works: Any) -> None:
    """Wait for none of these any more."""
    for one in works:
        if one.done() and not one.cancelled():
            one.exception()  # seen: the other one has gone, which its own error says
        one.cancel()


NO_DEADLINE = math.inf
"""Of a message behind others: it is their turn first."""
