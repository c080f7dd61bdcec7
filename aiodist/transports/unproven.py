"""Bounds how many connections may be open that have not shown yet who they are.

Each of them costs a file of this process, whoever made it. Somebody who connects a thousand times
and says nothing would take them all, and no member could connect any more. A limit alone would not
help: then the thousand fill it, and members are refused. So the oldest goes to make room for the
newest: a member shows who it is within milliseconds, and is never the oldest for long.
"""

from __future__ import annotations

import logging
import sys
from typing import Generic, Protocol, TypeVar

if sys.platform != "win32":
    import resource

MOST = 4096
"""Most unproven connections at a time, where the limit of open files allows for it: as many as a
group may have members."""

FILES_SHARE = 4
"""Unproven connections may have this part of the files that the process may open."""


class Unproven(Protocol):
    """A connection. `peer` names it for the log; those of one place have the same `host`."""

    @property
    def peer(self) -> str: ...

    @property
    def host(self) -> str: ...

    def drop(self) -> None:
        """Close at once, without a word."""


S = TypeVar("S", bound=Unproven)


class UnprovenConnections(Generic[S]):
    """The connections of one listener that have not shown yet who they are.

    Where there are too many, the one that has been there longest is dropped: it had its time,
    and whoever means well needs but a moment. No host has more than half of the places.

    `moment`: seconds that each has for sure. Where all have come within that, many may mean well
    at once, and there is no place for a new one.
    """

    def __init__(
        self, logger: logging.Logger, most: int | None = None, *, moment: float = 0.0
    ) -> None:
        self.most = most_connections() if most is None else most
        self._logger = logger
        self._moment = moment
        # In the order in which they came: dicts keep it, so the first one is the oldest.
        self._there: dict[S, float] = {}
        self._by_host: dict[str, dict[S, None]] = {}

    def __len__(self) -> int:
        return len(self._there)

    def add(self, connection: S, now: float) -> bool:
        """Take in one that came at time `now`. False: there is no place, it is to come again."""
        own = self._by_host.get(connection.host, {})
        if len(own) >= max(1, self.most // 2):
            oldest, where = next(iter(own)), "from that host"
        elif len(self._there) >= self.most:
            oldest, where = next(iter(self._there)), "in all"
        else:
            self._take_in(connection, now)
            return True
        # Thousands of ranks that start at the same moment look like an attack. The oldest is then a
        # rank that is about to say who it is, and would be dropped for one that came later, and
        # come again, and so on, without end: the new one comes again instead.
        if now - self._there[oldest] < self._moment:
            return False
        self._drop(oldest, where)
        self._take_in(connection, now)
        return True

    def discard(self, connection: S) -> None:
        """It has shown who it is, or is gone. Idempotent."""
        if self._there.pop(connection, None) is not None:
            own = self._by_host[connection.host]
            del own[connection]
            if not own:
                del self._by_host[connection.host]

    def _take_in(self, connection: S, now: float) -> None:
        self._there[connection] = now
        self._by_host.setdefault(connection.host, {})[connection] = None

    def _drop(self, connection: S, where: str) -> None:
        # Not a warning: whoever connects would fill the log.
        self._logger.info(
            "dropping the connection from %s: too many %s do not say who they are",
            connection.peer,
            where,
            extra={"event": "stranger dropped", "peer": connection.peer},
        )
        self.discard(connection)
        connection.drop()


def most_connections(most: int = MOST, files_share: int = FILES_SHARE) -> int:
    """How many unproven connections this process can afford: at most `most`, and at most this part
    of the files that it may open."""
    if sys.platform == "win32":
        return most
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if files == resource.RLIM_INFINITY:
        return most
    return max(16, min(most, files // files_share))
