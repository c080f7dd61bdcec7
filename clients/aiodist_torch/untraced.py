"""Keeping torch.compile out of what runs operations.

Dynamo compiles each frame of Python that a compiled function calls. A process group of torch's own
is C++, and ends a graph; one in Python would be traced, locks, threads and all. What does the same
as ``torch.compiler.disable`` is told here to Dynamo's hook itself: nothing is wrapped, so calls
cost what they did, and Dynamo, which takes long to import, is imported by none who do without.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any, TypeVar

import torch

T = TypeVar("T")

_core: Any = torch._C
_hook = _core._dynamo.eval_frame


def untraced(cls: type[T]) -> type[T]:
    """Have all methods of a class, and what they call, run as they are within compiled functions,
    where a call of one ends the graph. A class decorator."""
    for member in vars(cls).values():
        if isinstance(member, property):
            member = member.fget
        if isinstance(member, FunctionType):
            _leave_alone(member)
    return cls


def _leave_alone(function: FunctionType) -> None:
    function.__dict__["_torchdynamo_disable"] = True  # where Dynamo would trace a call of it
    if hasattr(_hook, "set_code_exec_strategy"):  # where its frame runs: this one, and those below
        skip = _hook._FrameAction.SKIP
        _hook.set_code_exec_strategy(function.__code__, _hook._FrameExecStrategy(skip, skip))
