"""Tie a process to its parent: it gets a process group of its own and dies with the parent.

A process group of its own keeps Ctrl-C in the terminal from reaching the process directly. The
parent can also end it together with all processes that it has started. On Linux the kernel kills
the process as soon as its parent is gone, even after ``kill -9``. On other systems only a parent
that ends in order ends it.

This file is run as a script, ``tether.py PARENT_PID PROGRAM ARGUMENT…``: it ties itself and then
becomes the program, because both properties survive exec. It imports only the standard library.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1


def command(program: Sequence[str]) -> list[str]:
    """Return the command that runs `program` (its full path first) tied to the calling process."""
    # Isolated and without site, so that the interpreter is ready in some 15 ms.
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *program]


def _tie(parent: int) -> None:
    if os.environ.get("AIODIST_FLIGHT_RECORDER") and hasattr(signal, "SIGUSR1"):
        # Before it has a group, because from then on the process may be asked for a dump. The
        # signal must not end it.
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    os.setpgid(0, 0)
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # PR_SET_PDEATHSIG does not tell of a parent that has died already. In that case there is
    # another parent now.
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    _tie(int(sys.argv[1]))
    os.execv(sys.argv[2], sys.argv[2:])
