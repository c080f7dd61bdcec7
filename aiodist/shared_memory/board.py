"""What the ranks of one host see of each other: words, and areas of staging memory.

Each rank owns one segment, which it alone writes and the others read. Its first page holds words of
64 bits; the areas behind it hold what the others are to read.

The *stamp* says how far its rank is: ``operation << 24 | phase << 20 | publishes``. The operations
of a lane are numbered, each is a row of phases, and in each phase all ranks publish equally often:
so stamps only grow, and `stamp >= s` means that all that was to happen before `s` has happened, or
that the rank has given the operation up. The latter is said by its *abort words*, which a reader
looks at after its last read, before it completes.

A word that is written once is read whole: it is aligned, and copied as one machine word. The order
of writes is that of the program on x86-64, so the words behind which data lie are written last;
elsewhere this needs fences, which Python does not have: see `aiodist.buffers.segment`.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterable, Mapping
from typing import Final

PAGE: Final = 4096
SMALL: Final = 256 * 1024
"""Bytes of each of the two small areas, used by turns, so that an operation need not wait until the
others are done with the one before."""
BULK: Final = 1536 * 1024
"""Bytes of the area for what is passed on in pieces."""
AREAS: Final = ((PAGE, SMALL), (PAGE + SMALL, SMALL), (PAGE + 2 * SMALL, BULK))
"""Where each area begins, and its size."""
SEGMENT: Final = PAGE + 2 * SMALL + BULK
"""Bytes of memory that a group takes for each rank of a host."""

MAX_PHASES: Final = 15

# Words. Those of one line are read together; `SLEEP` and `WANTED` change at other times. What looks
# at them in every operation is written as plain loops: any() and all() would take twice as long.
STAMP: Final = 0
_CALL: Final = 1  # and 2, by parity of the operation: a digest of what was called
_ABORTED: Final = 3  # and 4, by parity: the number after that of an operation given up
_PLACE: Final = 5  # and 6, by parity: where the array of the operation lies in shared memory, or 0
SLEEP: Final = 8
WANTED: Final = 9
_DEVICE: Final = 10  # and 11, by parity: 1 where the array is on a device, 2 if the rank turned
_TEXT: Final = 1024  # bytes; and 1024 further, by parity: what was called, in words
_TEXT_ROOM: Final = 1016

_fence = threading.Lock()
_acquire, _release = _fence.acquire, _fence.release


AN_OPERATION: Final = 1 << 24
A_PHASE: Final = 1 << 20


ON_DEVICE: Final = -1
"""A place that says: the array is on a device."""
_TURNED: Final = -2
"""A place that says: the array is on a device, but all do as ranks with arrays of the host do."""
_ON_DEVICE_WORD: Final = {ON_DEVICE: 1, _TURNED: 2}


def stamp_of(operation: int, phase: int = 0, publishes: int = 0) -> int:
    """The stamp of a rank that is there in `operation`; 0 stands before all of them."""
    return (operation + 1) * AN_OPERATION + phase * A_PHASE + publishes


class Board:
    """The segments of all ranks, as seen by `rank`.

    `own` is writable, `others` are by rank. `words` are the others' words.
    """

    def __init__(self, rank: int, own: memoryview, others: Mapping[int, memoryview]) -> None:
        self.rank = rank
        self.own = own[:PAGE].cast("Q")
        self.words = {peer: memory[:PAGE].cast("Q") for peer, memory in others.items()}
        self._words = list(self.words.items())  # made once, for loops
        self._own_bytes = own
        self._bytes = {rank: own, **others}  # whole segments, by rank
        self._calls = [0, 0]  # by parity: the digest that is on the board
        self._places = [0, 0]  # by parity: the place that is on the board
        self._nap = 0  # how often this rank has slept
        self._kicked = dict.fromkeys(others, 0)  # by peer: the nap from which it was woken last

    def area(self, rank: int, index: int) -> memoryview:
        """The bytes of an area of `rank`."""
        start, size = AREAS[index]
        return self._bytes[rank][start : start + size]

    def close(self) -> None:
        """Let go of all memory."""
        self._bytes.clear()
        self.words.clear()
        self._words.clear()
        self.own = self._own_bytes = memoryview(bytearray(PAGE)).cast("Q")

    # -- what was called --------------------------------------------------------------------------

    def announce(self, operation: int, digest: int, text: bytes, place: int = 0) -> None:
        """What this rank called, and where its array lies if that is in memory that all see, or
        ON_DEVICE. To be written before the stamp says that it has entered."""
        parity = operation & 1
        if self._places[parity] != place:
            self._say_place(parity, place)
        if self._calls[parity] == digest:
            return
        self._calls[parity] = digest
        shown = text[:_TEXT_ROOM]
        at = _TEXT + 1024 * parity
        self.own[at // 8] = len(shown)
        self._own_bytes[at + 8 : at + 8 + len(shown)] = shown
        self.own[_CALL + parity] = digest

    def different(self, peers: Iterable[int], operation: int, digest: int) -> dict[int, bytes]:
        """Those of `peers`, who have all entered `operation`, that called something else than
        `digest` stands for, and what."""
        parity = operation & 1
        differing = [
            peer
            for peer in peers
            if self.words[peer][_CALL + parity] != digest
            and self.words[peer][_ABORTED + parity] != operation + 1  # passed over: not called
        ]
        return {peer: self._text(peer, operation) for peer in differing}

    def places(self, operation: int) -> dict[int, int] | None:
        """Where the arrays of the others lie, who have all entered; None if not all in memory that
        all see."""
        word = _PLACE + (operation & 1)
        found = {peer: words[word] for peer, words in self._words}
        return found if all(found.values()) else None

    def all_on_devices(self, operation: int) -> bool:
        """Whether the arrays of the others, who have all entered, are on devices."""
        word = _DEVICE + (operation & 1)
        return all(words[word] for _, words in self._words)

    def turn(self, operation: int) -> None:
        """The array of this rank is on a device, but ranks of other hosts give arrays of the host:
        what they do it does, too, from the next stamp that it writes."""
        self._say_place(operation & 1, _TURNED)

    def _say_place(self, parity: int, place: int) -> None:
        self._places[parity] = place
        self.own[_PLACE + parity] = max(place, 0)
        self.own[_DEVICE + parity] = _ON_DEVICE_WORD.get(place, 0)

    def agree(self, operation: int, digest: int) -> bool:
        """Whether the others, who have all entered `operation`, called what `digest` stands for."""
        word = _CALL + (operation & 1)
        for _, words in self._words:
            if words[word] != digest:
                break
        else:
            return True
        return False

    def _text(self, peer: int, operation: int) -> bytes:
        at = _TEXT + 1024 * (operation & 1)
        length = min(self.words[peer][at // 8], _TEXT_ROOM)
        return bytes(self._bytes[peer][at + 8 : at + 8 + length])

    # -- giving up --------------------------------------------------------------------------------

    def abort(self, operation: int) -> None:
        """Nobody may complete `operation` with what is read of this rank from here on."""
        parity = operation & 1
        if self._places[parity]:  # perhaps of two operations ago, if this one is passed over
            self._say_place(parity, 0)
        self.own[_ABORTED + parity] = operation + 1
        fence()

    def is_void(self, operation: int) -> bool:
        """Whether one of the others has given `operation` up, or with this rank's array on a device
        has turned to what this rank does not do yet: what is read of it may be anything."""
        parity = operation & 1
        word = _ABORTED + parity
        for _, words in self._words:
            if words[word] == operation + 1:
                break
        else:
            return self._places[parity] == ON_DEVICE and any(
                words[_DEVICE + parity] == _ON_DEVICE_WORD[_TURNED] for _, words in self._words
            )
        return True

    # -- waiting ----------------------------------------------------------------------------------

    def reached(self, peers: Iterable[int], stamp: int) -> bool:
        """Whether all of `peers` have."""
        words = self.words
        for peer in peers:
            if words[peer][STAMP] < stamp:
                break
        else:
            return True
        return False

    def met(self, peers: Iterable[int], stamp: int) -> bool | None:
        """True: all of `peers` have reached it. None: not yet."""
        words = self.words
        for peer in peers:
            if words[peer][STAMP] < stamp:
                return None
        return True

    def sleep(self, wanted: int) -> None:
        """From here on this rank wants to be woken by whoever reaches the stamp `wanted`. Look
        once more whether they have reached it before you wait."""
        self._nap += 1
        self.own[WANTED] = wanted
        self.own[SLEEP] = self._nap
        fence()

    def awake(self) -> None:
        self.own[SLEEP] = 0

    def reach(self, stamp: int) -> list[int]:
        """Write the own stamp: what was to happen before has happened. Returns who is to be woken
        by that; each is named once."""
        self.own[STAMP] = stamp
        _acquire()
        _release()
        woken: list[int] = []
        for peer, words in self._words:
            nap = words[SLEEP]
            if nap and nap != self._kicked[peer] and words[WANTED] <= stamp:
                self._kicked[peer] = nap
                woken.append(peer)
        return woken


def digest_of(call: bytes) -> int:
    """What was called, in 64 bits."""
    return int.from_bytes(hashlib.blake2b(call, digest_size=8).digest(), "little")


def fence() -> None:
    """All writes so far are seen by others before anything is read from here on: a lock is taken by
    an instruction that waits for the writes of its core."""
    _acquire()
    _release()
