"""Copies of data that links may have to send again, after its owner wants the memory back.

A copy of a mebibyte into fresh memory takes three times as long as into used memory, because the
system has to find and clear each page. So some blocks are kept, and used again when nothing refers
to them. A rank that sends the same data to several peers has one copy for all of them.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from aiodist.transports.futex import address_of
from aiodist.wire.frames import MAX_WHOLE

BLOCKS = 4
"""The most blocks that are kept, of `MAX_WHOLE` bytes each."""

LARGE = 128 * 1024
"""Smaller copies have memory of their own, which the process has already."""


class Copies:
    """The copies of all links of one loop."""

    __slots__ = ("_blocks", "_made")

    def __init__(self) -> None:
        self._blocks: list[_CopyBlock] = []
        self._made: dict[tuple[int, int], memoryview] | None = None

    def begin(self) -> None:
        """Begin a phase without writes: until `end`, equal memory has equal content."""
        self._made = {}

    def end(self) -> None:
        """End that phase."""
        self._made = None

    def of(self, views: Sequence[memoryview], nbytes: int) -> memoryview:
        """Return a copy of all `views`, of `nbytes` in all. It stays unchanged while it is referred
        to."""
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

    def _free(self) -> _CopyBlock | None:
        """Return a block that nothing refers to, or None."""
        for block in self._blocks:
            if block.is_free:
                return block
        if len(self._blocks) == BLOCKS:
            return None
        self._blocks.append(_CopyBlock())
        return self._blocks[-1]


class _CopyBlock:
    """Memory of one copy at a time."""

    __slots__ = ("_memory", "_view")

    def __init__(self) -> None:
        self._memory = bytearray(MAX_WHOLE)
        self._view: weakref.ref[NDArray[np.uint8]] | None = None

    def view(self) -> memoryview:
        """Return all of it."""
        # An object of its own, because everything made of the view refers to it.
        array = np.frombuffer(self._memory, np.uint8)
        self._view = weakref.ref(array)
        return array.data

    @property
    def is_free(self) -> bool:
        """Whether no view of it, or of a part, exists."""
        return self._view is None or self._view() is None
