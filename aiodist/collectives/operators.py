"""Operators of the user in collectives that reduce: who hears of what they raise.

A function of the user may raise anything, on one rank alone. It then raises there, and the
operation ends on all ranks: so none completes before the calls on all of them have ended well.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import copy_context
from dataclasses import replace
from typing import Any

from aiodist.engine.failures import OperatorError
from aiodist.phases.base import Part, Place, share
from aiodist.types import Op, ReduceOp


def operator(op: Op) -> ReduceOp:
    """`op` for one call. If it is a function of the user, it raises nothing but OperatorError, and
    runs in the context of the call. Raises TypeError for what is no operator."""
    op = ReduceOp.of(op)
    function = op.function
    if function is None:
        return op
    # The operation may go on in a callback of the loop, or within the call of another task, whose
    # context variables are not those of this caller.
    context = copy_context()
    return replace(op, function=lambda a, b: context.run(_call, function, a, b))


def _call(function: Callable[[Any, Any], Any], a: Any, b: Any) -> Any:
    try:
        return function(a, b)
    except BaseException as error:
        raise OperatorError(error) from error


def confirm(place: Place, op: ReduceOp, on_lane: bool) -> Part[None]:
    """All calls of `op` on this rank have ended well: wait for those of the others, if it is the
    user's."""
    # Operators of aiodist raise nothing here, so they are not worth a round of words.
    if op.function is not None:
        yield from share(place, b"", on_lane)
