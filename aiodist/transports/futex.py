"""Sleeping until a word in shared memory is not what it was: futexes of Linux.

The kernel compares the word with what the sleeper has seen of it, and puts it to sleep, in one
step: whoever changes the word and rings afterwards finds it asleep, or it does not fall asleep.
Neither side needs an open file, and both may know the word by a mapping that they only read.

A sleep of the thread holds up its event loop, so it is one of microseconds: in place of looking at
memory again and again, which takes the core away from whoever is to write what is waited for.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import platform
import sys
from typing import Any, Final

import numpy as np

_SYS_FUTEX: Final = 202  # of x86-64, where alone there is shared memory
_WAIT: Final = 0
_WAKE: Final = 1
_ALL: Final = 0x7FFF_FFFF
_LOW: Final = 0xFFFF_FFFF

_Time = ctypes.c_long * 2  # seconds, nanoseconds


def _bound(library: Any) -> Any:
    """``syscall`` with what `futex` takes."""
    function = library.syscall
    function.argtypes = (
        ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32,
        ctypes.POINTER(_Time), ctypes.c_void_p, ctypes.c_uint32,
    )  # fmt: skip
    function.restype = ctypes.c_long
    return function


if sys.platform == "linux":
    _sleep = _bound(ctypes.CDLL(None, use_errno=True))  # other threads of Python run meanwhile
    _ring = _bound(ctypes.PyDLL(None))  # takes no longer than it would to let them


def address_of(memory: memoryview) -> int:
    """Where `memory` begins, which is contiguous."""
    address: int = np.frombuffer(memory, np.uint8).__array_interface__["data"][0]
    return address


def wait(address: int, seen: int, seconds: float) -> None:
    """Sleep until somebody rings at `address`, but not if the low 32 bits of the word there are
    other than those of `seen`; nor for more than `seconds`."""
    _sleep(_SYS_FUTEX, address, _WAIT, seen & _LOW, _Time(0, int(seconds * 1e9)), None, 0)


def ring(address: int) -> None:
    """Wake all who sleep at `address`."""
    _ring(_SYS_FUTEX, address, _WAKE, _ALL, None, None, 0)


@functools.cache
def works() -> bool:
    """Whether this system has them, and lets this process use them."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    word = memoryview(bytearray(8))
    ctypes.set_errno(0)
    wait(address_of(word), 1, 0.0)  # it is 0: an answer at once
    return ctypes.get_errno() == errno.EAGAIN
