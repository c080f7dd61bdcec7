"""`breakpoint`: debug one rank while the others wait."""

from __future__ import annotations

import bdb
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
"""The tag of the barrier in which the others wait."""


def breakpoint(group: Group, rank: int = 0) -> Coroutine[Any, Any, None]:
    """Debug `rank` with pdb in the calling function, while the other ranks wait without a deadline.

    Call ``await aiodist.breakpoint(group, rank=0)`` on all ranks of `group`. On `rank` the prompt
    comes at the next line. The others go on when you enter ``continue``, ``next``, ``step``,
    ``until`` or ``return``, because the next line may need them. Their deadlines count again from
    there, so give ``op_timeout=math.inf`` to `connect` to step through collectives. ``quit`` and
    the end of the input raise `bdb.BdbQuit` on `rank`, and `CollectiveAbortedError` on the others.
    In a task of its own (in `asyncio.gather`), the debugger shows the function that called it, and
    cannot step.

    The event loop of `rank` is blocked during the prompt, so other tasks wait as well. A thread
    renews the lease, so the rank does not count as lost.

    The debugger reads the standard input of its process. ``aiodist run --stdin RANK`` passes its
    input to one rank. Other ranks of `aiodist run`, and those of `aiodist.run`, have no input.

    Raises TypeError and ValueError if `rank` is invalid; RuntimeError on `rank` if it has no input,
    and then CollectiveAbortedError on the others.

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
        error = RuntimeError(
            f"a breakpoint on rank {group.rank}, which has no input to debug from: start the ranks "
            f"with `aiodist run --stdin {group.rank}`, or this one by hand"
        )
        group._forgo(error, TAG)  # a barrier might be over before it could be cancelled
        raise error
    debugger = _Debugger(group)
    if sys._getframe(1) is caller:
        debugger.set_trace(caller)  # the prompt comes when the caller goes on
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
                # If the group has ended meanwhile, the next operation reports it.
                with contextlib.suppress(AiodistError):
                    if self.quitting:
                        group._forgo(bdb.BdbQuit(), TAG)
                    else:  # the program does not await this barrier, so it must not be warned
                        _barrier(group).add_done_callback(lambda _: None)


def _has_input() -> bool:
    """Whether there is an input for commands."""
    if sys.stdin is None or sys.stdin.closed:
        return False
    try:
        found = os.fstat(sys.stdin.fileno())
    except (io.UnsupportedOperation, AttributeError):  # a stand-in, as notebooks have
        return True
    except OSError:
        return False
    return found.st_rdev != os.stat(os.devnull).st_rdev or not found.st_rdev
