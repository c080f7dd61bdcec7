"""Views of the staging memory of all ranks of a host."""

from __future__ import annotations

from typing import Any

import numpy as np

from aiodist.buffers.vector import Vector
from aiodist.shared_memory.board import AREAS, Board


class Areas:
    """Keeps views of the areas of all ranks, and says when this rank may reuse its own areas."""

    def __init__(self, board: Board, size: int) -> None:
        self._board = board
        self._size = size  # the ranks of the group, on all hosts
        self._vectors: dict[tuple[int, np.dtype[Any]], list[Vector]] = {}
        self.free = [0] * len(AREAS)
        """By area: the stamp that the others must reach before this rank may write to it again."""

    def vectors(self, index: int, dtype: np.dtype[Any]) -> list[Vector]:
        """Return one area of each rank as a vector of `dtype`, by rank. Ranks of other hosts have
        an empty vector."""
        found = self._vectors.get((index, dtype))
        if found is None:
            board = self._board
            found = [Vector.of(np.empty(0, dtype))] * self._size
            for rank in (board.rank, *board.words):
                area = board.area(rank, index)
                count = len(area) // dtype.itemsize
                found[rank] = Vector.of(np.frombuffer(area, dtype, count))
            self._vectors[index, dtype] = found
        return found

    def forget(self) -> None:
        """Drop all views, because the areas are other ones from now on."""
        self._vectors.clear()

    def close(self) -> None:
        """Release all memory."""
        self._vectors.clear()
        self._board.close()
