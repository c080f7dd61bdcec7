"""The standard input of the command, handed on to one rank."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

_STDIN = 0
_CHUNK = 64 * 1024


@contextlib.contextmanager
def source() -> Iterator[int]:
    """The read end of a pipe that all of standard input goes into, for a process that is started
    meanwhile.

    A pipe, and not the terminal itself: ranks have process groups of their own, which are in the
    background there, and must not read from it.
    """
    reading, writing = os.pipe()
    # A daemon: it may never get another byte.
    threading.Thread(target=_pass_on, args=(writing,), name="input", daemon=True).start()
    try:
        yield reading
    finally:
        os.close(reading)


def _pass_on(writing: int) -> None:
    # The rank may have ended, and the input may be closed: then there is nobody to tell.
    with contextlib.suppress(OSError):
        while data := os.read(_STDIN, _CHUNK):
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(writing, rest) :]
    os.close(writing)
