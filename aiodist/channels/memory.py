"""The memory of versions, and how it is used again.

To touch memory for the first time takes the system several times as long as to copy into it. So
memory of a version that is over waits for the next one (`Spare`), and is used again once it is
certain that nobody reads it:

* Nobody of this process: all views of it, the arrays that users got included, refer to one object,
  which is gone when the last of them is.
* No other process: those that map it have it by a file with a lock, which the kernel lets go of
  when the last mapping is gone (`Segment.for_readers`), also if they were killed.
* No child that this process has forked: what it had views of when it did is not used again.

Otherwise there is new memory, and the old one lasts as long as somebody has it.
"""

from __future__ import annotations

import asyncio
import os
import weakref

import numpy as np

from aiodist.buffers.segment import Segment
from aiodist.channels.manifest import Stretches
from aiodist.transports.handover import SegmentOffer

NAME = "aiodist-weights"
"""What /proc/self/maps shows."""


class _Forks:
    """How often this process has forked."""

    count = 0

    @classmethod
    def one_more(cls) -> None:
        cls.count += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_Forks.one_more)


class Block:
    """Memory for one version after the other. `segment`: that which others of the host can map, if
    it is `shared`."""

    def __init__(self, nbytes: int, *, shared: bool) -> None:
        """New. Raises OSError, MemoryError."""
        self.segment = Segment.create(nbytes, NAME) if shared else None
        self._memory = self.segment.memory if self.segment else np.empty(nbytes, np.uint8).data
        self._forks = _Forks.count  # when the view was made
        self._is_known = True  # who maps it
        self._view: weakref.ref[object] | None = None

    def __len__(self) -> int:
        return len(self._memory)

    def view(self) -> memoryview:
        """All of it, for one version."""
        # An object of its own, which all that is made of the view refers to. No view of an array:
        # what is made of that refers to the first array alone.
        array = np.frombuffer(self._memory, np.uint8)
        self._view = weakref.ref(array)
        self._forks = _Forks.count
        return array.data

    def for_readers(self) -> Segment:
        """What is passed on to others. Raises OSError."""
        assert self.segment is not None
        try:
            return self.segment.for_readers()
        except OSError:
            # A system that has no /proc, or lets nobody open a file of it.
            self._is_known = False
            return Segment(self.segment.memory, os.dup(self.segment.fd))

    @property
    def is_free(self) -> bool:
        """Whether it is certain that nobody reads it."""
        if self._view is not None and self._view() is not None:
            return False
        if self.segment is None:
            return True  # children have copies
        return self._is_known and self._forks == _Forks.count and not self.segment.is_read

    def close(self) -> None:
        """Use the block for no further version. Who has its memory keeps it."""
        if self.segment is not None:
            self.segment.close()


class Spare:
    """At most one block whose version is over, for the next one; none after `close`."""

    def __init__(self, *, keeps: bool = True) -> None:
        self._block: Block | None = None
        self._keeps = keeps

    @property
    def nbytes(self) -> int:
        return 0 if self._block is None else len(self._block)

    def block(self, nbytes: int, *, shared: bool) -> Block:
        """That one, if it fits and nobody reads it any more; else a new one. Raises OSError,
        MemoryError."""
        kept = self._block
        if kept is not None:
            fits = len(kept) == nbytes and (kept.segment is not None) == shared
            if fits and kept.is_free:
                self._block = None
                return kept
            if not fits:
                self._drop()
        return Block(nbytes, shared=shared)

    def keep(self, block: Block) -> None:
        """Its version is over."""
        kept = self._block
        is_better = kept is not None and len(kept) == len(block) and kept.is_free
        if self._keeps and not is_better:
            self._drop()
            self._block = block
        else:
            block.close()

    def _drop(self) -> None:
        block, self._block = self._block, None
        if block is not None:
            block.close()

    def close(self) -> None:
        """Keep none from now on."""
        self._keeps = False
        self._drop()


class VersionMemory:
    """Memory of a version: own one, which others of the host can map (`shared`), or theirs, or
    arrays of a user. `view` is all of it, empty for the last."""

    def __init__(self, nbytes: int, *, shared: bool, spare: Spare | None = None) -> None:
        """Own one, from `spare`, to which it is given back. Raises OSError, MemoryError."""
        spare = spare or Spare(keeps=False)
        block = spare.block(nbytes, shared=shared)
        self._set(block.view(), block.segment, block)
        self._spare = spare

    def _set(
        self, view: memoryview, segment: Segment | None = None, block: Block | None = None
    ) -> None:
        self.view = view
        self._segment = segment
        self._block = block
        self._offer: SegmentOffer | None = None
        self._lent: Stretches | None = None

    @classmethod
    def of(cls, segment: Segment) -> VersionMemory:
        """The memory of a version in another process, which is mapped here."""
        memory = cls.__new__(cls)
        memory._set(segment.memory, segment)
        return memory

    @classmethod
    def lent(cls, arrays: Stretches) -> VersionMemory:
        """The memory of a version that lies in arrays of a user."""
        memory = cls.__new__(cls)
        memory._set(memoryview(b""))
        memory._lent = arrays
        return memory

    @property
    def is_own(self) -> bool:
        """Whether it is not mapped from another process."""
        return self._block is not None or self._lent is not None

    @property
    def is_steady(self) -> bool:
        """Whether nobody writes it as long as anybody refers to it."""
        return self._lent is None

    def read(self, start: int, stop: int) -> memoryview:
        """Some bytes of it."""
        return self.view[start:stop] if self._lent is None else self._lent.read(start, stop)

    def words(self) -> tuple[str, bytes] | None:
        """With which others of the host fetch it; None: they cannot. Raises OSError."""
        if self._segment is None:
            return None
        if self._offer is None:
            # Of mapped memory they get the file that this process got.
            passed = self._segment if self._block is None else self._block.for_readers()
            self._offer = SegmentOffer(asyncio.get_running_loop(), len(self.view), NAME, passed)
        return self._offer.words

    def close(self) -> None:
        """Nobody fetches it any more. Who has it, or a view of it, keeps it. Idempotent."""
        if self._offer is not None:
            self._offer.close()
        elif self._segment is not None and self._block is None:
            self._segment.close()
        self.view = memoryview(b"")
        block, self._block = self._block, None
        if block is not None:
            self._spare.keep(block)
