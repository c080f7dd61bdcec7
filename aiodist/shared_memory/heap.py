"""Arrays in memory that all ranks of a group can see, as `Group.empty` returns them.

Each array is a segment of its own. The other ranks are told where to fetch it. They map it and say
so, and from then on collectives may read the array in place. It ends with its last view.

The system may reuse the address of a dropped array at once, although the others may still map the
old memory. So `locate` first removes dropped arrays, and then looks for an address. Ranks refer to
arrays by number, because a number is never used twice.

A rank sends the location of its array with the call, or in its offer. If the array of one rank is
elsewhere, all ranks use staging memory instead. `aiodist.schedules.pull_direct` has the plans that
read arrays in place.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import os
import sys
import weakref
from collections import defaultdict, deque
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from aiodist.buffers import arrays
from aiodist.buffers.dtypes import carrier
from aiodist.buffers.segment import Segment
from aiodist.errors import ProtocolError
from aiodist.transports.handover import SegmentOffers, take
from aiodist.wire import kinds

if sys.platform != "win32":
    import resource

log = logging.getLogger("aiodist.group")

MOST = 4096
"""The most arrays of one peer that are mapped, or are being mapped, at a time."""
AT_ONCE = 2
"""The most arrays of one peer that are fetched at a time, because each takes a file here and there.
"""
AGAIN = 1.0
"""Seconds until an array is fetched again that could not be, because there were no files."""
OFFSET_BITS = 38
"""The low bits of a location are the byte within an array, up to 256 GiB. The bits above them are
the number of the array."""
NUMBERS = (1 << 63 - OFFSET_BITS) - 1
"""How many numbers of arrays fit into a location, which is below 2**63: some 33 million."""

Bytes = NDArray[np.uint8]


class Spawner(Protocol):
    """Runs tasks in the background while the membership lasts."""

    def spawn(self, coroutine: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Start `coroutine` as a task. It is cancelled when the membership ends."""
        ...


class HeapGroup(Protocol):
    """The group whose ranks have a heap."""

    rank: int
    size: int
    loop: asyncio.AbstractEventLoop

    @property
    def endpoint(self) -> Spawner: ...

    def tell(self, peer: int, kind: int, *fields: Any) -> None:
        """Send `peer` a frame of this kind that belongs to no operation."""
        ...


class Block:
    """An array of this rank: its memory from `start` to `stop`, and the ranks that have not mapped
    it yet."""

    __slots__ = ("missing", "number", "start", "stop")

    def __init__(self, number: int, start: int, nbytes: int, missing: set[int]) -> None:
        self.number = number
        self.start = start
        self.stop = start + nbytes
        self.missing = missing


_offered: Final[set[Block]] = set()
"""Arrays of this process, in any group, that not all others have mapped. Each takes a file."""
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_offered.clear)


def most_offered() -> int:
    """How many arrays may take a file at a time: half as many as this process may open."""
    files: int = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return MOST if files == resource.RLIM_INFINITY else files // 2


class Heap:
    """The shared arrays of one group, as seen by one rank."""

    def __init__(self, context: HeapGroup, *, shares: bool) -> None:
        self._context = context
        self._shares = shares  # whether all ranks can map memory of each other
        self._blocks: dict[int, Block] = {}  # arrays of this rank, by number
        self._next = 0  # the number of the next array
        self._offers: SegmentOffers | None = None  # arrays that not all others have mapped
        self._dead: deque[int] = deque()  # numbers of arrays whose last view is gone
        self._mapped: dict[tuple[int, int], Bytes] = {}  # arrays of others, by (rank, number)
        self._coming: dict[tuple[int, int], asyncio.Task[None]] = {}  # arrays that are being mapped
        self._turns = defaultdict[int, asyncio.Semaphore](lambda: asyncio.Semaphore(AT_ONCE))
        self.shows_any = False
        """Whether this rank has an array that all others have mapped."""

    # -- own arrays -------------------------------------------------------------------------------

    def empty(self, shape: int | Sequence[int], dtype: Any, like: Any) -> Any:
        """See `Group.empty`."""
        kind, name = arrays.kind_and_name(dtype, like)
        sizes = (shape,) if isinstance(shape, int) else tuple(shape)
        if any(size < 0 for size in sizes):
            raise ValueError(f"shape has a negative size: {sizes}; sizes must be 0 or more")
        nbytes = math.prod(sizes) * carrier(name).itemsize
        memory = self._allocate(nbytes) if self._may_share(nbytes) else np.zeros(nbytes, np.uint8)
        return arrays.over(memory, kind, name, sizes)

    def _may_share(self, nbytes: int) -> bool:
        """Whether the others may map one more array. They refuse more than `MOST` of one rank."""
        if not (self._shares and 0 < nbytes <= 1 << OFFSET_BITS):
            return False
        self._drop_dead()
        has_number = len(self._blocks) < MOST and self._next < NUMBERS
        return has_number and len(_offered) < most_offered()

    def _allocate(self, nbytes: int) -> Bytes:
        """Return new memory, all zero, and offer it to the others. Raises OSError."""
        context = self._context
        if self._offers is None:
            self._offers = SegmentOffers(context.loop)
        segment = Segment.create(nbytes, "aiodist-array")
        memory = np.frombuffer(segment.memory, np.uint8)
        number = self._next
        self._next += 1
        missing = {rank for rank in range(context.size) if rank != context.rank}
        block = self._blocks[number] = Block(number, address_of(memory), nbytes, missing)
        _offered.add(block)
        words = self._offers.add(number, segment)
        # The user decides how long an array lives, by views that this class never sees. The
        # reference to the heap is weak, because the array may outlive the group.
        weakref.finalize(memory, _dropped, weakref.ref(self), number).atexit = False
        for peer in missing:
            context.tell(peer, kinds.REGION, number, *words, nbytes)
        return memory

    def locate(self, address: int, nbytes: int) -> int:
        """Return the location of these bytes for `find`, or 0 if not all others see them."""
        self._drop_dead()
        for block in self._blocks.values():
            if block.start <= address and address + nbytes <= block.stop:
                if block.missing:
                    return 0
                return (block.number << OFFSET_BITS | address - block.start) + 1
        return 0

    def place_of(self, parts: Iterable[NDArray[Any]]) -> int:
        """Return the location of contiguous arrays for `find`.

        Returns 0 if one array does not begin at the end of the one before, or if not all others see
        them.
        """
        if not self.shows_any:
            return 0
        start = stop = 0
        for part in parts:
            address = address_of(part)
            if not start:
                start = stop = address
            if address != stop:
                return 0
            stop += part.nbytes
        return self.locate(start, stop - start)

    def mapped(self, peer: int, number: int) -> None:
        """Note that `peer` has mapped an array of this rank."""
        block = self._blocks.get(number)
        if block is None:
            return
        block.missing.discard(peer)
        if not block.missing:
            self.shows_any = True
            self._withdraw(block)  # no further rank may fetch it, but the memory stays

    def _withdraw(self, block: Block) -> None:
        _offered.discard(block)
        if self._offers is not None:
            self._offers.drop(block.number)
            if not self._offers.segments:  # its socket takes a file, too
                self._offers.close()
                self._offers = None

    def dropped(self, number: int) -> None:
        """Note that the last view of an array is gone. Any thread may call this at any time."""
        self._dead.append(number)
        if not self._context.loop.is_closed():
            self._context.loop.call_soon_threadsafe(self._drop_dead)

    def _drop_dead(self) -> None:
        """Forget arrays whose last view is gone, and tell the others."""
        while self._dead:
            number = self._dead.popleft()
            block = self._blocks.pop(number, None)
            if block is None:  # the group has ended
                continue
            self._withdraw(block)
            self.shows_any = any(not block.missing for block in self._blocks.values())
            for peer in range(self._context.size):
                if peer != self._context.rank:
                    self._context.tell(peer, kinds.UNMAP, number)

    # -- arrays of others -------------------------------------------------------------------------

    def find(self, peer: int, location: int, nbytes: int) -> Bytes:
        """Return bytes of `peer` at a location that it sent. Raises ProtocolError."""
        number, offset = divmod(location - 1, 1 << OFFSET_BITS)
        memory = self._mapped.get((peer, number))
        if memory is None or offset + nbytes > len(memory):
            raise ProtocolError(f"rank {peer} names shared memory that it does not share")
        return memory[offset : offset + nbytes]

    def heard(self, peer: int, fields: Sequence[Any]) -> None:
        """Handle a frame from `peer` about its arrays or ours. Raises ProtocolError."""
        match fields:
            case [kinds.REGION, _, int(number), str(address), bytes(key), int(nbytes)]:
                if not 0 < nbytes <= 1 << OFFSET_BITS:
                    raise ProtocolError(
                        f"rank {peer} shares an array of {nbytes} bytes, and 1 to"
                        f" {1 << OFFSET_BITS} are allowed"
                    )
                known = sum([rank == peer for rank, _ in (*self._mapped, *self._coming)])
                if known >= MOST:
                    raise ProtocolError(
                        f"rank {peer} shares over {MOST} arrays at a time, and {MOST} are allowed"
                    )
                if (peer, number) in self._mapped or (peer, number) in self._coming:
                    raise ProtocolError(f"rank {peer} shares array {number} twice")
                self._coming[peer, number] = self._context.endpoint.spawn(
                    self._map(peer, number, (address, key), nbytes), "aiodist shared array"
                )
            case [kinds.MAPPED, _, int(number)]:
                self.mapped(peer, number)
            case [kinds.UNMAP, _, int(number)]:
                coming = self._coming.pop((peer, number), None)
                if coming is not None:
                    coming.cancel()
                self._mapped.pop((peer, number), None)
            case _:
                raise ProtocolError("a frame about shared arrays is malformed")

    async def _map(self, peer: int, number: int, words: tuple[str, bytes], nbytes: int) -> None:
        while True:
            try:
                async with self._turns[peer]:
                    memory = await take(words, nbytes)
                break
            except OSError as error:
                # The array goes through staging memory then, or was dropped in the meantime.
                log.debug("could not map an array of rank %d: %s", peer, error)
                if error.errno not in (errno.EMFILE, errno.ENFILE):
                    self._coming.pop((peer, number), None)
                    return
            await asyncio.sleep(AGAIN)
        # The array may have been dropped, or the group closed, while the memory was on its way. The
        # cancel of this task may have come too late. So if the array is no longer expected, it is
        # released, and the peer is not told.
        if self._coming.pop((peer, number), None) is not None:
            self._mapped[peer, number] = np.frombuffer(memory, np.uint8)
            self._context.tell(peer, kinds.MAPPED, number)

    def close(self) -> None:
        """Release all memory, because the group has ended. The user's arrays stay usable."""
        coming, self._coming = self._coming, {}
        for task in coming.values():
            task.cancel()
        self.shows_any = False
        _offered.difference_update(self._blocks.values())
        if self._offers is not None:
            self._offers.close()
        self._blocks.clear()
        self._mapped.clear()


def address_of(memory: NDArray[Any]) -> int:
    address: int = memory.__array_interface__["data"][0]
    return address


def _dropped(heap: weakref.ref[Heap], number: int) -> None:
    found = heap()
    if found is not None:
        found.dropped(number)
