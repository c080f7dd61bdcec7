"""Keys that a user presses while a command runs on a terminal."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Iterator

_NAMES = {
    "\x1b[A": "up", "\x1bOA": "up", "k": "up",
    "\x1b[B": "down", "\x1bOB": "down", "j": "down",
    "\x1b[C": "right", "\x1bOC": "right", "\r": "right", "\n": "right", "l": "right",
    "\x1b[D": "left", "\x1bOD": "left", "\x1b": "left", "\x7f": "left", "h": "left",
    "q": "quit", "Q": "quit",
}  # fmt: skip
_LONGEST = max(map(len, _NAMES))


def keys_in(text: str) -> Iterator[str]:
    """The names of the keys that a terminal sends as `text`.

    Arrows (or hjkl) are "up", "down", "left" and "right", and "q" is "quit". Enter is "right";
    Escape and Backspace are "left". Other keys are left out.
    """
    at = 0
    while at < len(text):
        for length in range(_LONGEST, 0, -1):
            if (name := _NAMES.get(text[at : at + length])) is not None:
                yield name
                at += length
                break
        else:
            at += 1


@contextlib.contextmanager
def pressed() -> Iterator[asyncio.Queue[str]]:
    """A queue of the names of pressed keys, as long as this context lasts.

    Without a terminal there are none. Ctrl-C is a signal as always, and the terminal is reset in
    any case.
    """
    queue: asyncio.Queue[str] = asyncio.Queue()
    if not sys.stdin.isatty() or sys.platform == "win32":
        yield queue
        return
    import termios
    import tty

    loop, fd = asyncio.get_running_loop(), sys.stdin.fileno()

    def read() -> None:
        data = os.read(fd, 1024)
        if not data:  # the terminal is gone
            loop.remove_reader(fd)
        for name in keys_in(data.decode(errors="replace")):
            queue.put_nowait(name)

    before = termios.tcgetattr(fd)
    tty.setcbreak(fd)
    loop.add_reader(fd, read)
    try:
        yield queue
    finally:
        loop.remove_reader(fd)
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
