"""The memory of versions, which is used again.

The first use of new memory takes the system several times as long as a copy. So memory of an old
version is kept for the next one (`Spare`). It is used again only if it is certain that it has no
reader:

* In this process, all views of it, including the arrays of users, refer to one object. That object
  is gone when the last view is.
* Other processes map it by a file with a lock. The kernel releases the lock when the last mapping
  is gone, even if a process was killed (`Segment.for_readers`).
* Memory that had views when this process forked is never used again, because of the child.

Otherwise new memory is allocated, and the old memory lasts as long as its readers.
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
"""Its name in /proc/self/maps."""


class _Forks:
    """Counts the forks of this process."""

    count = 0

    @classmethod
    def one_more(cls) -> None:
        cls.count += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_Forks.one_more)


class MemoryBlock:
    """Memory for one version after the other. `segment`: for other processes of the host, if it is
    `shared`."""

    def __init__(self, nbytes: int, *, shared: bool) -> None:
        """Raises OSError, MemoryError."""
        self.segment = Segment.create(nbytes, NAME) if shared else None
        self._memory = self.segment.memory if self.segment else np.empty(nbytes, np.uint8).data
        self._forks = _Forks.count  # the count of forks when the view was made
        self._is_known = True  # whether all mappings are known
        self._view: weakref.ref[object] | None = None

    def __len__(self) -> int:
        return len(self._memory)

    def view(self) -> memoryview:
        """All of it, for one version."""
        # This array object is referred to by everything that is made of the view. An array view
        # would not do, because numpy would refer to the first array alone.
        array = np.frombuffer(self._memory, np.uint8)
        self._view = weakref.ref(array)
        self._forks = _Forks.count
        return array.data

    def for_readers(self) -> Segment:
        """The segment for other processes. Raises OSError."""
        assert self.segment is not None
        try:
            return self.segment.for_readers()
        except OSError:
            # This system has no /proc, or does not let us open its files.
            self._is_known = False
            return Segment(self.segment.memory, os.dup(self.segment.fd))

    @property
    def is_free(self) -> bool:
        """Whether it is certain that it has no reader."""
        if self._view is not None and self._view() is not None:
            return False
        if self.segment is None:
            return True  # children have copies
        return self._is_known and self._forks == _Forks.count and not self.segment.is_read

    def close(self) -> None:
        """Use the block for no further version. Its readers keep it."""
        if self.segment is not None:
            self.segment.close()


class Spare:
    """Keeps at most one block for the next version; none after `close`."""

    def __init__(self, *, keeps: bool = True) -> None:
        self._block: MemoryBlock | None = None
        self._keeps = keeps

    @property
    def nbytes(self) -> int:
        return 0 if self._block is None else len(self._block)

    def block(self, nbytes: int, *, shared: bool) -> MemoryBlock:
        """The kept block, if it fits and has no reader; else a new one. Raises OSError,
        MemoryError."""
        kept = self._block
        if kept is not None:
            fits = len(kept) == nbytes and (kept.segment is not None) == shared
            if fits and kept.is_free:
                self._block = None
                return kept
            if not fits:
                self._drop()
        return MemoryBlock(nbytes, shared=shared)

    def keep(self, block: MemoryBlock) -> None:
        """Take back a block whose version is over."""
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
        """Keep no block from now on."""
        self._keeps = False
        self._drop()


class VersionMemory:
    """Memory of a version: own memory, which others on the host can map if it is `shared`; or
    mapped memory of another process; or arrays of a user.

    `view`: all of it; empty for arrays of a user.
    """

    def __init__(self, nbytes: int, *, shared: bool, spare: Spare | None = None) -> None:
        """Get own memory from `spare`, and give it back there. Raises MemoryError."""
        spare = spare or Spare(keeps=False)
        try:
            block = spare.block(nbytes, shared=shared)
        # An OSError would look like the failure of a source.
        except (OSError, MemoryError) as error:
            raise MemoryError(f"no memory of {nbytes} bytes for a version: {error}") from error
        self._set(block.view(), block.segment, block)
        self._spare = spare

    def _set(
        self, view: memoryview, segment: Segment | None = None, block: MemoryBlock | None = None
    ) -> None:
        self.view = view
        self._segment = segment
        self._block = block
        self._offer: SegmentOffer | None = None
        self._lent: Stretches | None = None

    @classmethod
    def of(cls, segment: Segment) -> VersionMemory:
        """The memory of a version in another process, mapped here."""
        memory = cls.__new__(cls)
        memory._set(segment.memory, segment)
        return memory

    @classmethod
    def lent(cls, arrays: Stretches) -> VersionMemory:
        """The memory of a version in arrays of a user."""
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
        """Whether it does not change as long as it is referred to."""
        return self._lent is None

    def read(self, start: int, stop: int) -> memoryview:
        return self.view[start:stop] if self._lent is None else self._lent.read(start, stop)

    def words(self) -> tuple[str, bytes] | None:
        """What others on the host need to map it; None: they cannot. Raises OSError."""
        if self._segment is None:
            return None
        if self._offer is None:
            # Mapped memory is passed on by the file that this process got.
            passed = self._segment if self._block is None else self._block.for_readers()
            self._offer = SegmentOffer(asyncio.get_running_loop(), len(self.view), NAME, passed)
        return self._offer.words

    def close(self) -> None:
        """Offer it to no process any more. Views and mappings keep it. Idempotent."""
        if self._offer is not None:
            self._offer.close()
        elif self._segment is not None and self._block is None:
            self._segment.close()
        self.view = memoryview(b"")
        block, self._block = self._block, None
        if block is not None:
            self._spare.keep(block)
