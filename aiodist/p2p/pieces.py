"""Cutting a message's memory into the payloads of frames, and filling memory from them. No I/O."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from aiodist.wire.frames import MAX_PAYLOAD

ALONE = 16 * 1024
"""Buffers from this size on share no piece with others, so that their bytes can be received in
place; smaller ones are joined, for fewer frames."""


def cut(buffers: Sequence[memoryview], most: int = MAX_PAYLOAD) -> Iterator[list[memoryview]]:
    """The bytes of `buffers`, in order, as pieces of at most `most` bytes, none of them empty."""
    joined: list[memoryview] = []
    size = 0
    for buffer in buffers:
        nbytes = buffer.nbytes
        if joined and (nbytes >= ALONE or size + nbytes > most):
            yield joined
            joined, size = [], 0
        if nbytes >= ALONE or nbytes > most:
            for at in range(0, nbytes, most):
                yield [buffer[at : at + most]]
        elif nbytes:
            joined.append(buffer)
            size += nbytes
    if joined:
        yield joined


class Landing:
    """Memory that pieces of any size fill in order. `left`: bytes that are still to come."""

    __slots__ = ("_at", "_index", "_piece", "_spilled", "_views", "left")

    def __init__(self, views: Sequence[memoryview]) -> None:
        self._views = [view for view in views if view.nbytes]
        self._index = 0
        self._at = 0
        self._piece: memoryview | None = None
        self._spilled = False
        self.left = sum(view.nbytes for view in self._views)

    @property
    def piece(self) -> memoryview | None:
        """Where the piece goes that is under way."""
        return self._piece

    def place(self, nbytes: int) -> memoryview:
        """Where the next piece goes, of 1 to `left` bytes: the memory itself if it lies in one
        buffer of it."""
        view = self._views[self._index]
        self._spilled = self._at + nbytes > view.nbytes
        if self._spilled:
            self._piece = memoryview(bytearray(nbytes))
        else:
            self._piece = view[self._at : self._at + nbytes]
        return self._piece

    def placed(self) -> None:
        """The piece under way is complete."""
        piece = self._piece
        assert piece is not None
        self._piece = None
        if self._spilled:
            self._write(piece)
        else:
            self._skip(piece.nbytes)

    def moved(self, views: Sequence[memoryview]) -> Landing:
        """A landing in other memory of the same size that holds the bytes that have come. The
        piece under way, if there is one, is placed there too, without any bytes."""
        other = Landing(views)
        for view in self._views[: self._index]:
            other._write(view)
        if self._at:
            other._write(self._views[self._index][: self._at])
        if self._piece is not None:
            other.place(self._piece.nbytes)
        return other

    def _write(self, data: memoryview) -> None:
        while data.nbytes:
            view = self._views[self._index]
            count = min(data.nbytes, view.nbytes - self._at)
            view[self._at : self._at + count] = data[:count]
            self._skip(count)
            data = data[count:]

    def _skip(self, count: int) -> None:
        """Advance by `count` bytes, which lie in one buffer."""
        self._at += count
        self.left -= count
        if self._at == self._views[self._index].nbytes:
            self._index += 1
            self._at = 0
