"""Keep torch.compile out of the code that runs operations.

Dynamo compiles each frame of Python that a compiled function calls. A process group of torch's own
is C++, and ends a graph. One in Python would be traced, with its locks and threads.
``torch.compiler.disable`` wraps functions. Here we tell Dynamo's hook directly, so that calls cost
nothing more, and so that programs without Dynamo need not import it, because that takes long.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any, TypeVar

import torch

T = TypeVar("T")

_core: Any = torch._C
_hook = _core._dynamo.eval_frame


def untraced(cls: type[T]) -> type[T]:
    """A class decorator: compiled functions run all methods, and what they call, without tracing.

    A call of such a method ends the graph.
    """
    for member in vars(cls).values():
        if isinstance(member, property):
            member = member.fget
        if isinstance(member, FunctionType):
            _leave_alone(member)
    return cls


def _leave_alone(function: FunctionType) -> None:
    function.__dict__["_torchdynamo_disable"] = True  # for a call that Dynamo would trace
    if hasattr(_hook, "set_code_exec_strategy"):  # for its frame, and those below
        skip = _hook._FrameAction.SKIP
        _hook.set_code_exec_strategy(function.__code__, _hook._FrameExecStrategy(skip, skip))
