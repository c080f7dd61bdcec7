"""How far a participant is behind its channel; no I/O."""

from __future__ import annotations

from collections.abc import Iterable

from aiodist.channels.directory import MOST_RELEASES


class Lag:
    """The versions that were announced but not yet taken, the oldest first, with the time of each
    announcement."""

    def __init__(self) -> None:
        self._newest = -1
        self._heard: list[tuple[int, float]] = []

    def hear(self, versions: Iterable[int], now: float) -> None:
        """Take in the versions that there are."""
        for version in versions:
            if version > self._newest:
                self._newest = version
                self._heard.append((version, now))
                if len(self._heard) > MOST_RELEASES:
                    # Keep the oldest, which says since when this participant is behind. A
                    # participant that takes an old version so late seems less far behind than it
                    # is.
                    del self._heard[1]

    def seconds(self, version: int | None, now: float) -> float:
        """For how many seconds there has been a newer version than `version` (None: any
        version)."""
        if version is not None:
            self._heard = [one for one in self._heard if one[0] > version]
        return now - self._heard[0][1] if self._heard else 0.0
