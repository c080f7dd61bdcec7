"""`breakpoint`: debug one rank while the others wait."""

from __future__ import annotations

import contextlib
import io
import math
import os
import pdb
import sys
from collections.abc import Coroutine
from types import FrameType
from typing import Any

from aiodist.errors import AiodistError
from aiodist.group import Group
from aiodist.phases.base import as_rank
from aiodist.work import Work

TAG = "aiodist.breakpoint"
"""Of the barrier in which the others wait."""


def breakpoint(group: Group, rank: int = 0) -> Coroutine[Any, Any, None]:
    """``await aiodist.breakpoint(group, rank=0)``: debug `rank` with pdb, in the function that
    calls this, while the other ranks wait, without a deadline.

    To be called by all ranks of `group`. On `rank` the prompt comes at the next line. The others
    go on when that one does: by ``continue``, but also by ``next``, ``step``, ``until`` and
    ``return``, since what comes next may need them. Their deadlines count again from there: give
    ``op_timeout=math.inf`` to `connect` to step through collectives. ``quit``, and the end of the
    input, raise `bdb.BdbQuit` on `rank`, and `CollectiveAbortedError` on the others. As a task of
    its own (in `asyncio.gather`) it shows the function that called it, and cannot step.

    The event loop of `rank` stands still while the prompt is there: other tasks on it wait as well.
    Leases are renewed by a thread, so nobody takes the rank for lost.

    The debugger reads the standard input of its process. ``aiodist run --stdin RANK`` hands that of
    the command to one rank; other ranks of `aiodist run`, and those of `aiodist.run`, have none.

    Raises TypeError and ValueError for what is no rank; RuntimeError on `rank`, where that has no
    input, and CollectiveAbortedError on the others then.

    For example::

        await aiodist.breakpoint(group, rank=2)  # all ranks call it, and rank 2 stops here
    """
    try:
        rank = as_rank(rank, group.size, "rank")
    except (TypeError, ValueError) as error:
        group._forgo(error, TAG)
        raise
    return _debug(group, sys._getframe(1)) if group.rank == rank else _wait(group)


async def _wait(group: Group) -> None:
    await _barrier(group)


async def _debug(group: Group, caller: FrameType) -> None:
    if not _has_input():
        _barrier(group).cancel()
        raise RuntimeError(
            f"a breakpoint on rank {group.rank}, which has no input to debug from: start the ranks "
            f"with `aiodist run --stdin {group.rank}`, or this one by hand"
        )
    debugger = _Debugger(group)
    if sys._getframe(1) is caller:
        debugger.set_trace(caller)  # the prompt comes when that goes on
    else:  # a task of its own: its caller may go on long after this, or never
        debugger.reset()
        debugger.interaction(caller, None)


def _barrier(group: Group) -> Work[None]:
    return group.barrier(tag=TAG, timeout=math.inf)


class _Debugger(pdb.Pdb):
    """Lets the other ranks go on with the first command that lets this one go on."""

    def __init__(self, group: Group) -> None:
        # Without nosigint, `continue` would take Ctrl-C away from asyncio.
        super().__init__(nosigint=True)
        self._waiting: Group | None = group
        self.message(f"rank {group.rank} of group {group.name!r}; the others wait")

    def interaction(self, *args: Any, **kwargs: Any) -> None:
        try:
            super().interaction(*args, **kwargs)
        finally:
            group, self._waiting = self._waiting, None
            if group is not None:
                # What ended the group meanwhile is seen by the next operation.
                with contextlib.suppress(AiodistError):
                    barrier = _barrier(group)
                    if self.quitting:
                        barrier.cancel()
                    else:  # nobody awaits it here, and that is no mistake of the program
                        barrier.add_done_callback(lambda _: None)


def _has_input() -> bool:
    """Whether there is anything to read commands from."""
    if sys.stdin is None or sys.stdin.closed:
        return False
    try:
        found = os.fstat(sys.stdin.fileno())
    except (io.UnsupportedOperation, AttributeError):  # a stand-in, as notebooks have
        return True
    except OSError:
        return False
    return found.st_rdev != os.stat(os.devnull).st_rdev or not found.st_rdev
