"""How long operations take, by the histograms that members count, for the page.

Members measure only after the first request for their counts, so there is nothing to show before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from operator import add, sub
from typing import Any, NamedTuple

from aiodist.coordinator.totals import OTHER, Latency
from aiodist.recorder import MESSAGES, OF_WINDOWS
from aiodist.wire.counts import SECONDS
from aiodist_server.history import MOST_POINTS, WINDOW
from aiodist_server.metrics import SIZE_NAMES

MOST_ROWS = 12
"""How many operations are listed: those that were called most."""

_NO_COLLECTIVES = MESSAGES | OF_WINDOWS | {OTHER}
"""What the plot leaves out. A receive waits for its sender, which says nothing about speed, and
sendrecv is among the other operations."""

Totals = Mapping[tuple[str, int], Latency]
"""By operation and class of size, since the coordinator started."""


class Point(NamedTuple):
    """How long collectives took that ended between the last point and `when`.

    `median` is their median, and 99 of 100 did not exceed `most`. None: none ended.
    """

    when: float
    median: float | None
    most: float | None


class Latencies:
    """The durations of all groups, over the last minutes. Pure: see `History`."""

    def __init__(self) -> None:
        self._points: deque[Point] = deque(maxlen=MOST_POINTS)
        self._before: list[int] | None = None  # None: not known of late

    def take(self, totals: Totals, now: float, *, counted: bool) -> None:
        """Take in the totals of now. Not `counted`: members were not asked, so they are old."""
        if not counted:
            self._before = None
            return
        counts = [0] * (len(SECONDS) + 1)
        for (op, _), latency in totals.items():
            if op not in _NO_COLLECTIVES:
                counts = list(map(add, counts, latency.counts))
        if self._before is not None and any(counts):
            new = list(map(sub, counts, self._before))
            self._points.append(Point(now, quantile(new, 0.5), quantile(new, 0.99)))
        self._before = counts

    def plain(self, totals: Totals, now: float) -> dict[str, Any]:
        """Return it for the page, with times as seconds ago."""
        points = [point for point in self._points if now - point.when < WINDOW]
        most = sorted(totals.items(), key=lambda item: (-sum(item[1].counts), item[0]))
        return {
            "series": {
                "ago": [round(now - point.when, 1) for point in points],
                "median": [point.median for point in points],
                "most": [point.most for point in points],
            },
            "rows": [
                {
                    "op": op,
                    "size": SIZE_NAMES[size],
                    "count": sum(latency.counts),
                    "median": quantile(latency.counts, 0.5),
                    "most": quantile(latency.counts, 0.99),
                }
                for (op, size), latency in most[:MOST_ROWS]
                if any(latency.counts)
            ],
        }


def quantile(counts: Sequence[int], share: float) -> float | None:
    """Return the time in seconds that this share of operations did not exceed; None: there are
    none.

    `counts` are as in `aiodist.wire.counts.Times`. Between two bounds, times count as evenly spread
    on a logarithmic scale.
    """
    wanted = share * sum(counts)
    if not wanted:
        return None
    below = 0
    for index, count in enumerate(counts[:-1]):
        if below + count >= wanted:
            low = SECONDS[index - 1] if index else SECONDS[0] / 4
            inside = (wanted - below) / count
            return float(f"{low * (SECONDS[index] / low) ** inside:.3g}")
        below += count
    return float(SECONDS[-1])  # or longer
