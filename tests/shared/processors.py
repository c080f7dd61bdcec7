"""Processors with store buffers: boards, lanes and berths of several ranks, word by word.

Each rank is a thread that the test stops at every look at a word and at every write, as a processor
with a store buffer would let others come in between. The test chooses who goes on.
"""

from __future__ import annotations

import _thread
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from aiodist.shared_memory import board as board_module
from aiodist.shared_memory import posts as posts_module
from aiodist.shared_memory.board import PAGE, Board


class Segment:
    """Words of one rank; `stores` are those on their way from its processor."""

    def __init__(self) -> None:
        self.words: dict[int, int] = {}
        self.bytes: dict[int, int] = {}  # of rings, by where they lie
        self.stores: deque[tuple[int, Any]] = deque()

    def flush_one(self) -> None:
        index, value = self.stores.popleft()
        if isinstance(value, bytes):
            self.bytes.update(enumerate(value, index))
        else:
            self.words[index] = value


class View:
    """Words of `segment` from `offset` on, as `viewer` sees them."""

    def __init__(
        self, machine: Machine, viewer: int, segment: Segment, offset: int, nbytes: int = 0
    ) -> None:
        self._machine = machine
        self._viewer = viewer
        self._segment = segment
        self._offset = offset
        self._nbytes = nbytes

    def tobytes(self) -> bytes:
        self._machine.pause(self._viewer)
        found, start = self._segment.bytes, 8 * self._offset
        return bytes(found.get(at, 0) for at in range(start, start + self._nbytes))

    def cast(self, _: str) -> View:
        return self

    def address(self, machine: Machine) -> int:
        return machine.segments.index(self._segment) + len(machine.segments) * self._offset

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            start = index.start or 0
            nbytes = (index.stop or 0) - start
            offset = self._offset + start // 8
            return View(self._machine, self._viewer, self._segment, offset, nbytes)
        self._machine.pause(self._viewer)
        return self._segment.words.get(self._offset + index, 0)

    def __setitem__(self, index: Any, value: Any) -> None:
        if isinstance(index, slice):
            start = 8 * self._offset + index.start
            if start >= PAGE:  # else it is a text
                self._machine.pause(self._viewer)
                self._segment.stores.append((start, bytes(value)))
            return
        self._machine.pause(self._viewer)
        self._segment.stores.append((self._offset + index, value))


class Path:
    """Choices that follow `prefix`, then take the first option."""

    def __init__(self, prefix: list[int]) -> None:
        self._prefix = prefix
        self._taken: list[tuple[int, int]] = []

    def choice(self, options: list[Any]) -> Any:
        at = len(self._taken)
        index = self._prefix[at] if at < len(self._prefix) else 0
        self._taken.append((index, len(options)))
        return options[index]

    def following(self) -> list[int] | None:
        taken = list(self._taken)
        while taken:
            index, count = taken.pop()
            if index + 1 < count:
                return [before for before, _ in taken] + [index + 1]
        return None


class Machine:
    """Processors, one a rank, that do actions; the test chooses who goes on."""

    def __init__(self, size: int, chooser: Any, *, fences: bool = True) -> None:
        self.segments = [Segment() for _ in range(size)]
        self.ranks = range(size)
        self.chooser = chooser
        self._fences = fences
        self._actions: list[Callable[[], None] | None] = [None] * size
        self._go = [_thread.allocate_lock() for _ in range(size)]
        self._back = _thread.allocate_lock()
        self._running = -1
        self._fresh = False
        self._stopped = False
        self.dozing: dict[int, int] = {}  # by rank: at which address
        self.rings: list[int] = []  # at which addresses
        self.errors: list[BaseException] = []
        for lock in (*self._go, self._back):
            lock.acquire()
        self.threads = [
            threading.Thread(target=self._work, args=(rank,), daemon=True) for rank in self.ranks
        ]

    def board(self, rank: int, *, dozes: bool = False) -> Board:
        views: dict[int, Any] = {
            r: View(self, rank, segment, 0) for r, segment in enumerate(self.segments)
        }
        own = views.pop(rank)
        return Board(rank, own, views, dozes=dozes)

    # What the kernel does, to which word n of a rank has an address made of both.

    def address_of(self, view: View) -> int:
        return view.address(self)

    def wait(self, address: int, seen: int, seconds: float) -> None:
        """The look and the falling asleep are one step. Nobody sleeps for `seconds` alone."""
        rank = self._running
        self.fence()  # as every system call is
        self.pause(rank)
        word, owner = divmod(address, len(self.segments))
        if self.segments[owner].words.get(word, 0) == seen:
            self.dozing[rank] = address
            self.pause(rank)

    def ring(self, address: int) -> None:
        self.pause(self._running)
        self.rings.append(address)
        for rank in [rank for rank, at in self.dozing.items() if at == address]:
            del self.dozing[rank]

    def fence(self) -> None:
        """Of the processor that is running: all its stores are seen before it goes on."""
        rank = self._running
        if rank >= 0 and self._fences:
            self.pause(rank)
            while self.segments[rank].stores:
                self.segments[rank].flush_one()

    def pause(self, rank: int) -> None:
        if self._fresh:
            self._fresh = False  # it could have been started later
        elif self._running == rank:
            self._back.release()
            self._go[rank].acquire()
            if self._stopped:
                raise SystemExit

    def _work(self, rank: int) -> None:
        while True:
            self._go[rank].acquire()
            if self._stopped:
                return
            action = self._actions[rank]
            assert action is not None
            try:
                action()
            except SystemExit:
                return
            except BaseException as error:
                self.errors.append(error)
            self._actions[rank] = None
            self._back.release()

    def run(self, queues: Callable[[int], list[list[Callable[[], None]]]]) -> None:
        """Choose until all is done. `queues`: of whose heads a rank does one when it is idle."""
        while not self.errors:
            options: list[tuple[int, Any]] = []
            for rank in self.ranks:
                if rank in self.dozing:
                    continue
                if self._actions[rank] is not None:
                    options.append((rank, None))
                else:
                    options += [(rank, queue) for queue in queues(rank) if queue]
            options += [(-1 - rank, None) for rank in self.ranks if self.segments[rank].stores]
            if not options:
                return
            rank, queue = self.chooser.choice(options)
            if rank < 0:
                self.segments[-1 - rank].flush_one()
                continue
            if queue is not None:
                self._actions[rank] = queue.pop(0)
            self._fresh = queue is not None
            self._running = rank
            self._go[rank].release()
            self._back.acquire()
            self._running = -1
        raise self.errors[0]

    def stop(self) -> None:
        self._stopped = True
        for lock in self._go:
            lock.release()
        for thread in self.threads:
            thread.join()


@contextmanager
def machine_of(size: int, chooser: Any, *, fences: bool = True) -> Iterator[Machine]:
    machine = Machine(size, chooser, fences=fences)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(board_module, "_fence", _Fence(machine.fence))
        patch.setattr(board_module, "futex", machine)
        patch.setattr(posts_module, "futex", machine)
        for thread in machine.threads:
            thread.start()
        try:
            yield machine
        finally:
            machine.stop()


class _Fence:
    """What a lock does for the board: it is a fence when it is taken."""

    def __init__(self, fence: Callable[[], object]) -> None:
        self._fence = fence

    def __enter__(self) -> None:
        self._fence()

    def __exit__(self, *_: object) -> None: ...
