"""The start of the `aiodist` command, before it imports anything that may not be installed."""

from __future__ import annotations

import errno
import io
import os
import sys

LIBRARIES = frozenset({"click", "rich", "typer"})
"""The libraries of the commands, from the extra `cli`."""

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Errors of a write that are no fault of the command."""

CANCELLED = 130
"""The exit status after Ctrl-C: 128 + SIGINT, as of a shell."""

READER_GONE = 141
"""The exit status if no process reads the output any more: 128 + SIGPIPE."""


def main() -> None:
    """Run the command. If a library is missing, say how to install it.

    If the output cannot be written, say so without a traceback.
    """
    _open_streams()
    try:
        from aiodist_cli.main import app

        app(*sys.argv[1:2])(prog_name="aiodist")
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in LIBRARIES:
            raise
        sys.exit(
            f"aiodist: the commands need {missing}, which is not installed: "
            "pip install 'aiodist[cli]'"
        )
    except KeyboardInterrupt:  # only during the import: later, `app` handles it
        sys.exit(CANCELLED)
    except SystemExit as end:
        # Typer and rich end with 1 if the reader of the output has gone.
        if isinstance(end.__context__, BrokenPipeError):
            sys.exit(READER_GONE)
        raise
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        # Python flushes the rest at its end, and would report that as well.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(f"aiodist: cannot write the output: {error.strerror}")


def _open_streams() -> None:
    """Open /dev/null for each standard stream that is closed, because pipes and sockets would get
    its number. Show a name that the locale cannot show with question marks."""
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free
            os.set_inheritable(fd, True)
            setattr(sys, name, os.fdopen(fd, "w" if fd else "r"))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
