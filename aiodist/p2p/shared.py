"""Messages whose data the receiver reads in the sender's memory, so that it is copied once.

The announcement says where the data is. The receiver copies it from there to its target, and says
so. Anything that the sender writes there after a cancel is never taken for the message.

There are two cases:

* **The data is in arrays of `Group.empty`**, which are mapped here. The announcement has their
  place. Then the sender, which owns the memory, confirms the data (FIN), or has withdrawn the
  message. (Small data is pushed if receives wait, because one more copy takes less time than an
  answer.)
* **The data is in other memory of the sender's process**, which the system can read
  (`aiodist.transports.remote`). The announcement has addresses, and a proof by which the receiver
  itself sees that the data was right. If the system does not allow this, the data is pulled as
  usual.

Reading by the system takes longer than writing to a link and reading from it, and three times as
long if pages are small. A link takes two copies, but they are in the cache and use two cores. That
needs the sender's loop to turn, which its program may prevent. So the receiver begins to read, and
knocks at the sender's link. Once that answers, the receiver pulls the rest (`wire.REST`). If ranks
have no cores of their own, or other programs compute on them, reading alone is faster than taking
turns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import numpy as np

from aiodist.buffers.copying import copy
from aiodist.links.moved import Moved
from aiodist.p2p.pieces import Pieces
from aiodist.shared_memory.heap import Heap
from aiodist.transports import polling, remote
from aiodist.transports.futex import address_of
from aiodist.transports.second_thread import SecondThread

AT_ONCE: Final = 2 * 1024 * 1024
"""The most bytes that one turn of the loop copies, mostly in less than a millisecond. A second
thread may copy as many at the same time."""

STEP: Final = 256 * 1024
"""The bytes that one of two threads copies at a time."""

WORTH_HELP: Final = 2 * 1024 * 1024
"""The bytes from which on two threads copy. Waking the second one takes as long as copying some
hundred KiB."""

WORTH_IT: Final = 1024 * 1024
"""The bytes above which the system reads memory of another process. For each page it takes longer
than a copy, but there is one copy less, and no wakeup for each piece. Smaller messages are pushed,
so that the sender does not wait, and two cores work: on a quiet machine, 1 MiB takes half of the
time or less."""

MOST_BUFFERS: Final = 16
"""The most buffers whose addresses are sent, so that they stay a small part of a frame."""

WORTH_A_WORD: Final = 1024 * 1024
"""The bytes that must be left before the sender is asked to send them instead."""

MAX_ADDRESS: Final = 2**63 - 1

Where = int | list[Any]
"""A place, or a proof with addresses: ``[proof's address, proof, address, bytes, …]``."""

ReadOffer = tuple[Where, remote.MemoryProof | None]
"""The place of data, and the proof, which the sender can withdraw."""


def is_where(value: Any, nbytes: int) -> bool:
    """Return whether `value` can be the place of `nbytes` bytes of data. A peer has sent it."""
    if type(value) is int:
        return 0 < value <= MAX_ADDRESS and nbytes > 0
    if type(value) is not list or not 4 <= len(value) <= 2 + 2 * MOST_BUFFERS or len(value) % 2:
        return False
    address, proof, *numbers = value
    if type(proof) is not bytes or len(proof) != remote.PROOF:
        return False
    if not all(type(number) is int and 0 < number <= MAX_ADDRESS for number in (address, *numbers)):
        return False
    return sum(numbers[1::2]) == nbytes


class Partner(Protocol):
    """The link to a rank of this host, which can be asked for a sign of life."""

    def knock(self) -> None:
        """Asks for a sign."""

    def answers(self) -> bool:
        """Returns whether the other side's loop has had a turn since then."""
        ...


class MessageMemory:
    """The memory that ranks read of each other for messages.

    `process` returns the process of a rank of this host, as the system knows it (0: not known). If
    ranks have cores of their own, `helper` uses the core of the sender, which waits, and `partner`
    returns the link to a rank.
    """

    def __init__(
        self,
        heap: Heap,
        moved: Moved,
        process: Callable[[int], int],
        helper: SecondThread | None = None,
        partner: Callable[[int], Partner | None] = lambda rank: None,
    ) -> None:
        self._heap = heap
        self._moved = moved  # counts the bytes that links do not count
        self._process = process
        self._helper = helper
        self._partner = partner
        self._refused: set[int] = set()  # processes that could not be read
        self._unread: set[int] = set()  # ranks that could not read this process

    def where(self, dst: int, buffers: Sequence[memoryview]) -> ReadOffer | None:
        """Return the place at which rank `dst` may read these bytes. None: it cannot."""
        place = self._heap.place_of(np.frombuffer(buffer, np.uint8) for buffer in buffers)
        if place:
            return place, None
        if dst in self._unread or not 0 < len(buffers) <= MOST_BUFFERS or not self._process(dst):
            return None
        if sum([buffer.nbytes for buffer in buffers]) <= WORTH_IT:
            return None
        proof = remote.offer()
        if proof is None:
            return None
        where: list[Any] = [proof.address, proof.shown()]
        for buffer in buffers:
            where += address_of(buffer), buffer.nbytes
        return where, proof

    def open(self, src: int, where: Where, nbytes: int) -> SharedReading | None:
        """Return the bytes of a message of `src`, ready to read. None: they have to be pulled.

        Raises ProtocolError for a place that is not shared.
        """
        if isinstance(where, int):
            return MappedData(self._heap.find(src, where, nbytes).data, self._moved, self._helper)
        process = self._process(src)
        if not process or process in self._refused:
            return None
        return Remote(process, where, self._moved, self._refused, self._partner(src))

    def pulled(self, dst: int) -> None:
        """Note that rank `dst` pulled what it should have read: it cannot read this process."""
        self._unread.add(dst)

    def sent(self, nbytes: int) -> None:
        """Count a message that another rank has read."""
        self._moved.sent += nbytes


class SharedReading(Protocol):
    """Data in memory of another rank."""

    proves: bool
    """Whether the data is known to be right once it is copied. If not, the sender has to say so."""

    def copy(self, pieces: Pieces) -> None:
        """Copy the next bytes to their place, as many as one turn of the loop may.

        Raises OSError if they cannot be read, or were withdrawn.
        """

    @property
    def is_better_sent(self) -> bool:
        """Whether the sender can send the rest in less time."""
        ...


class MappedData:
    """Data that is mapped here."""

    __slots__ = ("_data", "_helper", "_moved")
    proves = False
    is_better_sent = False

    def __init__(self, data: memoryview, moved: Moved, helper: SecondThread | None = None) -> None:
        self._data = data
        self._moved = moved
        self._helper = helper

    def copy(self, pieces: Pieces) -> None:
        helper = _of_use(self._helper, pieces.left)
        start = self._data.nbytes - pieces.left
        count = min(pieces.left, AT_ONCE if helper is None else 2 * AT_ONCE)
        pieces.place(count)
        memory = pieces.memory
        assert memory is not None
        if helper is None:
            copy(memory, self._data[start : start + count])
        else:
            there = self._data[start : start + count]

            def step(number: int) -> None:
                at = number * STEP
                copy(memory[at : at + STEP], there[at : at + STEP])

            done = helper.run(step, -(-count // STEP), AT_ONCE // STEP)
            count = min(count, done * STEP)
            pieces.memory = memory[:count]
        pieces.landed()
        self._moved.received += count


def _of_use(helper: SecondThread | None, nbytes: int) -> SecondThread | None:
    """Return the second thread, if it helps with so many bytes."""
    return None if nbytes < WORTH_HELP or polling.others_compute() else helper


class Remote:
    """Data in memory of another process."""

    __slots__ = (
        "_checked", "_moved", "_partner", "_pid", "_proof", "_refused", "_spans", "is_better_sent",
    )  # fmt: skip
    proves = True

    def __init__(
        self,
        pid: int,
        where: list[Any],
        moved: Moved,
        refused: set[int],
        partner: Partner | None = None,
    ) -> None:
        self._pid = pid
        self._proof, addresses = where[:2], where[2:]
        self._spans = list(zip(addresses[::2], addresses[1::2], strict=True))
        self._moved = moved
        self._refused = refused  # gets a process that cannot be read
        self._checked = False  # it is the expected process
        self._partner = partner
        self.is_better_sent = False

    def copy(self, pieces: Pieces) -> None:
        address, count = self._next(pieces.left, AT_ONCE)
        pieces.place(count)
        memory = pieces.memory
        assert memory is not None
        try:
            holds = self._checked or remote.holds(self._pid, self._proof)
            if holds:
                self._checked = True
                count = self._read(address, memory, pieces.left)
                pieces.memory = memory[:count]
                if count == pieces.left:
                    holds = remote.holds(self._pid, self._proof)
        except OSError:
            self._refused.add(self._pid)
            raise
        if not holds:
            raise OSError("the message was withdrawn")
        pieces.landed()
        self._moved.received += count

    def _read(self, address: int, memory: memoryview, left: int) -> int:
        """Fill `memory`, and return how many bytes. It is only the front, if the sender can send
        the rest faster. `left`: the remaining bytes of the message."""
        partner = self._partner
        if partner is None or polling.others_compute():
            remote.read(self._pid, address, memory)
            return len(memory)
        partner.knock()
        for at in range(0, len(memory), STEP):
            step = memory[at : at + STEP]
            remote.read(self._pid, address + at, step)
            end = at + len(step)
            if left - end >= WORTH_A_WORD and partner.answers():
                self.is_better_sent = True
                return end
        return len(memory)

    def _next(self, left: int, most: int) -> tuple[int, int]:
        """Return the address of the last `left` bytes, and how many of them to copy, at most
        `most`."""
        end = 0
        for address, nbytes in reversed(self._spans):
            end += nbytes
            if left <= end:
                return address + end - left, min(most, nbytes - (end - left))
        raise ValueError(f"{left} bytes are left of {end}")
