"""Messages whose data the receiver reads where it lies: copied once, by one side alone.

The sender says with the announcement where the data is, the receiver copies it from there to where
it goes, and says so. What the sender wrote there after a cancel is never taken for the message.

Data may lie in arrays of `Group.empty`, which are mapped here: a place. Then the sender, whose
memory it is, answers that all of it was right (FIN), or has withdrawn the message. (What is small
enough is pushed where receives wait: one copy more takes less time than an answer.) Or it is in any
other memory of the sender's process, which the system reads (`aiodist.transports.remote`):
addresses, and a proof, by which the receiver sees for itself that it was right. Where the system
does not let us, the data is pulled as any other.

The system takes longer than it takes to write to a link and to read from there, which is two
copies, but in the cache, and by two cores; three times as long where pages are small. For that the
sender's loop has to turn, which is not known: its program may compute. So the receiver begins to
read, and asks the sender's link for a sign; once that has come, it pulls what is left
(`wire.REST`). Where ranks have no cores of their own, or other programs compute on them, one that
reads by itself is better than two in turns.
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
"""Most bytes that one turn of the loop copies: less than a millisecond, mostly. A second thread may
copy as many at the same time."""

STEP: Final = 256 * 1024
"""Bytes that one of two threads copies at a time."""

WORTH_HELP: Final = 2 * 1024 * 1024
"""Bytes from which two threads copy: to wake the second one takes as long as some hundred KiB."""

WORTH_IT: Final = 1024 * 1024
"""Bytes above which the system is asked for memory of another process: it takes longer for each
page than a copy does, but there is one copy less, and nobody is woken for each piece. Up to that,
messages are pushed, so that the sender has to wait for nobody, and two cores are at work: 1 MiB
takes half of the time, or less, on a quiet machine."""

MOST_BUFFERS: Final = 16
"""Most buffers whose addresses are told: they are to stay a small part of a frame."""

WORTH_A_WORD: Final = 1024 * 1024
"""Bytes that are left to be read from which the sender is asked to send them instead."""

MAX_ADDRESS: Final = 2**63 - 1

Where = int | list[Any]
"""A place, or a proof with addresses: ``[proof's address, proof, address, bytes, …]``."""

ReadOffer = tuple[Where, remote.Proof | None]
"""Where data lies, and the proof, which is the sender's to withdraw."""


def is_where(value: Any, nbytes: int) -> bool:
    """Whether a peer can have meant this for where `nbytes` bytes of data lie."""
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
    """The link to a rank of this host, which can ask for a sign."""

    def knock(self) -> None:
        """Ask for a sign."""

    def answers(self) -> bool:
        """Whether the other side's loop has had a turn since then."""
        ...


class SharedMemory:
    """The memory that ranks read of each other, for messages. `process` gives the process of a rank
    of this host, as the system knows it (0: it is not known). Where ranks have cores of their own:
    `helper` uses that of the sender, which waits, and `partner` gives the link to a rank."""

    def __init__(
        self,
        heap: Heap,
        moved: Moved,
        process: Callable[[int], int],
        helper: SecondThread | None = None,
        partner: Callable[[int], Partner | None] = lambda rank: None,
    ) -> None:
        self._heap = heap
        self._moved = moved  # counts what no link does
        self._process = process
        self._helper = helper
        self._partner = partner
        self._refused: set[int] = set()  # processes that could not be read
        self._unread: set[int] = set()  # ranks that could not read this process

    def where(self, dst: int, buffers: Sequence[memoryview]) -> ReadOffer | None:
        """Where rank `dst` may read these bytes; None: nowhere."""
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

    def open(self, src: int, where: Where, nbytes: int) -> Reading | None:
        """The bytes of a message of `src`, to be read; None: they have to be pulled. Raises
        ProtocolError for a place that is not shared."""
        if isinstance(where, int):
            return Mapped(self._heap.find(src, where, nbytes).data, self._moved, self._helper)
        process = self._process(src)
        if not process or process in self._refused:
            return None
        return Remote(process, where, self._moved, self._refused, self._partner(src))

    def pulled(self, dst: int) -> None:
        """Rank `dst` has asked for what it was to read: it cannot."""
        self._unread.add(dst)

    def sent(self, nbytes: int) -> None:
        """Another rank has read a message."""
        self._moved.sent += nbytes


class Reading(Protocol):
    """Data in memory of another rank."""

    proves: bool
    """Whether it is right once it is copied; else the sender has to say so."""

    def copy(self, pieces: Pieces) -> None:
        """Copy what comes next to where it goes, as much as one turn of the loop may. Raises
        OSError where it cannot be read, or was withdrawn."""

    @property
    def is_better_sent(self) -> bool:
        """Whether the sender can send what is left in less time."""
        ...


class Mapped:
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
    """The second thread, if it is of use for so many bytes."""
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
        self._refused = refused  # hears of a process that cannot be read
        self._checked = False  # it is the process that it is taken for
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
            raise OSError("it was withdrawn")
        pieces.landed()
        self._moved.received += count

    def _read(self, address: int, memory: memoryview, left: int) -> int:
        """Fill `memory`, or its front, if the sender can send more than that: how many bytes.
        `left`: those of the message."""
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
        """Where the last `left` bytes begin, and how many of them to copy, `most` at most."""
        end = 0
        for address, nbytes in reversed(self._spans):
            end += nbytes
            if left <= end:
                return address + end - left, min(most, nbytes - (end - left))
        raise ValueError(f"{left} bytes are left of {end}")
