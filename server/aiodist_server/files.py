"""The limit of open files of the daemon, because each connection is one."""

from __future__ import annotations

import contextlib
import logging
import sys

if sys.platform != "win32":
    import resource

logger = logging.getLogger("aiodist.daemon")

ENOUGH = 1 << 20
"""The limit to ask for if the system has none."""


def raise_file_limit() -> None:
    """Raise the soft limit of open files to the hard one."""
    if sys.platform == "win32":
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = ENOUGH if hard == resource.RLIM_INFINITY else hard
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    with contextlib.suppress(ValueError, OSError):  # macOS has a limit that it does not tell
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        logger.debug("raised the limit of open files from %d to %d", soft, wanted)
