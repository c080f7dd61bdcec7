"""What a rank counts for who watches its coordinator over time: an `aiodist.recorder.Observer`.

How long operations take is measured from the first time that somebody asks for it: until then it
costs nothing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict

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


class Counting:
    """The counts of one rank, over all of its groups."""

    def __init__(self, actor: RankActor) -> None:
        self._actor = actor
        self._times: defaultdict[tuple[str, int], list[int]] = defaultdict(
            lambda: [0] * (len(SECONDS) + 1)
        )
        """How many operations took how long, by name and the bits of their bytes."""
        self._sums: defaultdict[tuple[str, int], float] = defaultdict(float)
        self.measures = False

    def measure(self) -> None:
        """Measure operations from now on. Idempotent."""
        if not self.measures:
            self.measures = True
            tell_time_exactly(self._actor.loop)
            self._actor.endpoint.recorder.observe(self)

    def after(self, add: Add) -> Add:
        times, sums, now = self._times, self._sums, self._actor.loop.time

        def added(one: AtOnce) -> None:
            add(one)
            seconds = now() - one[7]
            key = one[1], (one[6] - 1).bit_length()
            times[key][bisect_left(SECONDS, seconds)] += 1
            sums[key] += seconds

        return added

    def ended(self, record: Record) -> None:
        if record.state == "done" and record.ended is not None:
            op, _, _, nbytes, started, ended, _ = record.ended
            key = op, (nbytes - 1).bit_length()
            seconds = max(0.0, (started if ended is None else ended) - started)
            self._times[key][bisect_left(SECONDS, seconds)] += 1
            self._sums[key] += seconds

    def now(self) -> Counts:
        """What was counted by now."""
        endpoint = self._actor.endpoint
        failed = endpoint.recorder.failures
        rows: defaultdict[tuple[str, int], list[int]] = defaultdict(
            lambda: [0] * (len(SECONDS) + 1)
        )
        sums: defaultdict[tuple[str, int], float] = defaultdict(float)
        for (op, bits), counts in self._times.items():
            size = bisect_left(SIZES, 1 << bits if bits else 0)
            rows[op, size] = [a + b for a, b in zip(rows[op, size], counts, strict=True)]
            sums[op, size] += self._sums[op, bits]
        return Counts(
            tuple([sum(failed[cls] for cls in failed if issubclass(cls, kind)) for kind in _KINDS]),
            tuple([Payload(kind, *moved) for kind, moved in endpoint.payload_by.items()]),
            tuple(
                [
                    Times(op, size, tuple(counts), sums[op, size])
                    for (op, size), counts in list(rows.items())[:MOST_TIMES]
                ]
            ),
        )
