"""Connections that have not shown yet who they are: how many there may be at a time."""

from __future__ import annotations

import logging
import sys
from typing import Generic, Protocol, TypeVar

if sys.platform != "win32":
    import resource

MOST = 1024
"""Most strangers at a time, where the limit of open files allows for it."""

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
    and whoever means well needs but a moment. No host has more than half of the places."""

    def __init__(self, logger: logging.Logger, most: int | None = None) -> None:
        self.most = most_strangers() if most is None else most
        self._logger = logger
        self._there: dict[S, None] = {}
        self._by_host: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._there)

    def add(self, stranger: S) -> None:
        """A new one has come."""
        host = stranger.host
        self._there[stranger] = None
        self._by_host[host] = self._by_host.get(host, 0) + 1
        if self._by_host[host] > max(1, self.most // 2):
            self._drop(next(one for one in self._there if one.host == host), "from that host")
        elif len(self._there) > self.most:
            self._drop(next(iter(self._there)), "in all")

    def discard(self, stranger: S) -> None:
        """It has shown who it is, or is gone. Idempotent."""
        if stranger in self._there:
            del self._there[stranger]
            left = self._by_host[stranger.host] - 1
            if left:
                self._by_host[stranger.host] = left
            else:
                del self._by_host[stranger.host]

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
