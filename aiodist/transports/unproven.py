"""Connections that have not shown yet who they are: how many there may be at a time."""

from __future__ import annotations

import logging
import sys
from typing import Generic, Protocol, TypeVar

if sys.platform != "win32":
    import resource

MOST = 4096
"""Most strangers at a time, where the limit of open files allows for it: as many as a group may
have members."""

FILES_SHARE = 4
"""Strangers may have this part of the files that the process may open."""


class Stranger(Protocol):
    """A connection. `peer` names it for the log; those of one place have the same `host`."""

    @property
    def peer(self) -> str: ...

    @property
    def host(self) -> str: ...

    def drop(self) -> None:
        """Close at once, without a word."""


S = TypeVar("S", bound=Stranger)


class Strangers(Generic[S]):
    """Where there are too many, the one that has been there longest is dropped: it had its time,
    and whoever means well needs but a moment. No host has more than half of the places.

    `moment`: seconds that each has for sure. Where all have come within that, many may mean well
    at once, and there is no place for a new one.
    """

    def __init__(
        self, logger: logging.Logger, most: int | None = None, *, moment: float = 0.0
    ) -> None:
        self.most = most_strangers() if most is None else most
        self._logger = logger
        self._moment = moment
        self._there: dict[S, float] = {}
        self._by_host: dict[str, dict[S, None]] = {}

    def __len__(self) -> int:
        return len(self._there)

    def add(self, stranger: S, now: float) -> bool:
        """Take in one that came at time `now`. False: there is no place, it is to come again."""
        own = self._by_host.get(stranger.host, {})
        if len(own) >= max(1, self.most // 2):
            oldest, where = next(iter(own)), "from that host"
        elif len(self._there) >= self.most:
            oldest, where = next(iter(self._there)), "in all"
        else:
            self._take_in(stranger, now)
            return True
        if now - self._there[oldest] < self._moment:
            return False
        self._drop(oldest, where)
        self._take_in(stranger, now)
        return True

    def discard(self, stranger: S) -> None:
        """It has shown who it is, or is gone. Idempotent."""
        if self._there.pop(stranger, None) is not None:
            own = self._by_host[stranger.host]
            del own[stranger]
            if not own:
                del self._by_host[stranger.host]

    def _take_in(self, stranger: S, now: float) -> None:
        self._there[stranger] = now
        self._by_host.setdefault(stranger.host, {})[stranger] = None

    def _drop(self, stranger: S, where: str) -> None:
        # Not a warning: whoever connects would fill the log.
        self._logger.info(
            "dropping the connection from %s: too many %s do not say who they are",
            stranger.peer,
            where,
            extra={"event": "stranger dropped", "peer": stranger.peer},
        )
        self.discard(stranger)
        stranger.drop()


def most_strangers() -> int:
    """How many strangers this process can afford."""
    if sys.platform == "win32":
        return MOST
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if files == resource.RLIM_INFINITY:
        return MOST
    return max(16, min(MOST, files // FILES_SHARE))
