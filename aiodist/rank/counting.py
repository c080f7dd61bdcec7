"""What a rank counts, for monitoring: an `aiodist.recorder.Observer`.

The durations of operations are measured only after the first request for them. Until then that
costs nothing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from operator import add

from aiodist.errors import (
    AiodistError,
    CollectiveAbortedError,
    CollectiveTimeoutError,
    MismatchError,
    PeerLostError,
)
from aiodist.rank.actor import RankActor
from aiodist.recorder import Add, AtOnce, Record
from aiodist.transports.surroundings import tell_time_exactly
from aiodist.wire.counts import MOST_TIMES, SECONDS, SIZES, Counts, Payload, Times

_KINDS: tuple[type[AiodistError], ...] = (
    PeerLostError, CollectiveTimeoutError, CollectiveAbortedError, MismatchError,
)  # fmt: skip
"""In the order of `aiodist.wire.counts.FAILURES`."""


_BUCKETS = len(SECONDS) + 1

Row = list[float]
"""How many operations took how long, by `SECONDS`, and then the sum in seconds."""


class Counting:
    """The counts of one rank, over all of its groups."""

    def __init__(self, actor: RankActor) -> None:
        self._actor = actor
        self._rows: defaultdict[tuple[str, int], Row] = defaultdict(_row)
        """By the name of the operation and the number of bits of its size in bytes."""
        self.measures = False

    def measure(self) -> None:
        """Measure operations from now on. Idempotent."""
        if not self.measures:
            self.measures = True
            tell_time_exactly(self._actor.loop)
            self._actor.endpoint.recorder.observe(self)

    def after(self, add: Add) -> Add:
        rows = self._rows

        def added(one: AtOnce) -> None:
            add(one)
            seconds = one[8] - one[7]
            row = rows[one[1], (one[6] - 1).bit_length()]
            row[bisect_left(SECONDS, seconds)] += 1
            row[_BUCKETS] += seconds

        return added

    def ended(self, record: Record) -> None:
        if record.state == "done" and record.ended is not None:
            op, _, _, nbytes, started, ended, _ = record.ended
            seconds = max(0.0, (started if ended is None else ended) - started)
            row = self._rows[op, (nbytes - 1).bit_length()]
            row[bisect_left(SECONDS, seconds)] += 1
            row[_BUCKETS] += seconds

    def now(self) -> Counts:
        """Return the counts so far."""
        endpoint = self._actor.endpoint
        failed = endpoint.recorder.failures
        rows: defaultdict[tuple[str, int], Row] = defaultdict(_row)
        for (op, bits), row in self._rows.items():
            key = op, bisect_left(SIZES, 1 << bits)
            rows[key] = list(map(add, rows[key], row))
        return Counts(
            tuple([sum(failed[cls] for cls in failed if issubclass(cls, kind)) for kind in _KINDS]),
            tuple([Payload(kind, *moved) for kind, moved in endpoint.traffic.by_transport.items()]),
            tuple(
                [
                    Times(op, size, tuple(map(int, row[:_BUCKETS])), row[_BUCKETS])
                    for (op, size), row in list(rows.items())[:MOST_TIMES]
                ]
            ),
        )


def _row() -> Row:
    return [0.0] * (_BUCKETS + 1)
