"""Standard input of the command, passed on to one rank."""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections.abc import Iterator

from aiodist.files import write_all

_STDIN = 0
_CHUNK = 64 * 1024


@contextlib.contextmanager
def source() -> Iterator[int]:
    """The read end of a pipe for all of standard input, to give to a process that is started
    meanwhile.

    A rank cannot read the terminal itself, because its process group is in the background there.
    """
    reading, writing = os.pipe()
    # A daemon, because it may never get another byte.
    threading.Thread(target=_pass_on, args=(writing,), name="input", daemon=True).start()
    try:
        yield reading
    finally:
        os.close(reading)


def _pass_on(writing: int) -> None:
    # The rank may have ended, or the input may be closed. Both just end this.
    with contextlib.suppress(OSError):
        while data := _read():
            write_all(writing, data)
    os.close(writing)


def _read() -> bytes:
    while True:
        try:
            return os.read(_STDIN, _CHUNK)
        except BlockingIOError:  # another process has set the pipe or terminal to non-blocking
            select.select([_STDIN], [], [])
