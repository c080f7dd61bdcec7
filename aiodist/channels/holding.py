"""A version of weights as one participant has it: its memory, and how much of it is there."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Self, TypeVar

import numpy as np

from aiodist.buffers.arrays import Flat
from aiodist.channels import directory, manifest
from aiodist.channels.checks import crc32
from aiodist.channels.directory import Release
from aiodist.channels.manifest import Leaf, Manifest
from aiodist.channels.memory import Spare, VersionMemory
from aiodist.errors import AiodistError, ProtocolError

MOST_FAILURES = 3
"""After so many failures of differences, a version comes whole."""

T = TypeVar("T")


async def in_thread(work: Callable[[], T]) -> T:
    """Run `work` in a thread. A cancellation waits for its end, because it uses memory of the
    user."""
    doing = asyncio.get_running_loop().run_in_executor(None, work)
    cancelled = False
    while not doing.done():
        try:
            await asyncio.wait({doing})
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        doing.exception()  # because asyncio would report an error that no caller can look at
        raise asyncio.CancelledError
    return doing.result()


class ComingVersion(ABC):
    """Data of a version that is being received, and forwarded meanwhile.

    Participants that take it from here are told to wait as long as it is `fed`, which means that
    this one is looking for a source. That comes to an end by itself. `stirs`: how often it had to
    look for another source. `starved`: how often there was none. `given`: how many parts each
    receiver has that is sent it from here. `name`: of its slices; "": it is the whole version.
    """

    def __init__(self, version: int, name: str = "") -> None:
        self.version = version
        self.name = name
        self.fed = 0
        self.stirs = 0
        self.starved = 0
        self.is_starved = False
        """No participant had the version at the last search."""
        self.is_coded = True
        """Whether to ask for differences."""
        self._failures = 0  # of differences
        self.given: dict[object, int] = {}
        self.wanted = 0
        """The number of calls that wait for all of it."""
        self.readers = 0
        self.memory: VersionMemory | None = None
        """Its memory; None before there is any."""
        self.gone = asyncio.Event()
        """Set when it has no reader, and will have none."""
        self._retired = False
        self._recalled = False
        self._news = asyncio.Event()

    @property
    @abstractmethod
    def is_whole(self) -> bool:
        """Whether all of it is here."""

    @property
    @abstractmethod
    def id(self) -> bytes:
        """Tells it from other versions of its number; empty: it has no differences."""

    @property
    @abstractmethod
    def releases(self) -> tuple[Release, ...]:
        """The releases of its shares."""

    @property
    def identity(self) -> bytes:
        return directory.identity(self.releases)

    @property
    @abstractmethod
    def here(self) -> int:
        """The number of its bytes that are here."""

    @property
    def is_own(self) -> bool:
        """Whether it has memory that does not belong to another process."""
        return self.memory is not None and self.memory.is_own

    @property
    def own_bytes(self) -> int:
        """Bytes of memory that it takes; 0 if the memory belongs to another process."""
        return len(self.memory.view) if self.memory is not None and self.is_own else 0

    @property
    def can_be_mapped(self) -> bool:
        """Whether others on the host can map its memory."""
        return self.memory is not None and self.memory.words() is not None

    @property
    def has_lasting_memory(self) -> bool:
        """Whether its memory will stay the same.

        A participant that has half a version in another one's memory gets its own if that one is
        gone.
        """
        return self.memory is not None and (self.is_whole or self.memory.is_own)

    @property
    def is_abandoned(self) -> bool:
        """Whether no more of it will come, or be given."""
        return self._recalled or (self._retired and not self.is_whole)

    def stir(self) -> None:
        """Note that another source has to be found, which takes a moment."""
        self.stirs += 1
        self.tell()

    def starve(self) -> None:
        """Note that no living participant has the version."""
        self.starved += 1
        self.is_starved = True
        self.tell()

    @contextmanager
    def feeding(self) -> Iterator[None]:
        """Note that a transfer runs while this context lasts."""
        self.fed += 1
        self.is_starved = False
        try:
            yield
        finally:
            self.fed -= 1

    @contextmanager
    def wanting(self) -> Iterator[None]:
        """Note that a call waits for all of the version while this context lasts."""
        self.wanted += 1
        try:
            yield
        finally:
            self.wanted -= 1

    @contextmanager
    def decoding(self) -> Iterator[None]:
        """Note that differences come while this context lasts.

        If they are bad, the rest comes whole, because other sources may have the same ones. If a
        source is lost, others are asked for differences first.
        """
        try:
            yield
        except (AiodistError, OSError, MemoryError) as error:
            self._failures += 1
            is_bad = isinstance(error, ProtocolError)
            self.is_coded = not is_bad and self._failures < MOST_FAILURES
            raise

    def tell(self) -> None:
        """Wake up those that wait for news."""
        self._news.set()
        self._news = asyncio.Event()

    def news(self) -> Coroutine[Any, Any, Any]:
        """Wait for the next change after this call.

        A task that waits begins later, so changes before that count, too.
        """
        return self._news.wait()

    def retire(self) -> None:
        """Stop giving the version to others. Readers that have begun may go on."""
        self._retired = True
        self.tell()
        if not self.readers:
            self._let_go()

    def recall(self) -> None:
        """Retire the version, and let its receivers take the rest from others."""
        self._recalled = True
        self.retire()

    def __enter__(self) -> Self:
        """Begin to read it. It stays until all readers are done."""
        self.readers += 1
        return self

    def __exit__(self, *_: object) -> None:
        self.readers -= 1
        if self._retired and not self.readers:
            self._let_go()

    def _let_go(self) -> None:
        self.gone.set()


class Holding(ComingVersion):
    """A version, of which the first `filled` parts are here.

    `spare`: the source of own memory, which goes back there at the end.
    """

    def __init__(self, release: Release, spare: Spare | None = None) -> None:
        super().__init__(release.version)
        self.release = release
        self._spare = spare
        self.filled = 0
        self.is_begun = False
        """Whether it is known if the version has differences."""
        self._manifest: Manifest | None = None

    @classmethod
    def over(cls, release: Release, memory: VersionMemory) -> Self:
        """Another one's memory as a version, as if all of it were there."""
        holding = cls(release)
        holding.take(memory, release.parts)
        return holding

    @property
    def is_whole(self) -> bool:
        return self.filled == self.release.parts

    @property
    def id(self) -> bytes:
        return self.release.id

    @property
    def releases(self) -> tuple[Release, ...]:
        return (self.release,)

    @property
    def here(self) -> int:
        return self.release.span(self.filled - 1)[1] if self.filled else 0

    @property
    def view(self) -> memoryview:
        assert self.memory is not None
        return self.memory.view

    @property
    def manifest(self) -> Manifest:
        """Its manifest; only after the first part is here."""
        if self._manifest is None:
            self._manifest = Manifest.read(self.part(0), self.release)
        return self._manifest

    @property
    def has_leaves(self) -> bool:
        return self.filled > 0

    def leaves(self) -> list[Leaf]:
        return manifest.leaves(self.manifest)

    def has_leaf(self, leaf: Leaf) -> bool:
        """Whether all of an array is here."""
        return self.filled >= self.release.parts_to(leaf.start + leaf.spec.nbytes)

    def read(self, leaf: Leaf) -> Any:
        """An array, in the form that users get."""
        return leaf.read(self.view, self.release.data)

    def lying(self, leaf: Leaf) -> Flat:
        return leaf.over(self.bytes_from, self.release.data)

    def part(self, number: int) -> memoryview:
        return self.bytes_from(*self.release.span(number))

    def bytes_from(self, start: int, stop: int) -> memoryview:
        assert self.memory is not None
        return self.memory.read(start, stop)

    def check(self, number: int) -> None:
        """Raise ProtocolError if a part is not what was published."""
        if number == 0:
            self._manifest = Manifest.read(self.part(0), self.release)
        elif crc32(self.part(number)) != self.manifest.checks[number - 1]:
            raise ProtocolError(f"chunk {number} of version {self.release.version} came damaged")

    def check_all(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self.check(number)

    def take(self, memory: VersionMemory, filled: int = 0) -> None:
        before, self.memory = self.memory, memory
        if before is not None:  # closed last, because a thread may be reading
            before.close()
        self._fill(filled)

    def fill(self) -> None:
        """Note that one more part is here."""
        self._fill(self.filled + 1)

    def _fill(self, filled: int) -> None:
        self.filled = filled
        self.is_begun = self.is_begun or filled > 0
        self.tell()

    async def make_own(self, *, shared: bool) -> None:
        """Get own memory, and copy what is here of another one's. Raises MemoryError."""
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
    """New memory, with the first `end` bytes of another one's. Raises MemoryError."""
    own = VersionMemory(nbytes, shared=shared, spare=spare)
    place = own.view
    view = memoryview(b"") if before is None else before.view

    def copy() -> None:
        # By chunks, because numpy lets other threads run only between copies.
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
