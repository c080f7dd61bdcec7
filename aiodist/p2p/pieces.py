"""Cutting a message's memory into the payloads of frames, and filling memory from them. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from aiodist.wire.frames import MAX_PAYLOAD

ALONE = 16 * 1024
"""Buffers from this size on share no piece with others, so that their bytes can be received in
place; smaller ones are joined, for fewer frames."""


def cut(buffers: Sequence[memoryview], most: int = MAX_PAYLOAD) -> Iterator[list[memoryview]]:
    """The bytes of `buffers`, in order, as pieces of at most `most` bytes, none of them empty."""
    # As large as can be: what each costs Python, on both sides, is as much as the system needs for
    # a hundred KiB, and nothing is gained by small ones. Bytes go to their place as they come, and
    # not when a piece is complete.
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
    """All but the first `start` bytes."""
    rest = []
    for buffer in buffers:
        if start < buffer.nbytes:
            rest.append(buffer[start:] if start else buffer)
        start = max(0, start - buffer.nbytes)
    return rest


class Pieces:
    """Memory that pieces of any size fill in order: the landing of each of them. `memory` is where
    the piece goes that is under way, if one is; `left` is how many bytes are still to come, and
    `filled` is called when there are none."""

    __slots__ = ("_at", "_filled", "_index", "_spilled", "_views", "left", "memory")

    def __init__(
        self, views: Sequence[memoryview], filled: Callable[[], None] | None = None
    ) -> None:
        self._filled = filled
        self.memory: memoryview | None = None
        self._spilled = False  # the piece under way lies in more than one buffer
        self._begin(views)

    def _begin(self, views: Sequence[memoryview]) -> None:
        self._views = [view for view in views if view.nbytes]
        self._index = 0  # the buffer that is filled next
        self._at = 0  # so far that one is filled
        self.left = sum(view.nbytes for view in self._views)

    def place(self, nbytes: int) -> None:
        """The next piece begins, of 1 to `left` bytes. It goes to where it belongs if that lies in
        one buffer of the memory."""
        view = self._views[self._index]
        self._spilled = self._at + nbytes > view.nbytes
        if self._spilled:
            self.memory = memoryview(bytearray(nbytes))
        else:
            self.memory = view[self._at : self._at + nbytes]

    def landed(self) -> None:
        """The piece under way is complete."""
        piece, self.memory = self.memory, None
        assert piece is not None
        if self._spilled:
            self._write(piece)
        else:
            self._skip(piece.nbytes)
        if not self.left and self._filled is not None:
            self._filled()

    def move(self, views: Sequence[memoryview]) -> None:
        """Go on in other memory of the same size, with the bytes that have come. How much there is
        of the piece under way, if there is one, is not known here: all of its memory is copied, and
        the link writes the rest of it over that."""
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
        """Advance by `count` bytes, which lie in one buffer."""
        self._at += count
        self.left -= count
        if self._at == self._views[self._index].nbytes:
            self._index += 1
            self._at = 0
