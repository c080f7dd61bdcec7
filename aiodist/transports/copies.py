"""Copies of what links may have to send again, where its owner wants the memory back.

A copy of a mebibyte in memory that is fresh takes three times as long as in memory that was used
before: the system has to find and to clear each page of it. So some blocks are kept, and used again
where nobody has a part of them any more. And a rank that sends the same to several peers has one
copy for all of them.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from aiodist.transports.futex import address_of
from aiodist.wire.frames import MAX_WHOLE

BLOCKS = 4
"""Most blocks that are kept, of `MAX_WHOLE` bytes each."""

LARGE = 128 * 1024
"""Copies of less are in memory of their own, which comes from what the process has already."""


class Copies:
    """The copies of all links of one loop."""

    __slots__ = ("_blocks", "_made")

    def __init__(self) -> None:
        self._blocks: list[_Block] = []
        self._made: dict[tuple[int, int], memoryview] | None = None

    def begin(self) -> None:
        """Nothing is written until `end`: what is copied twice until then is the same."""
        self._made = {}

    def end(self) -> None:
        """From here on it may be something else."""
        self._made = None

    def of(self, views: Sequence[memoryview], nbytes: int) -> memoryview:
        """A copy of all `views`, which have so many bytes. Nobody writes to it as long as anybody
        has it, or a part of it."""
        made = self._made
        if made is None or len(views) != 1:
            return self._copy(views, nbytes)
        (view,) = views
        key = address_of(view), nbytes
        found = made.get(key)
        if found is None:
            found = made[key] = self._copy(views, nbytes)
        return found

    def _copy(self, views: Sequence[memoryview], nbytes: int) -> memoryview:
        block = self._free() if LARGE <= nbytes <= MAX_WHOLE else None
        if block is None:
            return memoryview(b"".join(views))
        copy, at = block.view()[:nbytes], 0
        for view in views:
            copy[at : at + view.nbytes] = view
            at += view.nbytes
        return copy

    def _free(self) -> _Block | None:
        """A block that nobody has a part of."""
        for block in self._blocks:
            if block.is_free:
                return block
        if len(self._blocks) == BLOCKS:
            return None
        self._blocks.append(_Block())
        return self._blocks[-1]


class _Block:
    """Memory of one copy at a time."""

    __slots__ = ("_memory", "_view")

    def __init__(self) -> None:
        self._memory = bytearray(MAX_WHOLE)
        self._view: weakref.ref[NDArray[np.uint8]] | None = None

    def view(self) -> memoryview:
        """All of it."""
        # An object of its own, which all that is made of the view refers to.
        array = np.frombuffer(self._memory, np.uint8)
        self._view = weakref.ref(array)
        return array.data

    @property
    def is_free(self) -> bool:
        """Whether nobody has a view of it, or of a part."""
        return self._view is None or self._view() is None
