"""Messages whose data the receiver reads where it lies: in arrays of `Group.empty`.

The sender says with the announcement where the data is, the receiver copies it from there to where
it goes, and says so. Then the sender, whose memory it is, says that all of it was right (FIN), or
has withdrawn the message: so what it wrote there after a cancel is never taken for the message.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from aiodist.links.moved import Moved
from aiodist.p2p.pieces import Pieces
from aiodist.shared_memory.heap import Heap

AT_ONCE: Final = 2 * 1024 * 1024
"""Most bytes that one turn of the loop copies: less than a millisecond, mostly."""


class SharedArrays:
    """The memory that ranks of a group share, for messages."""

    def __init__(self, heap: Heap, moved: Moved) -> None:
        self._heap = heap
        self._moved = moved  # counts what no link does

    def place_of(self, buffers: Sequence[memoryview]) -> int:
        """Where these bytes lie one behind the other in memory that all ranks see; 0: elsewhere."""
        return self._heap.place_of(np.frombuffer(buffer, np.uint8) for buffer in buffers)

    def open(self, src: int, place: int, nbytes: int) -> Reading:
        """The bytes of a message of `src`, to be read. Raises ProtocolError."""
        return Reading(self._heap.find(src, place, nbytes).data, self._moved)

    def sent(self, nbytes: int) -> None:
        """Another rank has read a message."""
        self._moved.sent += nbytes


class Reading:
    """Data in memory of another rank."""

    __slots__ = ("_data", "_moved")

    def __init__(self, data: memoryview, moved: Moved) -> None:
        self._data = data
        self._moved = moved

    def copy(self, pieces: Pieces) -> None:
        """Copy what comes next to where it goes, at most `AT_ONCE` bytes."""
        start = self._data.nbytes - pieces.left
        part = self._data[start : start + AT_ONCE]
        pieces.place(part.nbytes)
        assert pieces.memory is not None
        pieces.memory[:] = part
        pieces.landed()
        self._moved.received += part.nbytes
