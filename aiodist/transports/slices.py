"""Short time slices: a thread that is woken runs at once, although other programs compute.

Linux gives a thread that computes its core for a slice of 1 to 4 ms. A thread that wakes up waits
until that slice is over, and one that yields gives a slice of its own away. A collective in which
each rank wakes or yields once waits for several of them. From Linux 6.12 on, a thread may ask for a
shorter slice of its own. When it wakes, it then takes the core from threads with longer ones. Over
time it gets as much of the processor as before.

Threads and processes that the thread starts later have short slices, too.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from typing import Any, Final

SLICE = 100_000
"""Nanoseconds: the shortest slice that Linux gives."""

_SET: Final = {"x86_64": 314, "aarch64": 274}
"""The number of the system call `sched_setattr`, by machine. That of `sched_getattr` is next."""
_OTHER: Final = 0  # the policy of threads for which no other one was chosen


class Attributes(ctypes.Structure):
    """How a thread is scheduled: `struct sched_attr` of Linux."""

    _fields_ = (
        ("size", ctypes.c_uint32),
        ("policy", ctypes.c_uint32),
        ("flags", ctypes.c_uint64),
        ("nice", ctypes.c_int32),
        ("priority", ctypes.c_uint32),
        ("runtime", ctypes.c_uint64),
        ("deadline", ctypes.c_uint64),
        ("period", ctypes.c_uint64),
    )


def attributes() -> Attributes | None:
    """Return how this thread is scheduled; None if the system does not say."""
    found = Attributes()
    is_known = _call(1, ctypes.byref(found), ctypes.sizeof(found), 0)
    return found if is_known else None


def shorten() -> bool:
    """Ask for short slices for this thread. Returns whether it has them now.

    A thread with another policy, or with a slice as short, is left alone. So is every thread of a
    system that does not know this.
    """
    found = attributes()
    if found is None or found.policy != _OTHER or not found.runtime:
        return False
    if found.runtime <= SLICE:
        return True
    found.size, found.runtime = ctypes.sizeof(found), SLICE
    return _call(0, ctypes.byref(found), 0)


def _call(offset: int, *args: Any) -> bool:
    """Make the call `offset` behind `sched_setattr`, for this thread. Returns whether it
    succeeded."""
    number = _SET.get(platform.machine())
    if sys.platform != "linux" or number is None:
        return False
    done: int = ctypes.CDLL(None).syscall(number + offset, 0, *args)
    return done == 0
