"""Interrupts at exact places of the main thread.

Python runs signal handlers when a function of C has returned, at the first line of a function of
Python, and at the end of a turn of a loop. Here an interrupt becomes pending just before one of
these. So the exception comes where that of a real signal could come, and nowhere else.
"""

from __future__ import annotations

import ctypes
import dis
import functools
import itertools
import signal
import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, TypeVar

T = TypeVar("T")

# A function of C, because one of Python would get the interrupt itself. It ignores what it is
# given as a trace function.
_interrupt: Any = ctypes.PYFUNCTYPE(None, *[ctypes.py_object] * 3)(
    ("PyErr_SetInterrupt", ctypes.pythonapi)
)


@functools.cache
def _places(code: CodeType) -> frozenset[int]:
    """The offsets of the instructions that come just before a call, or the end of a turn."""
    ends = ("CALL", "CALL_FUNCTION_EX", "CALL_KW", "JUMP_BACKWARD")
    steps = list(dis.get_instructions(code))
    return frozenset(
        before.offset for before, step in itertools.pairwise(steps) if step.opname in ends
    )


class Interrupt:
    """An interrupt of a call at the place with this number, in functions of `files`."""

    def __init__(self, files: tuple[str, ...], number: int) -> None:
        self._files = files
        self._left = number
        self.came = False

    def of(self, call: Callable[[], T]) -> T:
        """Make the call. Raises KeyboardInterrupt if it gets to the place."""
        before = signal.signal(signal.SIGINT, self._raise)
        tracing = sys.gettrace()  # what measures which lines are executed, if anything does
        try:
            sys.settrace(self._trace)
            return call()
        finally:
            sys.settrace(tracing)
            signal.signal(signal.SIGINT, before)

    def _raise(self, *_: object) -> None:
        sys.settrace(None)
        self.came = True
        raise KeyboardInterrupt

    def _trace(self, frame: FrameType, event: str, arg: object) -> Any:
        if self._left < 0 or not frame.f_code.co_filename.endswith(self._files):
            return None
        frame.f_trace_opcodes = True
        return self._step

    def _step(self, frame: FrameType, event: str, arg: object) -> Any:
        if event == "opcode" and self._left >= 0 and frame.f_lasti in _places(frame.f_code):
            self._left -= 1
            if self._left < 0:
                return _interrupt  # before the next instruction of this frame
        return self._step
