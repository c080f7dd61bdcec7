"""Warnings of what strangers do, limited so that they do not fill the log.

Any process that reaches a port can do something wrong there a thousand times a second. An operator
needs to see that, with its source and frequency, but not each time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

AT_ONCE = 10
PERIOD = 10.0
"""Of each kind, `AT_ONCE` warnings are written in so many seconds. The others are counted."""


@dataclass(slots=True)
class _Kind:
    began: float
    written: int = 0
    left_out: int = 0


class Sparing:
    """The warnings of one listener. `kind` tells which of them are alike."""

    def __init__(self, logger: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._logger = logger
        self._clock = clock
        self._kinds: dict[str, _Kind] = {}

    def warning(
        self, kind: str, text: str, *args: object, extra: Mapping[str, object] | None = None
    ) -> None:
        """Write a warning, or count it. The next one written tells how many were left out."""
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
            if extra is not None:  # the daemon writes this in place of the text
                extra = {**extra, "left_out": seen.left_out}
            seen.left_out = 0
        self._logger.warning(text, *args, extra=extra, stacklevel=2)
