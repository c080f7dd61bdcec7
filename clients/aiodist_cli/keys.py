"""Keys that a user presses, one at a time, while a command shows something on a terminal."""

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
    """The names of the keys that a terminal sends as `text`: arrows (or hjkl), "quit"; Enter is
    "right", Escape and Backspace are "left". Others have no name here, and are left out."""
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
    """While it lasts, the names of the keys that are pressed, as they are. Where the input is no
    terminal, none. Ctrl-C is a signal as ever, and the terminal is put back in any case."""
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
