"""Sleep until a word in shared memory changes: futexes of Linux.

The kernel compares the word with the value that the sleeper has seen, and puts it to sleep, in one
step. So a process that changes the word and then rings either finds the sleeper asleep, or the
sleeper does not fall asleep. Neither side needs an open file, and both may have the word in
read-only mappings.

A sleep of the thread holds up its event loop, so it lasts only microseconds. It replaces polling
memory, which would take the core from the process that is to write the awaited data.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import platform
import sys
from typing import Any, Final

import numpy as np

_SYS_FUTEX: Final = 202  # of x86-64, because there is shared memory only there
_WAIT: Final = 0
_WAKE: Final = 1
_ALL: Final = 0x7FFF_FFFF
_LOW: Final = 0xFFFF_FFFF

_Time = ctypes.c_long * 2  # seconds, nanoseconds


def _bound(library: Any) -> Any:
    """Return ``syscall`` with the argument types of `futex`."""
    function = library.syscall
    function.argtypes = (
        ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32,
        ctypes.POINTER(_Time), ctypes.c_void_p, ctypes.c_uint32,
    )  # fmt: skip
    function.restype = ctypes.c_long
    return function


if sys.platform == "linux":
    _sleep = _bound(ctypes.CDLL(None, use_errno=True))  # other threads of Python run meanwhile
    _ring = _bound(ctypes.PyDLL(None))  # shorter than letting other threads run


def address_of(memory: memoryview) -> int:
    """Return the address of `memory`, which is contiguous."""
    address: int = np.frombuffer(memory, np.uint8).__array_interface__["data"][0]
    return address


def wait(address: int, seen: int, seconds: float) -> None:
    """Sleep until a ring at `address`, at most `seconds`.

    Returns at once if the low 32 bits of the word there differ from those of `seen`.
    """
    _sleep(_SYS_FUTEX, address, _WAIT, seen & _LOW, _Time(0, int(seconds * 1e9)), None, 0)


def ring(address: int) -> None:
    """Wake all that sleep at `address`."""
    _ring(_SYS_FUTEX, address, _WAKE, _ALL, None, None, 0)


@functools.cache
def works() -> bool:
    """Tell whether this system has futexes, and lets this process use them."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    word = memoryview(bytearray(8))
    ctypes.set_errno(0)
    wait(address_of(word), 1, 0.0)  # the word is 0, so this returns at once
    return ctypes.get_errno() == errno.EAGAIN
