"""Ask the members what they do, once for all requests at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from aiodist.coordinator.actor import Coordinator

ASK_SECONDS = 10.0
"""Seconds for an answer. Members have one second. The rest is for a busy coordinator, or a busy
disk."""


class Surveys:
    """`Coordinator.survey`, for many callers."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        # By whether members are asked for their counts as well.
        self._asking: dict[bool, asyncio.Task[Mapping[str, Any]]] = {}

    async def found(self, *, counts: bool = False) -> Mapping[str, Any]:
        """Return what the coordinator finds. Raises CoordinatorLostError, TimeoutError."""
        # An answer with counts has all that the other one has.
        asking = next((self._asking[how] for how in (counts, True) if how in self._asking), None)
        if asking is None:
            asking = self._asking[counts] = asyncio.create_task(self._ask(counts))
            asking.add_done_callback(_looked_at)
            asking.add_done_callback(lambda _: self._asking.pop(counts))
        return await asyncio.shield(asking)

    async def _ask(self, counts: bool) -> Mapping[str, Any]:
        try:
            async with asyncio.timeout(ASK_SECONDS):
                return await self._coordinator.survey(counts=counts)
        except TimeoutError:
            text = f"the coordinator did not come to it within {ASK_SECONDS:g} s"
            raise TimeoutError(text) from None


def _looked_at(asking: asyncio.Task[Mapping[str, Any]]) -> None:
    """Mark an error as retrieved, because all callers may have gone away."""
    if not asking.cancelled():
        asking.exception()
