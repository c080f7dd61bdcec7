"""Operators of the user in collectives that reduce: who hears of what they raise.

A function of the user may raise anything, on one rank alone. It then raises there, and the
operation ends on all ranks: so none completes before the calls on all of them have ended well.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from aiodist.engine.failures import OperatorError
from aiodist.phases.base import Part, Place, share
from aiodist.types import Op, ReduceOp


def operator(op: Op) -> ReduceOp:
    """`op`, which raises nothing but OperatorError where it is a function of the user. Raises
    TypeError for what is no operator."""
    op = ReduceOp.of(op)
    return op if op.function is None else replace(op, function=partial(_call, op.function))


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
