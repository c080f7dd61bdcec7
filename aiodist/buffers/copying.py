"""Copies of many bytes, in and out of memory that a cache does not hold."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Flat = NDArray[Any]

LARGE: Final = 128 * 1024
"""Bytes from which numpy's loop is used. A call of it takes two microseconds, and what is smaller
is in the cache, mostly, where the C library is faster."""


def copy(into: memoryview, data: memoryview) -> None:
    """Copy bytes to memory of the same size, which is not the same memory. Lets other threads go on
    where they are many."""
    # The C library copies pieces below the size of a core's cache by one instruction of the
    # processor (`rep movsb`). Where the target is not in a cache, that takes twice as long as a
    # loop of vector instructions, as numpy has for arithmetic; and ten times as long where the
    # target lies a few bytes behind the source, by the page. `positive` is arithmetic that
    # changes nothing.
    if len(data) < LARGE:
        into[:] = data
    else:
        np.positive(np.frombuffer(data, np.uint8), out=np.frombuffer(into, np.uint8))


def copy_out(into: Flat, source: Flat) -> None:
    """Copy a flat array to another one of its dtype and length, from shared memory to the user's
    array, say: that is in no cache, mostly, where it is large (see `copy`)."""
    if into.nbytes < LARGE:
        into[:] = source
    else:
        np.positive(source.view(np.uint8), out=into.view(np.uint8))
