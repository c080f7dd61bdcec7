"""Operators of the user in reductions, and what happens if they raise.

A function of the user may raise anything, on one rank only. It then raises there, and the operation
fails on all ranks. So no rank completes before the calls on all ranks have ended well.
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
    """Return `op` for one call. Raises TypeError if it is no operator.

    A function of the user raises nothing but OperatorError then, and runs in the context of the
    call.
    """
    if not isinstance(op, ReduceOp):
        op = ReduceOp.of(op)
    function = op.function
    if function is None:
        return op
    # The operation may go on in a callback of the loop or within the call of another task. These
    # do not have the context variables of this caller.
    context = copy_context()
    return replace(op, function=lambda a, b: context.run(_call, function, a, b))


def _call(function: Callable[[Any, Any], Any], a: Any, b: Any) -> Any:
    try:
        return function(a, b)
    except BaseException as error:
        if function is max or function is min:  # these compare numbers, not arrays
            error.add_note(f"for arrays, use aiodist.ReduceOp.{function.__name__.upper()}")
        raise OperatorError(error) from error


def confirm(place: Place, op: ReduceOp, on_lane: bool) -> Part[None]:
    """Wait until all ranks have applied `op` without an error, if it is a function of the user."""
    # The operators of aiodist raise nothing here, so they need no further round.
    if op.function is not None:
        yield from share(place, b"", on_lane)
