"""How far a participant is behind the channel. No I/O in here."""

from __future__ import annotations

from collections.abc import Iterable

from aiodist.channels.directory import MOST_RELEASES


class Lag:
    """The versions that were heard of and not had yet, the oldest first, each with when that
    was."""

    def __init__(self) -> None:
        self._newest = -1
        self._heard: list[tuple[int, float]] = []

    def hear(self, versions: Iterable[int], now: float) -> None:
        """These are the versions that there are."""
        for version in versions:
            if version > self._newest:
                self._newest = version
                self._heard.append((version, now))
                if len(self._heard) > MOST_RELEASES:
                    # The oldest one says since when this is behind. Who takes a version so much
                    # later, and not the newest one, seems less far behind than it is.
                    del self._heard[1]

    def seconds(self, version: int | None, now: float) -> float:
        """How long there has been a newer one than `version` (None: than none at all)."""
        if version is not None:
            self._heard = [one for one in self._heard if one[0] > version]
        return now - self._heard[0][1] if self._heard else 0.0
