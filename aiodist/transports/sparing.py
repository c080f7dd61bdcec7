"""Warnings of what strangers do: they are not to fill the log.

Anybody who reaches a port can do something wrong there a thousand times a second. An operator needs
to see that it happens, who does it and how often. The disk need not see each time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

AT_ONCE = 10
PERIOD = 10.0
"""Of each kind, so many warnings are written in so many seconds; the others are counted."""


@dataclass(slots=True)
class _Kind:
    began: float
    written: int = 0
    left_out: int = 0


class Sparing:
    """The warnings of one listener. `kind` says which of them are alike."""

    def __init__(self, logger: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._logger = logger
        self._clock = clock
        self._kinds: dict[str, _Kind] = {}

    def warning(
        self, kind: str, text: str, *args: object, extra: Mapping[str, object] | None = None
    ) -> None:
        """Write a warning, or count it; the next one that is written says how many were not."""
        now = self._clock()
        seen = self._kinds.setdefault(kind, _Kind(now))
        if now - seen.began >= PERIOD:
            seen.began, seen.written = now, 0
        if seen.written >= AT_ONCE:
            seen.left_out += 1
            return
        seen.written += 1
        if seen.left_out:
            text, args = f"{text} (%d more like it were left out)", (*args, seen.left_out)
            seen.left_out = 0
        self._logger.warning(text, *args, extra=extra, stacklevel=2)
