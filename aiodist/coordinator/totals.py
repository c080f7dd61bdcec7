"""What has happened at a coordinator since it started: of all members, also those that are gone.

Members say what they have counted since they joined; what is new of that is added here. So a total
never goes back, whoever comes and goes. And what it is told by is bounded, whatever members say:
there are as many totals after a thousand groups as after one.
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
        *("all_reduce", "reduce", "broadcast", "all_gather", "gather", "scatter"),
        *(
            "reduce_scatter",
            "all_to_all",
            "scan",
            "exscan",
            "barrier",
            "share",
            "reshard",
            "subgroup",
        ),
        *("send", "ssend", "recv", "probe", "sendrecv"),
    ]
)
"""The operations that have totals of their own."""
TRANSPORTS = frozenset(["memory", "inproc", "shm", "unix", "tcp"])
OTHER = "other"
"""The name of whatever has another one."""

EVENTS = ("formed", "lost", "aborted", "left", "restored", "join refused", "return refused")
"""The events of groups that are counted, by the names that they have in the log."""

REFUSALS = ("protocol", "token", "version", "crowded")
"""Why connections are refused: what they say is no greeting, or they say it too slowly; no token,
or a wrong one; another version; too many at a time."""


@dataclass(slots=True)
class Latency:
    """Of operations of one name and size: how many took how long, and the sum in seconds."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(SECONDS) + 1))
    seconds: float = 0.0


class Totals:
    """The totals of one coordinator."""

    def __init__(self) -> None:
        self.events: Counter[str] = Counter(dict.fromkeys(EVENTS, 0))
        self.refused: Counter[str] = Counter(dict.fromkeys(REFUSALS, 0))
        self.failures: Counter[str] = Counter(dict.fromkeys(FAILURES, 0))
        self.sent: Counter[str] = Counter()  # bytes, by transport
        self.received: Counter[str] = Counter()
        self.latencies: defaultdict[tuple[str, int], Latency] = defaultdict(Latency)
        self._last: dict[int, Counts] = {}  # what was said last over each connection

    def note(self, note: Note) -> None:
        """What happened to a group."""
        if note.event in self.events:
            self.events[note.event] += 1

    def returns(self, conn: int) -> None:
        """A member comes back over `conn`: what it says first was counted already, here or by the
        coordinator before this one."""
        self._last[conn] = _UNKNOWN

    def heard(self, conn: int, said: Counts) -> None:
        """A member has said what it has counted."""
        before = self._last.get(conn, Counts())
        self._last[conn] = said
        if before is _UNKNOWN:
            return
        # What a member of an odd mind says may go back: then it adds nothing.
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
        """Nothing comes over `conn` any more."""
        self._last.pop(conn, None)


_UNKNOWN = Counts()


def _more(now: Iterable[int], before: Iterable[int]) -> list[int]:
    """By how much each count has grown; those that were not told are 0."""
    length = max(len(FAILURES), len(SECONDS) + 1)
    padded = [(*counts, *[0] * length)[:length] for counts in (now, before)]
    return [max(0, one) for one in map(sub, *padded)]
