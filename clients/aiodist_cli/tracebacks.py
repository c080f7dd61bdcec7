"""Tracebacks in what ranks write: held back until it is known whether they are the last words.

When one of many ranks raises, all the others fail with it, each with a traceback that says no more
than that the first one is gone. What a user needs is the first one's, once, where the eye goes: at
the end. So a traceback is held back for a moment. If its rank goes on, it was something that the
program has logged, and is shown. If its rank ends, the launcher decides what to show of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

PATIENCE = 2.0
"""Seconds that the traceback of a rank is held back while the rank has not ended. The interpreter
takes that long to end with large libraries."""

MOST = 2000
"""Most lines that are held back of one rank."""

_HEADER = re.compile(rb"(?:  \+ Exception Group )?Traceback \(most recent call last\):$")
_FRAME = re.compile(rb'([ |]*)File "([^"]*)", line \d+, in ')
_OF_THE_LOOP = re.compile(rb"(?:^|/)(?:asyncio|uvloop)/[^/]+\.(?:py|pyx)$")


class Withheld:
    """What one rank wrote from the last traceback on that began while nothing was held back."""

    def __init__(self) -> None:
        self._lines: list[bytes] = []

    def __bool__(self) -> bool:
        return bool(self._lines)

    def feed(self, lines: Sequence[bytes]) -> list[bytes]:
        """The rank wrote `lines`: those that are to be shown now."""
        shown: list[bytes] = []
        if not self._lines:
            begins = next((i for i, line in enumerate(lines) if _HEADER.match(line)), len(lines))
            shown, lines = list(lines[:begins]), lines[begins:]
        self._lines += lines
        return shown if len(self._lines) <= MOST else shown + self.take()

    def take(self) -> list[bytes]:
        """All that is held back, which is so no more."""
        lines, self._lines = self._lines, []
        return lines


def without_the_loop(lines: Iterable[bytes]) -> Iterator[bytes]:
    """A traceback without the frames of the event loop, which are the same in each."""
    left_out: bytes | None = None  # what the lines of the frame begin with that is left out
    for line in lines:
        frame = _FRAME.match(line)
        if frame is not None:
            left_out = frame[1] if _OF_THE_LOOP.search(frame[2]) else None
        elif left_out is not None and not line.startswith(left_out + b"  "):
            left_out = None
        if left_out is None:
            yield line
