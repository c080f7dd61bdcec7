"""Counts at a coordinator since its start, including members that are gone.

Members report their counts since they joined, and the increase is added here. So a total never
decreases. Names that members report are limited to known ones, so the number of totals does not
grow with the groups.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import add, sub

from aiodist.membership.effects import Note
from aiodist.wire.counts import FAILURES, SECONDS, Counts

OPS = frozenset(
    [
        *("all_reduce", "reduce", "reduce_scatter", "scan", "exscan", "broadcast", "barrier"),
        *("all_gather", "gather", "scatter", "all_to_all", "share", "reshard"),
        *("send", "ssend", "recv", "probe", "subgroup", "split", "dup", "expose"),
        *("get", "put", "accumulate", "fence"),
    ]
)
"""The operations that have totals of their own."""
TRANSPORTS = frozenset(["memory", "inproc", "shm", "unix", "tcp"])
OTHER = "other"
"""The name for all other operations and transports."""

EVENTS = ("formed", "lost", "aborted", "left", "restored", "join refused", "return refused")
"""The events of groups that are counted, by their names in the log."""

REFUSALS = ("protocol", "token", "version", "crowded")
"""Why connections are refused: a bad or slow greeting; a missing or wrong token; another version;
too many new connections at once."""


@dataclass(slots=True)
class Latency:
    """Operations of one name and size: their number by duration, and the sum in seconds."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(SECONDS) + 1))
    seconds: float = 0.0


class Totals:
    def __init__(self) -> None:
        self.events: Counter[str] = Counter(dict.fromkeys(EVENTS, 0))
        self.refused: Counter[str] = Counter(dict.fromkeys(REFUSALS, 0))
        self.failures: Counter[str] = Counter(dict.fromkeys(FAILURES, 0))
        self.sent: Counter[str] = Counter()  # bytes, by transport
        self.received: Counter[str] = Counter()
        self.latencies: defaultdict[tuple[str, int], Latency] = defaultdict(Latency)
        self._last: dict[int, Counts] = {}  # the last report of each connection

    def note(self, note: Note) -> None:
        if note.event in self.events:
            self.events[note.event] += 1

    def returns(self, conn: int) -> None:
        """A member comes back over `conn`. Its first report was already counted, here or by an
        earlier coordinator."""
        self._last[conn] = _UNKNOWN

    def heard(self, conn: int, said: Counts) -> None:
        """Add the increase since the last report of a member."""
        before = self._last.get(conn, Counts())
        self._last[conn] = said
        if before is _UNKNOWN:
            return
        # A faulty member may report lower counts: they add nothing.
        for name, count in zip(FAILURES, _more(said.failures, before.failures), strict=False):
            self.failures[name] += count
        known = {one.transport: one for one in before.payload}
        for one in said.payload:
            old = known.get(one.transport)
            name = one.transport if one.transport in TRANSPORTS else OTHER
            self.sent[name] += max(0, one.sent - (old.sent if old else 0))
            self.received[name] += max(0, one.received - (old.received if old else 0))
        times = {(one.op, one.size): one for one in before.times}
        for row in said.times:
            past = times.get((row.op, row.size))
            latency = self.latencies[row.op if row.op in OPS else OTHER, row.size]
            new = _more(row.counts, past.counts if past else ())
            latency.counts = list(map(add, latency.counts, new))
            latency.seconds += max(0.0, row.seconds - (past.seconds if past else 0.0))

    def gone(self, conn: int) -> None:
        """Forget the last report of a closed connection."""
        self._last.pop(conn, None)


_UNKNOWN = Counts()


def _more(now: Iterable[int], before: Iterable[int]) -> list[int]:
    """The increase of each count; a count that is missing is 0."""
    length = max(len(FAILURES), len(SECONDS) + 1)
    padded = [(*counts, *[0] * length)[:length] for counts in (now, before)]
    return [max(0, one) for one in map(sub, *padded)]
