"""A version of weights as one participant has it: its memory, and how much of it is there."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Self, TypeVar

import numpy as np

from aiodist.buffers.arrays import Flat
from aiodist.channels import manifest
from aiodist.channels.checks import crc32
from aiodist.channels.directory import Release
from aiodist.channels.manifest import Leaf, Manifest
from aiodist.channels.memory import Spare, VersionMemory
from aiodist.errors import ProtocolError

T = TypeVar("T")


async def in_thread(work: Callable[[], T]) -> T:
    """Do it in a thread. A cancellation waits for its end: it reads or writes memory of a user."""
    doing = asyncio.get_running_loop().run_in_executor(None, work)
    cancelled = False
    while not doing.done():
        try:
            await asyncio.wait({doing})
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        raise asyncio.CancelledError
    return doing.result()


class Coming(ABC):
    """Something of a version that comes, and is handed on meanwhile.

    Whoever takes it from this participant is told to wait as long as it is `fed`: as long as this
    one looks for somebody to take it from, which comes to an end by itself. `stirs` counts how
    often it has had to look for another one, and `starved` how often there was nobody. `given`: how
    many parts of it those have who are sent it from here, by whom they are to the one who sends.
    """

    def __init__(self, version: int) -> None:
        self.version = version
        self.fed = 0
        self.stirs = 0
        self.starved = 0
        self.is_starved = False
        """Nobody had the version when it was looked for last."""
        self.given: dict[object, int] = {}
        self.wanted = 0
        """How many wait for all of it."""
        self.readers = 0
        self.memory: VersionMemory | None = None
        """Where it lies; None before there is any."""
        self.gone = asyncio.Event()
        """Nobody reads it any more, nor will."""
        self._retired = False
        self._recalled = False
        self._news = asyncio.Event()

    @property
    @abstractmethod
    def is_whole(self) -> bool:
        """Whether all of it is here."""

    @property
    @abstractmethod
    def here(self) -> int:
        """How many of its bytes are here."""

    @property
    def own_bytes(self) -> int:
        """Bytes of memory that it takes: none where it is somebody else's."""
        return len(self.memory.view) if self.memory is not None and self.memory.is_own else 0

    @property
    def can_be_mapped(self) -> bool:
        """Whether others of the host can map its memory."""
        return self.memory is not None and self.memory.words() is not None

    @property
    def has_lasting_memory(self) -> bool:
        """Whether its memory stays what it is: one that has half a version in the memory of another
        who is gone will have its own in a moment."""
        return self.memory is not None and (self.is_whole or self.memory.is_own)

    @property
    def is_abandoned(self) -> bool:
        """Whether no more of it will come, or be given."""
        return self._recalled or (self._retired and not self.is_whole)

    def stir(self) -> None:
        """The version has to come from somebody else from now on, which takes a moment."""
        self.stirs += 1
        self.tell()

    def starve(self) -> None:
        """Nobody who is there has the version."""
        self.starved += 1
        self.is_starved = True
        self.tell()

    @contextmanager
    def feeding(self) -> Iterator[None]:
        """While this lasts, the version is being taken from somebody."""
        self.fed += 1
        self.is_starved = False
        try:
            yield
        finally:
            self.fed -= 1

    @contextmanager
    def wanting(self) -> Iterator[None]:
        """While this lasts, somebody waits for all of the version."""
        self.wanted += 1
        try:
            yield
        finally:
            self.wanted -= 1

    def tell(self) -> None:
        """Something has changed."""
        self._news.set()
        self._news = asyncio.Event()

    def news(self) -> Coroutine[Any, Any, Any]:
        """Wait until something has changed since this was called: a task that waits begins later,
        and what changes before that is news, too."""
        return self._news.wait()

    def retire(self) -> None:
        """Give the version to nobody any more. Who reads it already may go on."""
        self._retired = True
        self.tell()
        if not self.readers:
            self._let_go()

    def recall(self) -> None:
        """Retire the version, and have those who are being given it take the rest from others."""
        self._recalled = True
        self.retire()

    def __enter__(self) -> Self:
        """Somebody reads it, and it stays until he is done."""
        self.readers += 1
        return self

    def __exit__(self, *_: object) -> None:
        self.readers -= 1
        if self._retired and not self.readers:
            self._let_go()

    def _let_go(self) -> None:
        self.gone.set()


class Holding(Coming):
    """A version, and what of it is here: its first `filled` parts.

    `spare`: where own memory is from, and goes when the version is over.
    """

    def __init__(self, release: Release, spare: Spare | None = None) -> None:
        super().__init__(release.version)
        self.release = release
        self._spare = spare
        self.filled = 0
        self.is_begun = False
        """Whether it is known if differences of it come."""
        self._manifest: Manifest | None = None

    @classmethod
    def over(cls, release: Release, memory: VersionMemory) -> Self:
        """What lies in the memory of another one, as if all of it were there."""
        holding = cls(release)
        holding.take(memory, release.parts)
        return holding

    @property
    def is_whole(self) -> bool:
        return self.filled == self.release.parts

    @property
    def here(self) -> int:
        return self.release.span(self.filled - 1)[1] if self.filled else 0

    @property
    def view(self) -> memoryview:
        """All of its memory."""
        assert self.memory is not None
        return self.memory.view

    @property
    def manifest(self) -> Manifest:
        """To be asked for when the first part is there."""
        if self._manifest is None:
            self._manifest = Manifest.read(self.part(0), self.release)
        return self._manifest

    @property
    def has_leaves(self) -> bool:
        """Whether it is known which arrays there are."""
        return self.filled > 0

    def leaves(self) -> list[Leaf]:
        return manifest.leaves(self.manifest)

    def has_leaf(self, leaf: Leaf) -> bool:
        """Whether all of an array is here."""
        return self.filled >= self.release.parts_to(leaf.start + leaf.spec.nbytes)

    def read(self, leaf: Leaf) -> Any:
        """An array, as users get it."""
        return leaf.read(self.view, self.release.data)

    def lying(self, leaf: Leaf) -> Flat:
        """An array, as numpy holds its elements."""
        return leaf.over(self.bytes_from, self.release.data)

    def part(self, number: int) -> memoryview:
        """The memory of one part."""
        return self.bytes_from(*self.release.span(number))

    def bytes_from(self, start: int, stop: int) -> memoryview:
        """Some of its memory."""
        assert self.memory is not None
        return self.memory.read(start, stop)

    def check(self, number: int) -> None:
        """Raises ProtocolError where a part that came is not what was published."""
        if number == 0:
            Manifest.read(self.part(0), self.release)
        elif crc32(self.part(number)) != self.manifest.checks[number - 1]:
            raise ProtocolError(f"chunk {number} of version {self.release.version} came damaged")

    def check_all(self, numbers: Iterable[int]) -> None:
        """`check` one after the other."""
        for number in numbers:
            self.check(number)

    def take(self, memory: VersionMemory, filled: int = 0) -> None:
        """From now on this is its memory, of which so many parts are there."""
        if self.memory is not None:
            self.memory.close()
        self.memory = memory
        self._fill(filled)

    def fill(self) -> None:
        """One part more is there."""
        self._fill(self.filled + 1)

    def _fill(self, filled: int) -> None:
        self.filled = filled
        self.is_begun = self.is_begun or filled > 0
        self.tell()

    async def make_own(self, *, shared: bool) -> None:
        """Have memory of its own, with what is here of another's. Raises OSError, MemoryError."""
        if self.memory is not None and self.memory.is_own:
            return
        own = await own_memory(
            self.release.nbytes, self.memory, self.here, shared=shared, spare=self._spare
        )
        self.take(own, self.filled)

    def _let_go(self) -> None:
        super()._let_go()
        if self.memory is not None:
            self.memory.close()
            self.memory = None
            self.filled = 0


async def own_memory(
    nbytes: int, before: VersionMemory | None, end: int, *, shared: bool, spare: Spare | None
) -> VersionMemory:
    """New memory, with the first `end` bytes of another's. Raises OSError, MemoryError."""
    own = VersionMemory(nbytes, shared=shared, spare=spare)
    place = own.view
    view = memoryview(b"") if before is None else before.view

    def copy() -> None:
        # By chunks, for each copy of numpy lets others run when it is done.
        for at in range(0, end, manifest.CHUNK):
            stop = min(at + manifest.CHUNK, end)
            np.copyto(
                np.frombuffer(place[at:stop], np.uint8), np.frombuffer(view[at:stop], np.uint8)
            )

    try:
        await in_thread(copy)
    except BaseException:
        own.close()
        raise
    return own
