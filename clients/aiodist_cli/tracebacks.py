"""Tracebacks in the output of ranks, held back until it is known whether they are the last lines.

If one of many ranks raises, all others fail, too, with tracebacks that only say that the first rank
is gone. Users need the traceback of the first rank, once, at the end. So a traceback is held back
for a moment. If its rank goes on, the program has only logged it, and it is shown. If its rank
ends, the launcher decides what to show.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

PATIENCE = 2.0
"""Seconds that a traceback is held back if its rank has not ended, whatever the rank writes
meanwhile. The interpreter takes that long to end with large libraries."""

MOST = 2000
"""The most lines of one rank that are held back."""

HEADER = re.compile(rb"(?:  \+ Exception Group )?Traceback \(most recent call last\):$")
_FRAME = re.compile(rb'([ |]*)File "([^"]*)", line \d+, in ')
_OF_THE_LOOP = re.compile(
    rb"(?:.*/)?(?:python3\.\d+t?|site-packages|dist-packages)/(?:asyncio|uvloop)/[^/]+\.py$"
    rb"|uvloop/[^/]+\.pyx$"
)
"""The files of the loop in any environment, because a rank may run in another one than this. A
program may lie in a folder of the same name."""


class Withheld:
    """The output of one rank from a traceback on."""

    def __init__(self) -> None:
        self._lines: list[bytes] = []
        self.until = 0.0  # when to show them

    def __bool__(self) -> bool:
        return bool(self._lines)

    def feed(self, lines: Sequence[bytes], now: float) -> list[bytes]:
        """Take in `lines` that were written `now`, in seconds, and return those to show."""
        shown = self.take() if now >= self.until else []
        if not self._lines:
            begins = next((i for i, line in enumerate(lines) if HEADER.match(line)), len(lines))
            shown, lines = [*shown, *lines[:begins]], lines[begins:]
            self.until = now + PATIENCE
        self._lines += lines
        return shown if len(self._lines) <= MOST else shown + self.take()

    def take(self) -> list[bytes]:
        """Return all lines that are held back, and clear them."""
        lines, self._lines = self._lines, []
        return lines


def without_the_loop(lines: Iterable[bytes]) -> Iterator[bytes]:
    """A traceback without the frames of the event loop, because they are the same in each."""
    left_out: bytes | None = None  # the indentation of a frame that is left out
    for line in lines:
        frame = _FRAME.match(line)
        if frame is not None:
            left_out = frame[1] if _OF_THE_LOOP.match(frame[2]) else None
        elif left_out is not None and not line.startswith(left_out + b"  "):
            left_out = None
        if left_out is None:
            yield line
