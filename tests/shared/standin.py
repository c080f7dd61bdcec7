"""A device that is none: shared memory of the host, behind streams and events as a GPU has them.

Collectives on device memory run on it as on a GPU, between processes, too. It shows what is
ordered wrongly: work is done by a thread, late and in the order of its stream alone; an event that
was not recorded holds nobody up; and memory that is freed is overwritten.
"""

from __future__ import annotations

import functools
import itertools
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import msgpack
import numpy as np
from numpy.typing import NDArray

from aiodist.buffers import overlaps
from aiodist.buffers.dtypes import carrier, name_of
from aiodist.buffers.kernels import Kernel
from aiodist.buffers.segment import Segment
from aiodist.devices.base import Event, Location, Stream
from aiodist.errors import ProtocolError
from aiodist.types import ReduceOp

SLOTS = 4096
"""Most events of a device."""
POOL = 1 << 20
"""Bytes that are allocated at once; small arrays share them."""
_ALIGNED = 512
_PAUSE = 0.0002
_numbers = itertools.count(1)
"""Of allocations: a process may have several devices, and uses no number twice."""

Memory = NDArray[Any]


def _open(handle: bytes) -> tuple[Memory, int, int]:
    """The memory of a process, to be read; what it says beside; and the process."""
    pid, fd, nbytes, extra = msgpack.unpackb(handle)
    try:
        copy = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
        return np.frombuffer(Segment.attach(copy, nbytes).memory, np.uint8), extra, pid
    except (OSError, ProtocolError) as error:
        raise OSError(f"memory of process {pid} cannot be had: {error}") from error


class StandinEvent:
    """`Event`: how often it was asked for, and how often the stream has come to it."""

    def __init__(self, words: Memory, handle: bytes, pid: int) -> None:
        self._words = words
        self.handle = handle
        self._pid = pid

    @property
    def asked(self) -> int:
        return int(self._words[0])

    def ask(self) -> int:
        self._words[0] += 1
        return int(self._words[0])

    def come(self, number: int) -> None:
        # What was recorded on two streams may be come to in any order: the last record counts.
        self._words[1] = max(int(self._words[1]), number)

    def reached(self, number: int) -> bool:
        """Whether that record is done; none is that a process left behind."""
        return int(self._words[1]) >= number or not os.path.exists(f"/proc/{self._pid}")

    def done(self) -> bool:
        return self.reached(self.asked)


class StandinStream:
    """`Stream`: what is queued is done by the thread of the device."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self.queue: deque[tuple[Callable[[], bool] | None, Callable[[], object] | None]] = deque()
        self._wake = wake

    def put(self, do: Callable[[], object] | None, ready: Callable[[], bool] | None = None) -> None:
        """Do that once it is `ready` and all before it is done."""
        self.queue.append((ready, do))
        self._wake()

    def record(self, event: Event) -> None:
        assert isinstance(event, StandinEvent)
        self.put(functools.partial(event.come, event.ask()))

    def wait(self, event: Event) -> None:
        assert isinstance(event, StandinEvent)
        self.put(None, functools.partial(event.reached, event.asked))

    def hold(self) -> threading.Event:
        """What is queued from here on waits until the result is set."""
        gate = threading.Event()
        self.put(None, gate.is_set)
        return gate

    def step(self) -> bool:
        """Do the next thing, if there is one that is ready."""
        if not self.queue:
            return False
        ready, do = self.queue[0]
        if ready is not None and not ready():
            return False
        if do is not None:
            do()
        self.queue.popleft()
        return True


def hold(stream: Stream) -> threading.Event:
    """What is queued from here on waits until the result is set."""
    assert isinstance(stream, StandinStream)
    return stream.hold()


class Pool:
    """An allocation, of which arrays get parts."""

    def __init__(self, number: int, nbytes: int) -> None:
        self.number = number
        self.segment = Segment.create(nbytes, "aiodist-standin")  # the allocation
        self.memory = np.frombuffer(self.segment.memory, np.uint8)  # its bytes
        # What another process needs to open it.
        self.handle: bytes = msgpack.packb([os.getpid(), self.segment.fd, nbytes, 0])
        self.used = 0  # bytes that were given away
        self.blocks = 0  # arrays that have parts of it, and are not freed


class Block:
    """The part of a pool that one array and its views have: freed with the last of them."""

    def __init__(self, pool: Pool, start: int, nbytes: int) -> None:
        self.pool = pool
        self.start = start
        self.nbytes = nbytes


class StandinArray:
    """An array on a stand-in. `block`: what it keeps alive, its `Block` if it lies on this one."""

    def __init__(
        self, device: StandinDevice, base: Memory, block: object, name: str | None = None
    ) -> None:
        self.__aiodist_device__ = device
        self.base = base
        self.block = block
        self.name = name or name_of(base.dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.base.shape

    @property
    def nbytes(self) -> int:
        return self.base.nbytes

    def __getitem__(self, index: Any) -> StandinArray:
        return StandinArray(self.__aiodist_device__, self.base[index], self.block, self.name)

    def reshape(self, shape: tuple[int, ...]) -> StandinArray:
        return StandinArray(
            self.__aiodist_device__, self.base.reshape(shape), self.block, self.name
        )

    @property
    def T(self) -> StandinArray:
        return StandinArray(self.__aiodist_device__, self.base.T, self.block, self.name)


class StandinDevice:
    """`Device`. To be closed: it has a thread."""

    kind = "standin"

    def __init__(self) -> None:
        self._changed = threading.Condition()  # told of each event that is recorded
        self._closed = False  # its thread is to end
        # Memory of all events, which other processes open.
        self._events = Segment.create(SLOTS * 16, "aiodist-standin-events")
        # Of each event: how often it was recorded, and how often it came.
        self._words = np.frombuffer(self._events.memory, np.int64).reshape(SLOTS, 2)
        self._slots = list(range(SLOTS))  # the places in `_words` that are free
        self._streams: list[StandinStream] = []  # what the thread looks through for work
        self._pools: list[Pool] = []  # allocations with room for more arrays
        self._all: set[Pool] = set()  # allocations that were not given back
        self._freed: deque[Pool] = deque()  # allocations whose last array is gone, to be given back
        self.opened = 0
        """How often an allocation was opened."""
        self._current = self.stream()  # the stream that users' work goes to
        # Does the work of all streams.
        self._thread = threading.Thread(target=self._work, name="stand-in", daemon=True)
        self._thread.start()

    # -- the device at work -----------------------------------------------------------------------

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify()

    def _work(self) -> None:
        while not self._closed:
            moved = [stream.step() for stream in list(self._streams)]
            if not any(moved):
                with self._changed:
                    busy = any(stream.queue for stream in self._streams)
                    if not self._closed:
                        self._changed.wait(_PAUSE if busy else 0.05)

    def close(self) -> None:
        """End the thread, whatever is queued."""
        self._closed = True
        self._wake()
        self._thread.join()
        for stream in self._streams:
            stream.queue.clear()
        for pool in list(self._all):
            self._retire(pool)
        self._pools.clear()
        self._freed.clear()
        self._streams.clear()
        self._events.close()
        self._words = np.empty((0, 2), np.int64)

    # -- arrays -----------------------------------------------------------------------------------

    def put(self, values: Memory) -> StandinArray:
        """A new array with these elements, copied in stream order."""
        array = self.new(str(name_of(values.dtype)), values.shape)
        kept = values.copy()
        self._current.put(lambda: np.copyto(array.base, kept))
        return array

    def get(self, array: StandinArray) -> Memory:
        """The elements as work that is queued now would see them. Blocks."""
        done = threading.Event()
        seen: list[Memory] = []
        base = array.base
        self._current.put(lambda: seen.append(base.copy()))
        self._current.put(done.set)
        if not done.wait(20):
            raise TimeoutError("the stream is held up")
        return seen[0]

    def fill(self, array: StandinArray, value: Any) -> None:
        """Overwrite it, in stream order."""
        base = array.base
        self._current.put(lambda: base.fill(value))

    def empty(self, stream: Stream, name: str, shape: Sequence[int]) -> StandinArray:
        return self.new(name, shape)  # memory is never used a second time

    def new(self, name: str, shape: Sequence[int]) -> StandinArray:
        """A new array, of whatever was there."""
        dtype = carrier(name)
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        room = -(-max(1, nbytes) // _ALIGNED) * _ALIGNED
        pools = self._held()
        pool = next((pool for pool in pools if pool.used + room <= len(pool.memory)), None)
        if pool is None:
            pool = Pool(next(_numbers), max(POOL, room))
            pools.append(pool)
            self._all.add(pool)
        start = pool.used
        pool.used += room
        pool.blocks += 1
        block = Block(pool, start, nbytes)
        memory = pool.memory[start : start + nbytes]
        weakref.finalize(block, self._free, pool, memory).atexit = False
        return StandinArray(self, memory.view(dtype).reshape(shape), block, name)

    def _free(self, pool: Pool, memory: Memory) -> None:
        if self._closed:
            return
        self._current.put(lambda: memory.fill(0xDD))
        self._freed.append(pool)  # by whichever thread has let go of it

    def _held(self) -> list[Pool]:
        """The pools of which any array has a part."""
        while self._freed:
            pool = self._freed.popleft()
            pool.blocks -= 1
            if not pool.blocks:
                self._pools.remove(pool)
                self._current.put(functools.partial(self._retire, pool))
        return self._pools

    @property
    def allocations(self) -> int:
        """How many there are."""
        return len(self._held())

    def _retire(self, pool: Pool) -> None:
        pool.segment.close()
        self._all.discard(pool)

    def host(self, name: str, shape: Sequence[int]) -> Memory:
        return np.empty(shape, carrier(name))

    def describe(self, array: StandinArray) -> tuple[str, tuple[int, ...]]:
        if array.name is None:
            raise TypeError(f"an array of {array.base.dtype} does not travel")
        return array.name, array.shape

    def layout(self, array: StandinArray) -> Memory:
        return array.base

    def can_write(self, array: StandinArray) -> bool:
        return not overlaps.folds(array.base)

    def flat(self, array: StandinArray) -> StandinArray | None:
        if not array.base.flags.c_contiguous:
            return None
        return StandinArray(self, array.base.reshape(-1), array.block, array.name)

    def written(self, array: StandinArray) -> None:
        pass

    # -- order ------------------------------------------------------------------------------------

    def current(self) -> StandinStream:
        return self._current

    def stream(self) -> StandinStream:
        stream = StandinStream(self._wake)
        self._streams.append(stream)
        return stream

    def event(self) -> StandinEvent:
        slot = self._slots.pop()
        nbytes = SLOTS * 16
        handle: bytes = msgpack.packb([os.getpid(), self._events.fd, nbytes, slot])
        event = StandinEvent(self._words[slot], handle, os.getpid())
        weakref.finalize(event, self._slots.append, slot).atexit = False
        return event

    def open_event(self, handle: bytes) -> StandinEvent:
        memory, slot, pid = _open(handle)
        return StandinEvent(memory.view(np.int64).reshape(SLOTS, 2)[slot], handle, pid)

    # -- memory of others -------------------------------------------------------------------------

    def locate(self, flat: StandinArray) -> Location:
        if not isinstance(flat.block, Block):
            raise OSError("it is memory of another process")
        pool = flat.block.pool
        at = flat.base.__array_interface__["data"][0]
        start = pool.memory.__array_interface__["data"][0]
        return Location(pool.number, pool.handle, at - start if flat.base.size else 0)

    def holds(self, allocation: int) -> bool:
        return any(pool.number == allocation for pool in self._held())

    def open(self, handle: bytes) -> Memory:
        self.opened += 1
        return _open(handle)[0]

    def at(
        self, memory: Memory, offset: int, name: str, length: int, owner: object | None = None
    ) -> StandinArray:
        stop = offset + length * carrier(name).itemsize
        if not 0 <= offset <= stop <= len(memory):
            raise ValueError(f"bytes {offset} to {stop} of an allocation of {len(memory)}")
        return StandinArray(self, memory[offset:stop].view(carrier(name)), owner, name)

    # -- work -------------------------------------------------------------------------------------

    def copy(self, stream: Stream, into: Any, source: Any) -> None:
        assert isinstance(stream, StandinStream)
        target, values = getattr(into, "base", into), getattr(source, "base", source)
        if isinstance(into, np.ndarray):
            target = into
        if isinstance(source, np.ndarray):
            values = source
        # As with torch, the two may be the same memory, but not overlap in part.
        assert overlaps.alike(target, values) or not overlaps.shares(target, values)
        stream.put(functools.partial(np.copyto, target, values))

    def reduces(self, op: ReduceOp, name: str) -> bool:
        return op.function is None

    def reduce(
        self, stream: Stream, op: ReduceOp, operands: Sequence[Any], into: Any, size: int
    ) -> None:
        assert isinstance(stream, StandinStream)
        kernel = Kernel.of(op, into.name)
        # As on a GPU, what another device has opened is not for this one.
        assert all(array.__aiodist_device__ is self for array in (*operands, into))
        bases = [operand.base for operand in operands]
        stream.put(functools.partial(kernel.reduce, bases, into.base, size))
