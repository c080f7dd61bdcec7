"""Files that are written as a whole."""

from __future__ import annotations

import os
import select
import threading
from pathlib import Path


def write_all(fd: int, data: bytes | bytearray | memoryview) -> None:
    """Write all of `data`, and block until it is written. Raises OSError."""
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[os.write(fd, rest) :]
        except BlockingIOError:  # another process has set the pipe or terminal to non-blocking
            select.select([], [fd], [])


def replace(path: Path, text: str) -> None:
    """Write `text` to the file `path`, which no other process writes. Raises OSError.

    The text is written beside the file and moved into place. So a full disk, or the death of this
    process, leaves the old file, and not half of a new one.
    """
    # Threads of one process may write the same file.
    new = path.with_name(f"{path.name}.new{threading.get_ident()}")
    try:
        new.write_text(text, encoding="utf-8", errors="replace")
        new.replace(path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
