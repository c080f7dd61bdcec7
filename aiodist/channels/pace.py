"""How far a participant that forwards a version may be ahead of its receivers.

If it dies, all that it has and they have not is sent again. So it takes a part only when they have
all but one of its parts. Then all links are in use at once, and its death costs a part or two. It
does not wait for long: a receiver that stands still is waited for once, for a fraction of
`patience`. Receivers with slow links prolong a version by at most half of its time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from aiodist.channels.holding import ComingVersion

AHEAD = 1
"""How many parts it may have more than its receivers."""

GRACE = 1 / 8
"""The share of the patience for which a receiver that is behind is waited for."""


class ParticipantPace:
    """The pace of one participant. `calls`: how many others have called, which may want some of
    this."""

    def __init__(self, coming: ComingVersion, calls: Callable[[], int], patience: float) -> None:
        self._coming = coming
        self._calls = calls
        self._grace = GRACE * patience
        self._clock = asyncio.get_running_loop().time
        self._begun = self._clock()
        self._held = 0.0
        # For each receiver, the parts that it had, and how long it was waited for since.
        self._waited: dict[object, tuple[int, float]] = {}
        self._is_deaf = False  # the callers have been waited for

    async def keep(self, number: int) -> None:
        """Before taking part `number`, wait for receivers that are behind."""
        begin = self._clock()
        try:
            async with asyncio.timeout(min(self._grace, self._left)):
                while self._lacks(number):
                    await self._coming.news()
        except TimeoutError:
            self._is_deaf = self._calls() > 0
        held = self._clock() - begin
        self._held += held
        for one in self._behind(number):
            parts = self._coming.given[one]
            before, waited = self._waited.get(one, (parts, 0.0))
            self._waited[one] = parts, held + (waited if parts == before else 0.0)

    def holds(self, number: int) -> bool:
        """Whether `keep` would wait before that part."""
        return self._left > 0 and self._lacks(number)

    @property
    def _left(self) -> float:
        """The seconds that are left for waiting."""
        taking = self._clock() - self._begun - self._held
        return self._grace + taking / 2 - self._held

    def _lacks(self, number: int) -> bool:
        """Whether another participant must catch up before that part is taken."""
        return bool(self._behind(number)) or (self._calls() > 0 and not self._is_deaf)

    def _behind(self, number: int) -> list[object]:
        given, least = self._coming.given, number - AHEAD
        return [one for one, parts in given.items() if parts < least and not self._is_slow(one)]

    def _is_slow(self, one: object) -> bool:
        parts, waited = self._waited.get(one, (0, 0.0))
        return waited >= self._grace and parts == self._coming.given[one]
