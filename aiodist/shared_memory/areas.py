"""The staging memory of the ranks of a host, as one of them uses it."""

from __future__ import annotations

from typing import Any

import numpy as np

from aiodist.buffers.vector import Vector
from aiodist.shared_memory.board import AREAS, Board


class Areas:
    """Views of the areas of all ranks, which are kept, and when the own ones may be reused."""

    def __init__(self, board: Board, size: int) -> None:
        self._board = board
        self._size = size  # ranks of the group, on whatever host
        self._vectors: dict[tuple[int, np.dtype[Any]], list[Vector]] = {}
        self.free = [0] * len(AREAS)
        """By area: the stamp that the others must reach before it may be written again."""

    def vectors(self, index: int, dtype: np.dtype[Any]) -> list[Vector]:
        """That area of all ranks, by rank, as vectors of `dtype`; empty ones for ranks of other
        hosts."""
        found = self._vectors.get((index, dtype))
        if found is None:
            board = self._board
            count = AREAS[index][1] // dtype.itemsize
            found = [Vector([], dtype)] * self._size
            for rank in (board.rank, *board.words):
                found[rank] = Vector.of(np.frombuffer(board.area(rank, index), dtype, count))
            self._vectors[index, dtype] = found
        return found

    def forget(self) -> None:
        """The areas are other ones from here on."""
        self._vectors.clear()

    def close(self) -> None:
        """Let go of all memory."""
        self._vectors.clear()
        self._board.close()
