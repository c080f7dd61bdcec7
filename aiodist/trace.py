"""Hooks at named points in the life of every operation. They cost nothing if none is installed.

A hook is called with the point, the scope of the operation, its Work, and a value:

=================  ==========================================================================
point              when
=================  ==========================================================================
"start"            the call was made and its arguments make sense; nothing was sent yet
"entered"          a collective has its number within the tag, `work.seq`
"phase"            the next phase of a collective begins (an all_reduce by reduce-scatter and
                   all-gather has two, and every collective one to compare what was called)
"before_complete"  all is done, the Work is about to have the result `value`
"failed"           the Work is about to have the exception `value`
"cancelled"        the Work was withdrawn by its owner: the others were told
=================  ==========================================================================

An all_reduce that is done within its call has only "start" and "before_complete", both at its end.
A call of a window has "start" when its request is under way.
A group reports to the hook that was installed when it was made, for as long as it lives. A hook
runs inside the engine, so it must be quick and must not call the group. An exception of it at
"phase" fails the operation on all ranks. At other points it must not raise.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple


class Scope(NamedTuple):
    """One rank of one group in one epoch. `id` is the same on all ranks, and of no other group."""

    group: str
    epoch: int
    rank: int
    size: int
    id: bytes


Hook = Callable[[Scope, str, Any, Any], None]
"""``hook(scope, point, work, value)``. `value` is None unless the table says otherwise."""
Trace = Callable[[str, Any, Any], None]
"""A hook with its scope: ``trace(point, work, value)``."""

_hook: ContextVar[Hook | None] = ContextVar("aiodist_trace", default=None)


def install(hook: Hook | None) -> None:
    """Make all groups report to `hook` that this task, or a task it starts, makes from now on."""
    _hook.set(hook)


def bound(scope: Scope) -> Trace | None:
    """Bind the installed hook to `scope`; None if there is no hook."""
    hook = _hook.get()
    return None if hook is None else partial(hook, scope)
