"""Cutting a message's memory into the payloads of frames, and filling memory from them. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from aiodist.wire.frames import MAX_PAYLOAD

ALONE = 16 * 1024
"""Buffers of at least this size share no piece with others, so that their bytes are received in
place. Smaller ones are joined, because that needs fewer frames."""


def cut(buffers: Sequence[memoryview], most: int = MAX_PAYLOAD) -> Iterator[list[memoryview]]:
    """Yield the bytes of `buffers`, in order, as pieces of 1 to `most` bytes."""
    # Pieces are as large as possible. The cost of one in Python, on both sides, is that of sending
    # a hundred KiB. Small pieces gain nothing, because bytes go to their place as they come, not
    # when a piece is complete.
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


def behind(buffers: Sequence[memoryview], start: int) -> list[memoryview]:
    """Return all but the first `start` bytes."""
    rest = []
    for buffer in buffers:
        if start < buffer.nbytes:
            rest.append(buffer[start:] if start else buffer)
        start = max(0, start - buffer.nbytes)
    return rest


class Pieces:
    """Memory that pieces of any size fill in order. It is the landing of each piece.

    `memory`: the place of the current piece, if there is one. `left`: how many bytes are still to
    come. `filled` is called when there are none.
    """

    __slots__ = ("_at", "_filled", "_index", "_spilled", "_views", "left", "memory")

    def __init__(
        self, views: Sequence[memoryview], filled: Callable[[], None] | None = None
    ) -> None:
        self._filled = filled
        self.memory: memoryview | None = None
        self._spilled = False  # the current piece covers more than one buffer
        self._begin(views)

    def _begin(self, views: Sequence[memoryview]) -> None:
        self._views = [view for view in views if view.nbytes]
        self._index = 0  # the buffer that is filled next
        self._at = 0  # how far it is filled
        self.left = sum(view.nbytes for view in self._views)

    def place(self, nbytes: int) -> None:
        """Begin the next piece, of 1 to `left` bytes. It goes directly to its place if that is
        within one buffer."""
        view = self._views[self._index]
        self._spilled = self._at + nbytes > view.nbytes
        if self._spilled:
            self.memory = memoryview(bytearray(nbytes))
        else:
            self.memory = view[self._at : self._at + nbytes]

    def landed(self) -> None:
        """Note that the current piece is complete."""
        piece, self.memory = self.memory, None
        assert piece is not None
        if self._spilled:
            self._write(piece)
        else:
            self._skip(piece.nbytes)
        if not self.left and self._filled is not None:
            self._filled()

    def move(self, views: Sequence[memoryview]) -> None:
        """Go on in other memory of the same size, with the bytes that have come.

        It is not known how much of the current piece has come. So all of its memory is copied, and
        the link writes the rest over it.
        """
        came = [*self._views[: self._index]]
        if self._at:
            came.append(self._views[self._index][: self._at])
        piece = self.memory
        self._begin(views)
        for view in came:
            self._write(view)
        if piece is not None:
            self.place(piece.nbytes)
            assert self.memory is not None
            self.memory[:] = piece

    def _write(self, data: memoryview) -> None:
        while data.nbytes:
            view = self._views[self._index]
            count = min(data.nbytes, view.nbytes - self._at)
            view[self._at : self._at + count] = data[:count]
            self._skip(count)
            data = data[count:]

    def _skip(self, count: int) -> None:
        """Advance by `count` bytes, which are in one buffer."""
        self._at += count
        self.left -= count
        if self._at == self._views[self._index].nbytes:
            self._index += 1
            self._at = 0
