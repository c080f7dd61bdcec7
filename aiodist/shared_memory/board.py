"""What the ranks of one host see of each other: words, and areas of staging memory.

Each rank owns one segment, which it alone writes and the others read. Its first page holds words of
64 bits; the areas behind it hold what the others are to read.

The *stamp* says how far its rank is: ``operation + 1 << 24 | phase << 20 | publishes``. It is the
one word that others wait for. Two ranks that show each other an array of some bytes (stamps are
written operation.phase.publishes here)::

    rank 0   stamp 5.0.0   copies into its area   stamp 5.0.1   waits   reads the area of rank 1
                                                                 : ^
                                                                 v :
    rank 1   stamp 5.0.0   copies into its area   stamp 5.0.1   waits   reads the area of rank 0

**What a reader may conclude.** A rank does its operations in the order of their numbers, the phases
of each in their order, and in each phase all ranks publish equally often (the simulator refuses
plans that do not). So stamps only grow, and say the same at all ranks. `stamp >= s` therefore
means: all that this rank was to do before `s`, it has done. In particular it has written what it
publishes up to `s`, and it has read what it was to read before `s`, so memory that it read until
then may be used again. A reader need not have seen `s` itself: who looks late sees a later stamp,
and concludes the same.

**Unless the rank has given the operation up.** Then its next stamp jumps over what was not done.
That is said by its *abort word*, which it writes before anything else. So nobody completes without
a look at the abort words, after the last read: see the comment above `Board.abort`.

**No word has two writers.** Python has no atomic read-modify-write, so if two ranks wrote one word,
one of them could undo what the other had just written. With one writer a plain store is enough, no
lock is needed that could stay locked when its holder dies, and a reader can at worst see an old
value, from which it concludes less. The mappings hold this: those of others are read-only.

**Words by parity.** What is said once per operation (what was called, where the array lies, that it
was given up) has two words, for operations with even and with odd numbers. Operation n may be
entered once all others have entered n - 1 (`Lane._before`), so all are through with n - 2 then, and
nobody looks at its words any more. The others may still look at those of n - 1, which are the other
ones. What was called, and where the array lies, is written before the stamp that says that
the rank has entered.

**Three areas.** What was published in an area may be written over once all others are done with it,
and with a single area every operation would begin by waiting for that. With two small ones, used by
turns, operation n writes where n - 2 wrote. That this was read is known without a further stamp:
who has entered n - 1 is through with n - 2. What does not fit goes through the third area, large
arrays in pieces whose order is part of the plan (`schedules.pull.pipeline`). It has no twin, for
that would take as much again at each rank; so a rank says by a stamp at once that it is done with
this area, and not only with its next call (`Lane.end`).

The simulator proves of each plan that no write meets a read within the plan (`schedules.races`).
Between two phases, and between two operations, it is the stamps that `Lane` waits for before it
enters and before it writes to an area. Tests run boards and lanes word by word on processors with
store buffers (tests/shared/processors.py).

A word that is written once is read whole: it is aligned, and copied as one machine word. In which
order others see what was written: see the comment above `fence`.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, TypeAlias

from aiodist import compiled
from aiodist.transports import futex
from aiodist.transports.polling import core

PAGE: Final = 4096
SMALL: Final = 256 * 1024
"""Most bytes that plans put into one of the two small areas, used by turns, so that an operation
need not wait until the others are done with the one before. More of them would push each other out
of the caches."""
CROWDED_SMALL: Final = 1152 * 1024
"""The same where there are more ranks than cores: to wait for the others is to wait for their turns
on the cores, and whoever has had that core meanwhile has filled its caches anyway."""
SMALL_AREA: Final = 3200 * 1024
"""Bytes of each of them: there is room for all that a rank shows at once of its values. What was
never shown takes no memory."""
BULK: Final = 1536 * 1024
"""Most bytes that plans of one host put into the third area, for what is passed on in pieces: more
of them would leave the caches before they are taken."""
CROWDED_BULK: Final = 4096 * 1024
"""The same of reductions where there are more ranks than cores: each piece is a turn of all ranks
on their cores, and with each turn their caches are filled anew. So there are few, of many bytes."""
CROSSING: Final = 8 * 1024 * 1024
"""Bytes of that area. Plans of several hosts use all of it: each of their pieces is a frame to
another host as well, and what a frame costs beside its bytes is most of what small ones cost. So do
messages of more ranks than cores, of which each round is a turn of all ranks, too."""
_FIRST: Final = PAGE + PAGE // 2
AREAS: Final = (
    (_FIRST, SMALL_AREA),
    (_FIRST + SMALL_AREA, SMALL_AREA),
    (_FIRST + 2 * SMALL_AREA, CROSSING),
)
"""Where each area begins, and its size: in the middle of a page. A processor compares addresses by
where they are in their pages: what is copied to 1 to 15 bytes behind where it comes from, by that,
may be copied at a twelfth of the speed. Large arrays begin 16 or 64 bytes behind the begin of a
page, and what is shown comes some 60 bytes behind that of its area."""
POSTS: Final = (2 * PAGE + 2 * SMALL_AREA + CROSSING, 10240 * 1024)
"""Where the ring of what a rank posts begins, and its size: see `aiodist.shared_memory.posts`."""
LANE: Final = sum(POSTS)
"""Bytes of all of this."""
BERTH: Final = POSTS[0]
"""Bytes of a berth, which is a board and areas once more: see `aiodist.shared_memory.berths`."""
BERTHS: Final = 8
"""How many of them each rank has, behind that."""
SEGMENT: Final = LANE + BERTHS * BERTH
"""Bytes of memory that a group may take for each rank of a host. What was never written takes
none: that is all of berths that were never used."""

MAX_PHASES: Final = 15

# Words. Those of one line are read together; `SLEEP` and `WANTED` change at other times. What looks
# at them in every operation is written as plain loops: any() and all() would take twice as long.
STAMP: Final = 0
_CALL: Final = 1  # and 2, by parity of the operation: a digest of what was called
_ABORTED: Final = 3  # and 4, by parity: the number after that of an operation given up
_PLACE: Final = 5  # and 6, by parity: where the array of the operation lies in shared memory, or 0
CORE: Final = 7  # 1 + the core that the rank was on when it last waited; 0: unknown
SLEEP: Final = 8
WANTED: Final = 9
_HOW: Final = 10  # how it sleeps, see `_how`
_TEXT: Final = 1024  # bytes; and 1024 further, by parity: what was called, in words
# What comes behind these, from byte 3072 on, is of `aiodist.shared_memory.posts`.
_TEXT_ROOM: Final = 1016

_fence = threading.Lock()
_acquire, _release = _fence.acquire, _fence.release


AN_OPERATION: Final = 1 << 24
A_PHASE: Final = 1 << 20


ON_DEVICE: Final = (1 << 64) - 1
"""A place that says: the array is on a device."""


def stamp_of(operation: int, phase: int = 0, publishes: int = 0) -> int:
    """The stamp of a rank that is there in `operation`; 0 stands before all of them."""
    return (operation + 1) * AN_OPERATION + phase * A_PHASE + publishes


class Naps:
    """How a rank sleeps until others have come far enough. The compiled part has the same."""

    __slots__ = ("_nap", "_slept", "can_doze")

    _nap: int
    """How often it has slept."""
    _slept: int
    """How, as its words say."""
    can_doze: bool
    """Whether it may sleep within a call, because the system can wake it for a word."""


if TYPE_CHECKING:
    CoreNaps: TypeAlias = Naps
else:
    CoreNaps = Naps if compiled.core is None else compiled.core.Naps


class Board(CoreNaps):
    """The segments of all ranks, as seen by `rank`.

    `own` is writable, `others` are by rank. `words` are the others' words. `dozes`: ranks may sleep
    within a call, see `doze`.
    """

    def __init__(
        self, rank: int, own: memoryview, others: Mapping[int, memoryview], *, dozes: bool = False
    ) -> None:
        self.rank = rank
        self.own = own[:PAGE].cast("Q")
        self.words = {peer: memory[:PAGE].cast("Q") for peer, memory in others.items()}
        self._words = list(self.words.items())  # made once, for loops
        self._own_bytes = own  # the same memory as `own`, by bytes: for texts
        self._bytes = {rank: own, **others}  # whole segments, by rank
        self.said = [0, 0]  # by parity: the digest that is on the board
        self._places = [0, 0]  # by parity: the place that is on the board
        self._nap = self._slept = 0
        self._kicked = dict.fromkeys(others, 0)  # by peer: the nap from which it was woken last
        self.can_doze = dozes
        # By rank: where its stamp lies, which is the first word.
        self._stamps = {r: futex.address_of(m) for r, m in self._bytes.items()} if dozes else {}

    def area(self, rank: int, index: int) -> memoryview:
        """The bytes of an area of `rank`."""
        start, size = AREAS[index]
        return self._bytes[rank][start : start + size]

    def memory(self, rank: int) -> memoryview:
        """The whole segment of `rank`."""
        return self._bytes[rank]

    @property
    def pages(self) -> list[memoryview]:
        """The words of this rank, and of all others."""
        return [self.own, *self.words.values()]

    def close(self) -> None:
        """Let go of all memory."""
        self._bytes.clear()
        self._stamps.clear()
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
        if self.said[parity] == digest:
            return
        self.said[parity] = digest
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
        return None if 0 in found.values() or ON_DEVICE in found.values() else found

    def all_on_devices(self, operation: int) -> bool:
        """Whether the arrays of the others, who have all entered, are on devices."""
        word = _PLACE + (operation & 1)
        return all(words[word] == ON_DEVICE for _, words in self._words)

    def _say_place(self, parity: int, place: int) -> None:
        self._places[parity] = place
        self.own[_PLACE + parity] = place

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

    # Why the abort words are looked at after the last read, and not before. A rank that gives an
    # operation up writes its abort word first. Only after that its memory is somebody's again: the
    # array that others may read where it lies is the user's, the areas are the next operation's.
    #
    #     gives up:   abort word      fence      anything may be written to what others read
    #     reads:      data, data, data           abort word           completes
    #
    # Reads stay in their order, and so do writes. So a reader that has read a byte of what came
    # after the abort word, however early it read it, sees the abort word when it looks after its
    # last read, and does not complete. With the look before a read, the rank could give up between
    # the two. A reader that sees no abort word has read what was published, and may complete though
    # others fail: outcomes may differ, values do not. Where data leaves the host before the
    # operation ends, `Executor.run` looks before each such frame as well, since no rank elsewhere
    # could tell.
    #
    # The word stays at least until the rank comes to the operation after the next, and for that the
    # reader must have been through with this one. It names the operation, so nobody has to take it
    # back. What a reader has made of bytes that do not count may lie in its user's array by then:
    # after an operation that failed, nobody may rely on what is there.
    #
    # The fence is for writes that are not this core's ordinary ones. After a cancel the user may
    # hand the array to another thread or to a device, or fill it by stores that go past the cache;
    # none of these has to keep behind a store that still waits in this core's buffer.

    def abort(self, operation: int) -> None:
        """Nobody may complete `operation` with what is read of this rank from here on."""
        parity = operation & 1
        if self._places[parity]:  # perhaps of two operations ago, if this one is passed over
            self._say_place(parity, 0)
        self.own[_ABORTED + parity] = operation + 1
        fence()

    def is_void(self, operation: int) -> bool:
        """Whether one of the others has given `operation` up: what is read of it may be
        anything."""
        word = _ABORTED + (operation & 1)
        for _, words in self._words:
            if words[word] == operation + 1:
                break
        else:
            return False
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

    def here(self) -> int:
        """1 + the core that this rank is on, as it says by this; 0 if the system does not tell."""
        here = core() + 1
        if here != self.own[CORE]:
            self.own[CORE] = here
        return here

    def apart(self, peers: Iterable[int], stamp: int) -> bool:
        """Whether all of `peers` that have not reached it were last seen on other cores than this
        rank, as it says by this. They may be elsewhere by now: that costs time, and no more."""
        here = self.here()
        for peer in peers:
            words = self.words[peer]
            if words[STAMP] < stamp and words[CORE] in (0, here):
                return False
        return here > 0

    def sleep(self, peers: Sequence[int], wanted: int, dozes: int = 0) -> None:
        """From here on this rank wants to be woken once all of `peers` have reached the stamp
        `wanted`. Look once more whether they have before you wait; and look again when woken.
        `dozes`: see `_how`."""
        self._nap += 1
        # Of some of the others it is the first that is missing: the look after that goes on.
        everyone = len(peers) == len(self._words)
        how = _how(0 if everyone else 1 + self._missing(peers, wanted), dozes)
        own = self.own
        own[WANTED] = wanted
        if how != self._slept:
            self._slept = own[_HOW] = how
        own[SLEEP] = self._nap
        fence()

    def awake(self) -> None:
        """Nobody need wake this rank."""
        self.own[SLEEP] = 0

    def doze(self, peers: Sequence[int], stamp: int, seconds: float) -> bool:
        """Sleep within the call, where `can_doze`, until all of `peers` have reached `stamp`, or
        may have, but no longer than that: whether they have."""
        missing = self._missing(peers, stamp)
        if missing < 0:
            return True
        self.sleep(peers, stamp, 1 + missing)
        seen = self.words[missing][STAMP]
        if seen < stamp:
            futex.wait(self._stamps[missing], seen, seconds)
        self.awake()
        return self.reached(peers, stamp)

    def reach(self, stamp: int) -> list[int]:
        """Write the own stamp: what was to happen before has happened. Wakes who dozes for that;
        returns who else is to be woken. Each is woken once."""
        self.own[STAMP] = stamp
        _acquire()
        _release()
        return self.rouse(stamp)

    def rouse(self, stamp: int) -> list[int]:
        """Do what `reach` does once the stamp is written."""
        asleep = []
        for peer, words in self._words:
            nap = words[SLEEP]
            if nap and nap != self._kicked[peer] and words[WANTED] <= stamp:
                asleep.append((peer, nap))
        return self._wake(asleep) if asleep else []

    def _wake(self, asleep: Iterable[tuple[int, int]]) -> list[int]:
        """Of the ranks that were `asleep`, in which nap, for no more than this one has reached,
        wakes those who doze and have all that they need. Returns who else has that."""
        woken: list[int] = []
        rung = 0
        for peer, nap in asleep:
            how = self.words[peer][_HOW]
            if not self._completes(peer, self.words[peer][WANTED], how >> 32):
                continue
            # That nap and no other: if the rank sleeps anew by now, its look comes after our stamp.
            self._kicked[peer] = nap
            dozes = how & 0xFFFF_FFFF
            if not dozes:
                woken.append(peer)
            elif dozes != rung and dozes - 1 in self._stamps:
                futex.ring(self._stamps[dozes - 1])
                rung = dozes  # mostly all who doze do so at one stamp
        return woken

    def _missing(self, peers: Iterable[int], stamp: int) -> int:
        """The first of `peers` that has not reached it; -1: all have."""
        words = self.words
        for peer in peers:
            if words[peer][STAMP] < stamp:
                return peer
        return -1

    def _completes(self, sleeper: int, wanted: int, needs: int) -> bool:
        """Whether with this rank all is there that `sleeper` sleeps for: who is not the last one
        leaves it to sleep on. Of two that get there at the same time, one sees the other."""
        if needs:
            return needs == self.rank + 1
        return all(words[STAMP] >= wanted for peer, words in self._words if peer != sleeper)


def _how(needs: int, dozes: int) -> int:
    """How a rank sleeps, as one word. `needs`: 1 + the rank that has to get there, or 0 for all
    others. `dozes`: 1 + the rank at whose stamp it sleeps; or 0 where it is a frame that wakes
    it."""
    return needs << 32 | dozes


def digest_of(call: bytes) -> int:
    """What was called, in 64 bits."""
    return int.from_bytes(hashlib.blake2b(call, digest_size=8).digest(), "little")


# Order between processors. What one rank writes, another one reads without a lock or a system call,
# so it matters in which order the other sees it. Three things are relied on.
#
# 1. Data first, then the stamp. x86-64 shows the ordinary stores of a core to all others in the
#    order of the program, and no core does its reads in another order than that. (Copies of the C
#    library that use other stores for large blocks end with a fence of their own.) So whoever sees
#    the stamp sees what was written before it, and plain stores are enough. CPython does not swap
#    two statements either.
# 2. Sleep, then look again. Each side writes its own word and reads the other's:
#
#        falls asleep:   WANTED = s, SLEEP = n    fence    is its stamp >= s by now?
#        gets there:     STAMP = s                fence    does somebody sleep, who wants <= s?
#
#    Here the one order that x86-64 does not keep counts: a read may overtake an earlier write to
#    another word, which still waits in the buffer of its core. Without fences both could read old
#    words; then one sleeps, and nobody wakes it. With a fence on both sides at least one of them
#    sees the other: the sleeper does not wait, or it is woken (or both, which does no harm).
#    `test_without_fences_wake_ups_would_be_lost` counts the interleavings in which it goes wrong.
#    So `reach`, `sleep` and `abort` have a fence, and looks at words have none.
#
#    Who needs several is woken by the last of them alone: the others, who see that somebody is
#    missing, leave it to sleep on. Of two that get there at once at least one sees the other, for
#    the same reason. Who dozes does so at the stamp of one that was missing when it looked. If that
#    changes before the kernel has put it to sleep, it does not sleep; so whoever comes last finds
#    it asleep there, and rings at that stamp, whosesoever it is.
# 3. Elsewhere (aarch64, say) even 1. does not hold, and no look could be trusted without fences on
#    both sides of it. There is no shared memory on such machines: ranks of a host use sockets, see
#    `aiodist.buffers.segment.unsupported_reason`.
#
# SLEEP counts the naps of its rank, rather than being a flag: whoever has woken the rank from nap n
# does not do so again before nap n + 1. WANTED is written before SLEEP, so whoever sees a nap sees
# what is wanted in it, or in a later one: then it wakes once too often, and the rank looks again.


def fence() -> None:
    """All writes so far are seen by others before anything is read from here on: a lock is taken by
    an instruction that waits for the writes of its core."""
    _acquire()
    _release()
