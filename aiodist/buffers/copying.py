"""Copies of many bytes, into and out of memory that no cache holds."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from aiodist.compiled import core

Flat = NDArray[Any]

LARGE: Final = 128 * 1024
"""Size in bytes from which numpy's loop is used. A call of it takes two microseconds, and smaller
data is mostly in the cache, for which the C library is faster."""


STREAMED: Final = 4096
"""Size in bytes from which the compiled part copies into shared memory faster."""


def copy(into: memoryview, data: memoryview) -> None:
    """Copy bytes to other memory of the same size. Large copies let other threads run."""
    # The C library copies pieces below the size of a core's cache by one instruction (`rep movsb`).
    # If the target is not in a cache, that takes twice as long as a loop of vector instructions. It
    # takes ten times as long if the target lies a few bytes behind the source, modulo the page
    # size. numpy has vector loops for arithmetic, and `positive` is arithmetic that changes
    # nothing.
    if len(data) < LARGE:
        into[:] = data
    else:
        np.positive(np.frombuffer(data, np.uint8), out=np.frombuffer(into, np.uint8))


def share(into: memoryview, data: memoryview) -> None:
    """Copy bytes to shared memory of the same size, which another process reads."""
    if core is None or len(data) < STREAMED:
        copy(into, data)
    else:
        core.copy_to_shared(into, data)


def copy_in(into: Flat, source: Flat) -> None:
    """Copy a flat array to another one of its dtype and length, in shared memory."""
    if core is None or into.nbytes < STREAMED:
        into[:] = source
    else:
        core.copy_to_shared(into.view(np.uint8), source.view(np.uint8))


def copy_out(into: Flat, source: Flat) -> None:
    """Copy a flat array to another one of its dtype and length, mostly from shared memory.

    Large arrays of users are in no cache, mostly: see `copy`.
    """
    if into.nbytes < LARGE:
        into[:] = source
    else:
        np.positive(source.view(np.uint8), out=into.view(np.uint8))
