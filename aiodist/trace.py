"""Hooks at named points in the life of every operation; free when off.

A hook is called with the point, the scope (whose operation it is), the Work, and a value:

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

An all_reduce that is done within its call has "start" and "before_complete" at its end, and no
other point. Groups that are made while a hook is installed report to it, for as long as they live.
A hook runs inside of the engine: it is quick and calls nothing of the group. What it raises at
"phase" fails the operation on all ranks; elsewhere it must not raise.
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
"""``hook(scope, point, work, value)``; `value` is None but where the table says what it is."""
Trace = Callable[[str, Any, Any], None]
"""A hook with its scope: ``trace(point, work, value)``."""

_hook: ContextVar[Hook | None] = ContextVar("aiodist_trace", default=None)


def install(hook: Hook | None) -> None:
    """Groups that this task, and those that it starts, make from now on report to `hook`."""
    _hook.set(hook)


def bound(scope: Scope) -> Trace | None:
    """The hook that is installed, for `scope`; None: there is none."""
    hook = _hook.get()
    return None if hook is None else partial(hook, scope)
