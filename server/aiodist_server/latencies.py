"""How long operations take, by the histograms that members count: what the page shows of it.

Members measure once they are asked for their counts, so there is nothing to show before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from operator import add, sub
from typing import Any, NamedTuple

from aiodist.coordinator.totals import Latency
from aiodist.recorder import MESSAGES
from aiodist.wire.counts import SECONDS
from aiodist_server.history import MOST_POINTS, WINDOW
from aiodist_server.metrics import SIZE_NAMES

MOST_ROWS = 12
"""So many operations are listed: those that were called most."""

Totals = Mapping[tuple[str, int], Latency]
"""By operation and class of size, since the coordinator started."""


class Point(NamedTuple):
    """Of the collectives that ended before `when`, and after the point before: the median of how
    long they took, and what 99 of 100 did not exceed; None: none ended."""

    when: float
    median: float | None
    most: float | None


class Latencies:
    """Of all groups, over the last minutes. Pure: see `History`."""

    def __init__(self) -> None:
        self._points: deque[Point] = deque(maxlen=MOST_POINTS)
        self._before = [0] * (len(SECONDS) + 1)

    def take(self, totals: Totals, now: float) -> None:
        """Members were asked: these are the totals by now."""
        counts = [0] * len(self._before)
        for (op, _), latency in totals.items():
            # A receive waits for whoever sends, which says nothing of how fast things go.
            if op not in MESSAGES and op != "sendrecv":
                counts = list(map(add, counts, latency.counts))
        new = list(map(sub, counts, self._before))
        if any(counts):
            self._points.append(Point(now, quantile(new, 0.5), quantile(new, 0.99)))
        self._before = counts

    def plain(self, totals: Totals, now: float) -> dict[str, Any]:
        """As the page reads it, with times as seconds ago."""
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
    """The time that this share of operations did not exceed, in seconds; None: there are none.
    `counts` as in `aiodist.wire.counts.Times`; between two bounds times are taken to be spread
    evenly, on a scale of logarithms."""
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
