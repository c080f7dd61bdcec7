"""How much a member does in a second, by its counts at two times."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

_SHORTEST = 0.01
"""Seconds. Two closer answers are the same one, of a member that is busy."""


class Rate(NamedTuple):
    """What a member does in a second, or has done so far."""

    calls: float
    sent: float
    received: float


Counted = tuple[float, Rate]
"""When a member told its counts, in seconds, and the counts."""


def counted(doing: Mapping[str, Any], now: float) -> Counted:
    """Return the counts in an answer that came `now`."""
    counts = Rate(float(doing["collectives"]), float(doing["sent"]), float(doing["received"]))
    return now - doing["age"], counts


def between(before: Counted | None, after: Counted) -> Rate | None:
    """Return what a member did in a second. None: it is new, or has told nothing since."""
    if before is None or after[0] - before[0] < _SHORTEST:
        return None
    seconds = after[0] - before[0]
    return Rate(*((new - old) / seconds for new, old in zip(after[1], before[1], strict=True)))
