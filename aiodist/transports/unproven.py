"""Bounds how many connections may be open that have not shown a proof yet.

Each of them costs a file of this process. A stranger that connects a thousand times and says
nothing would take them all, so that no member could connect. A plain limit would not help, because
the thousand would fill it. So the oldest makes room for the newest: a member shows its proof within
milliseconds, and is never the oldest for long.
"""

from __future__ import annotations

import logging
import sys
from typing import Generic, Protocol, TypeVar

from aiodist.transports.sparing import Sparing

if sys.platform != "win32":
    import resource

MOST = 4096
"""The most unproven connections at a time, if the limit of open files allows that: as many as a
group may have members."""

FILES_SHARE = 4
"""The part of the process's files that unproven connections may take."""


class Unproven(Protocol):
    """A connection. `peer` names it for the log. Connections of one place have the same `host`."""

    @property
    def peer(self) -> str: ...

    @property
    def host(self) -> str: ...

    def drop(self) -> None:
        """Close at once, without a word."""


S = TypeVar("S", bound=Unproven)


class UnprovenConnections(Generic[S]):
    """The connections of one listener that have not shown a proof yet.

    If there are too many, the oldest is dropped, because an honest member needs only a moment. No
    host has more than half of the places. `moment`: seconds that each surely has. If all have come
    within that, many may be honest, and there is no place for a new one. `what` is what the log
    says of those that are too many.
    """

    def __init__(
        self,
        logger: logging.Logger,
        most: int | None = None,
        *,
        moment: float = 0.0,
        what: str = "have not proved their identity",
    ) -> None:
        self.most = most_connections() if most is None else most
        self._sparing = Sparing(logger)
        self._moment = moment
        self._what = what
        # In the order in which they came, because dicts keep it.
        self._there: dict[S, float] = {}
        self._by_host: dict[str, dict[S, None]] = {}

    def __len__(self) -> int:
        return len(self._there)

    def add(self, connection: S, now: float) -> bool:
        """Take in a connection that came at time `now`. False: there is no place, and it should
        come again."""
        own = self._by_host.get(connection.host, {})
        if len(own) >= max(1, self.most // 2):
            oldest, where = next(iter(own)), "from that host"
        elif len(self._there) >= self.most:
            oldest, where = next(iter(self._there)), "in all"
        else:
            self._take_in(connection, now)
            return True
        # Thousands of ranks that start at the same moment look like an attack. The oldest is then a
        # rank that is about to show its proof. If it were dropped for a later one, it would come
        # again, without end. So the new one has to come again instead.
        if now - self._there[oldest] < self._moment:
            return False
        self._drop(oldest, where)
        self._take_in(connection, now)
        return True

    def discard(self, connection: S) -> None:
        """Forget a connection, because it has shown its proof, or is gone. Idempotent."""
        if self._there.pop(connection, None) is not None:
            own = self._by_host[connection.host]
            del own[connection]
            if not own:
                del self._by_host[connection.host]

    def _take_in(self, connection: S, now: float) -> None:
        self._there[connection] = now
        self._by_host.setdefault(connection.host, {})[connection] = None

    def _drop(self, connection: S, where: str) -> None:
        self._sparing.warning(
            "dropped",
            "dropping the connection from %s: too many %s %s",
            connection.peer,
            where,
            self._what,
            extra={"event": "stranger dropped", "peer": connection.peer},
        )
        self.discard(connection)
        connection.drop()


def most_connections(most: int = MOST, files_share: int = FILES_SHARE) -> int:
    """Return how many unproven connections this process can afford.

    At most `most`, and at most this part of the files that it may open.
    """
    if sys.platform == "win32":
        return most
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if files == resource.RLIM_INFINITY:
        return most
    return max(16, min(most, files // files_share))
