"""Asking the members what they do: once for all who want to know at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from aiodist.coordinator.actor import Coordinator

ASK_SECONDS = 10.0
"""How long an answer may take. Members have a second; the rest is for a coordinator that is busy,
or whose disk is."""


class Surveys:
    """`Coordinator.survey`, for many."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._asking: asyncio.Task[Mapping[str, Any]] | None = None

    async def found(self) -> Mapping[str, Any]:
        """What the coordinator finds. Raises CoordinatorLostError, TimeoutError."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask())
            self._asking.add_done_callback(_looked_at)
        return await asyncio.shield(self._asking)

    async def _ask(self) -> Mapping[str, Any]:
        try:
            async with asyncio.timeout(ASK_SECONDS):
                return await self._coordinator.survey()
        except TimeoutError:
            text = f"the coordinator did not come to it within {ASK_SECONDS:g} s"
            raise TimeoutError(text) from None


def _looked_at(asking: asyncio.Task[Mapping[str, Any]]) -> None:
    """Who asked may have gone away meanwhile, and then nobody waits for it."""
    if not asking.cancelled():
        asking.exception()
