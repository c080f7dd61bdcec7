"""Files that are written as a whole."""

from __future__ import annotations

import hashlib
import itertools
import os
import re
import select
from pathlib import Path
from urllib.parse import quote

_LONGEST = 100
_HASH = 12
_numbers = itertools.count()


def write_all(fd: int, data: bytes | bytearray | memoryview) -> None:
    """Write all of `data`, and block until it is written. Raises OSError."""
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[os.write(fd, rest) :]
        except BlockingIOError:  # another process has set the pipe or terminal to non-blocking
            select.select([], [fd], [])


def quoted(group: str) -> str:
    """Return the name of a group as part of a file's name: quoted, and at most 100 characters.

    A longer one is cut and ends with a hash of the whole, because names of groups may begin alike.
    """
    name = quote(group, safe="")
    if len(name) <= _LONGEST:
        return name
    end = hashlib.sha256(name.encode()).hexdigest()[:_HASH]
    return re.sub("%.?$", "", name[: _LONGEST - _HASH - 1]) + "-" + end


def replace(path: Path, text: str) -> None:
    """Write `text` to the file `path`, which no other process writes. Raises OSError.

    The text is written beside the file and moved into place. So a full disk, or the death of this
    process, leaves the old file, and not half of a new one.
    """
    # Several processes and threads may write the same file, and the handler of a signal meanwhile.
    new = path.with_name(f"{path.name}.new{os.getpid()}-{next(_numbers)}")
    try:
        new.write_text(text, encoding="utf-8", errors="replace")
        new.replace(path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
