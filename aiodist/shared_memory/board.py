"""Shared words and staging memory of the ranks of one host.

Each rank owns one segment. Only this rank writes it, and the others map it to read. Its first page
holds 64-bit words. The areas behind that page hold the data that the others read.

The *stamp* is the word that says how far its rank is. Other ranks wait for this word only. Its
value is ``operation + 1 << 24 | phase << 20 | publishes``. Here two ranks show each other an array
(stamps are written as operation.phase.publishes)::

    rank 0   stamp 5.0.0   copies into its area   stamp 5.0.1   waits   reads the area of rank 1
                                                                 : ^
                                                                 v :
    rank 1   stamp 5.0.0   copies into its area   stamp 5.0.1   waits   reads the area of rank 0

**What a stamp proves.** A rank runs operations in the order of their numbers, and phases in order.
In each phase all ranks publish equally often, because the simulator refuses other plans. So stamps
only grow, and a stamp means the same at every rank. If a reader sees `stamp >= s`, the rank has
done everything that comes before `s`:

- It has written what it publishes up to `s`.
- It has read what it had to read before `s`, so the memory that it read may be reused.

A reader need not see `s` itself. If it looks late, it sees a later stamp and concludes the same.

**Exception: the rank has given the operation up.** Its next stamp then skips steps that it has not
done. So the rank writes an *abort word* before anything else, and a reader checks the abort words
after its last read. The comment above `Board.abort` explains why that is safe.

**Each word has one writer.** Python has no atomic read-modify-write. If two ranks wrote one word,
each could undo what the other has just written. With one writer a plain store is enough, and there
is no lock that could stay locked when its holder dies. A reader may see an old value, but concludes
less from it, never more. The kernel enforces this rule: segments of other ranks are mapped
read-only.

**Two words by parity.** Some facts are said once per operation: what was called, the location of
the array, the abort. Each has one word for even operation numbers and one for odd. Operation n may
begin once all others have entered n - 1 (`Lane._before`). All ranks are done with n - 2 then, so
its words can be reused. The words of n - 1 may still be read, but they have the other parity. The
words about the call and the array are written before the stamp of the entry.

**Three areas.** An area may be overwritten once all others are done with it. With one area, every
operation would begin with a wait for that. So there are two small areas, used in turn: operation n
writes to the area of n - 2, in another place of it if the data is not small (`in_round`). It needs
no further stamp, because a rank that has entered n - 1 is done with n - 2. Larger data goes through
the third area. Large arrays pass it in pieces, in an order that is part of the plan
(`schedules.pull.pipeline`). The third area has no twin, because a twin would cost each rank as much
memory again. So a rank writes a stamp as soon as it is done with this area, and does not wait for
its next call (`Lane.end`).

**What is proved.** The simulator proves for each plan that no write within it can race with a read
(`testing.plan_races`). Between phases and between operations, the stamps give this guarantee:
`Lane` waits for them before it enters, and before it writes to an area. Tests run boards and lanes
word by word on simulated processors with store buffers (tests/shared/processors.py).

A read of a word never sees half of a write, because words are aligned and copied as one machine
word. The comment above `fence` explains the order in which other ranks see writes.
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
"""The most bytes that plans put into a small area. The two small areas are used in turn, so that an
operation need not wait until the others are done with the one before. More bytes would push each
other out of the caches."""
CROWDED_SMALL: Final = 1152 * 1024
"""The same limit if there are more ranks than cores. It is higher because each wait is then a wait
for other ranks to get a core, and the caches are refilled after that anyway."""
SMALL_AREA: Final = 3200 * 1024
"""The bytes of each small area. All values that a rank shows at once fit. Pages that are never
written take no memory."""
BULK: Final = 1536 * 1024
"""The most bytes that plans of one host put into the third area for arrays that pass in pieces.
More bytes would leave the caches before the others read them."""
CROWDED_BULK: Final = 4096 * 1024
"""The same limit for reductions if there are more ranks than cores. Each piece then needs a turn of
all ranks on their cores, and each turn refills the caches. So pieces are few and large."""
ROUND: Final = 1024 * 1024
"""The bytes of a small area that phases of `LEAST_IN_ROUND` or more go round in. Each one begins
behind the last one of its size, because the others still have memory in their caches that they have
just read. To write over that, and read it, takes longer than with memory that has left their
caches. Two areas together are as large as the own caches of most cores, or larger."""
LEAST_IN_ROUND: Final = 32 * 1024
STEP: Final = 64 * 1024
"""Such phases begin at multiples of so many bytes."""
CROSSING: Final = 8 * 1024 * 1024
"""The bytes of the third area. Plans of several hosts use all of it: each piece is also a frame to
another host, and small frames cost mostly overhead. Messages also use all of it if there are more
ranks than cores, because each of their rounds takes a turn of all ranks."""
_FIRST: Final = PAGE + PAGE // 2
AREAS: Final = (
    (_FIRST, SMALL_AREA),
    (_FIRST + SMALL_AREA, SMALL_AREA),
    (_FIRST + 2 * SMALL_AREA, CROSSING),
)
"""The start and size of each area. Areas start in the middle of a page, because a processor
compares addresses by their offsets within pages. A copy can be twelve times slower if its target
offset is 1 to 15 bytes behind its source offset. Large arrays start 16 or 64 bytes behind the start
of a page, and the data that is shown starts about 60 bytes behind the start of its area."""
POSTS: Final = (2 * PAGE + 2 * SMALL_AREA + CROSSING, 10240 * 1024)
"""The start and size of the ring for posts: see `aiodist.shared_memory.posts`."""
LANE: Final = sum(POSTS)
"""The bytes of everything up to here."""
BERTH: Final = POSTS[0]
"""The bytes of a berth. It has a board and areas of its own: see `aiodist.shared_memory.berths`."""
BERTHS: Final = 8
"""The number of berths of each rank, behind the rest of its segment."""
SEGMENT: Final = LANE + BERTHS * BERTH
"""The most bytes that a group takes for each rank of a host. Pages that are never written take no
memory, so unused berths are free."""

MAX_PHASES: Final = 15

# The words. Words of one cache line are read together, so `SLEEP` and `WANTED`, which change at
# other times, are in a line of their own. Checks that run in every operation are plain loops,
# because any() and all() take twice as long.
STAMP: Final = 0
_CALL: Final = 1  # and 2, by parity of the operation: the digest of the call
_ABORTED: Final = 3  # and 4, by parity: 1 + the number of an operation that was given up
_PLACE: Final = 5  # and 6, by parity: the location of the array in shared memory, or 0
CORE: Final = 7  # 1 + the core on which the rank last waited; 0: unknown
SLEEP: Final = 8
WANTED: Final = 9
# How the rank sleeps. The upper half is 1 + the rank that it waits for, or 0 if it waits for all
# others. The lower half is the `dozes` of `Board.sleep`.
_HOW: Final = 10
_THREAD: Final = 11  # the thread of the rank's loop, by its number in the system
_TEXT: Final = 1024  # in bytes; and 1024 bytes further, by parity: the call in words
# The words from byte 3072 on belong to `aiodist.shared_memory.posts`.
_TEXT_ROOM: Final = 1016

_fence = threading.Lock()


AN_OPERATION: Final = 1 << 24
A_PHASE: Final = 1 << 20


ON_DEVICE: Final = (1 << 64) - 1
"""The place of an array that is on a device."""


def stamp_of(operation: int, phase: int = 0, publishes: int = 0) -> int:
    """Return the stamp of a rank that is at this point of `operation`. 0 is before all stamps."""
    return (operation + 1) * AN_OPERATION + phase * A_PHASE + publishes


def round_of(nbytes: int) -> tuple[int, int]:
    """Return how far apart phases of `nbytes` begin in a small area, in steps, and how many places
    there are for them."""
    steps = -(-nbytes // STEP)
    return steps, max(1, ROUND // (steps * STEP))


def in_round(nbytes: int, turn: int) -> int:
    """Return the number of a small area for the phase with that `turn`, and of where it begins.

    All ranks find the same place, because their plans need equally many bytes
    (`testing.plan_checks`).
    ``number % len(AREAS)`` is the index of the area, and ``number // len(AREAS)`` are the steps
    from its start.
    """
    steps, places = round_of(nbytes)
    return (turn & 1) + len(AREAS) * steps * ((turn >> 1) % places)


class Naps:
    """How a rank sleeps until the others have come far enough. The compiled part has it, too."""

    __slots__ = ("_nap", "_slept", "can_doze")

    _nap: int
    """How often the rank has slept."""
    _slept: int
    """How the rank sleeps, as its words say now."""
    can_doze: bool
    """Whether the rank may sleep within a call, because the system can wake it for a word."""


if TYPE_CHECKING:
    CoreNaps: TypeAlias = Naps
else:
    CoreNaps = Naps if compiled.core is None else compiled.core.Naps


class Board(CoreNaps):
    """The segments of all ranks, as `rank` sees them.

    Args:
        own: The segment of this rank, which is writable.
        others: The segments of the other ranks, by rank.
        dozes: Whether ranks may sleep within a call, see `doze`.
    """

    def __init__(
        self, rank: int, own: memoryview, others: Mapping[int, memoryview], *, dozes: bool = False
    ) -> None:
        self.rank = rank
        self.own = own[:PAGE].cast("Q")
        self.words = {peer: memory[:PAGE].cast("Q") for peer, memory in others.items()}
        self._words = list(self.words.items())  # a list, because loops over it are faster
        self._own_bytes = own  # the memory of `own` as bytes, for texts
        self._bytes = {rank: own, **others}  # whole segments, by rank
        self.said = [0, 0]  # by parity: the digest on the board
        self._places = [0, 0]  # by parity: the place on the board
        self._nap = self._slept = 0
        self._kicked = dict.fromkeys(others, 0)  # by peer: the last nap that this rank has ended
        self.can_doze = dozes
        # The address of each rank's stamp, which is its first word.
        self._stamps = {r: futex.address_of(m) for r, m in self._bytes.items()} if dozes else {}

    def area(self, rank: int, index: int) -> memoryview:
        """Return the bytes of an area of `rank`, from where a phase begins: see `in_round`."""
        steps, index = divmod(index, len(AREAS))
        start, size = AREAS[index]
        return self._bytes[rank][start + steps * STEP : start + size]

    def memory(self, rank: int) -> memoryview:
        """Return the whole segment of `rank`."""
        return self._bytes[rank]

    @property
    def pages(self) -> list[memoryview]:
        """The words of this rank, then those of all others."""
        return [self.own, *self.words.values()]

    def close(self) -> None:
        """Release all memory."""
        self._bytes.clear()
        self._stamps.clear()
        self.words.clear()
        self._words.clear()
        self.own = self._own_bytes = memoryview(bytearray(PAGE)).cast("Q")

    # -- what was called --------------------------------------------------------------------------

    def announce(self, operation: int, digest: int, text: bytes, place: int = 0) -> None:
        """Write what this rank calls to the board. Do this before the stamp of the entry.

        `place` is the location of its array if all ranks can see that memory, ON_DEVICE if the
        array is on a device, and 0 otherwise.
        """
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

    def different(self, operation: int, digest: int) -> dict[int, bytes]:
        """Return the calls of the ranks that have entered `operation`, and called something else
        than `digest` stands for."""
        parity, entered = operation & 1, (operation + 1) * AN_OPERATION
        found = {}
        for peer, words in self._words:
            is_other = words[STAMP] >= entered and words[_CALL + parity] != digest
            if is_other and words[_ABORTED + parity] != operation + 1:  # else it was passed over
                found[peer] = self._text(peer, operation)
        return found

    def places(self, operation: int) -> dict[int, int] | None:
        """Return the locations of the other ranks' arrays, by rank. All others must have entered.

        None if at least one array is not in memory that all ranks can see.
        """
        word = _PLACE + (operation & 1)
        found = {peer: words[word] for peer, words in self._words}
        return None if 0 in found.values() or ON_DEVICE in found.values() else found

    def all_on_devices(self, operation: int) -> bool:
        """Whether the arrays of all others are on devices. All others must have entered."""
        word = _PLACE + (operation & 1)
        return all(words[word] == ON_DEVICE for _, words in self._words)

    def _say_place(self, parity: int, place: int) -> None:
        self._places[parity] = place
        self.own[_PLACE + parity] = place

    def agree(self, operation: int, digest: int) -> bool:
        """Whether all others called what `digest` stands for. All must have entered `operation`."""
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

    # Why readers check the abort words after their last read, and not before. A rank that gives an
    # operation up writes its abort word first. Only then may its memory be written: the user may
    # change an array that others read in place, and the next operation may use the areas.
    #
    #     gives up:   abort word      fence      anything may be written to what others read
    #     reads:      data, data, data           abort word           completes
    #
    # Reads are done in program order, and so are writes. So if a reader has read a byte that was
    # written after the abort word, it also sees the abort word after its last read, and does not
    # complete. A check before a read would not help, because the rank could give up between the
    # two. If a reader sees no abort word, it has read the data that was published. It may complete
    # although other ranks fail: outcomes may differ between ranks, values may not. Some data leaves
    # the host before the operation ends. `Executor.run` checks before each frame of such data as
    # well, because ranks on other hosts cannot see the abort word.
    #
    # The word stays until its rank comes to the operation after the next, or longer. By then the
    # reader is done with this operation. The word names its operation, so nothing has to clear it.
    # A reader that fails may have put void bytes into its user's array. That is allowed: the
    # contents of an array are undefined after a failed operation.
    #
    # The fence is for writes that are not ordinary stores of this core. After a cancel, the user
    # may hand the array to another thread or to a device, or fill it by stores that bypass the
    # cache. Such writes can become visible before a store that still waits in this core's buffer.

    def abort(self, operation: int) -> None:
        """Forbid the others to complete `operation` with anything they read of this rank from now
        on."""
        parity = operation & 1
        if self._places[parity]:  # if this operation is passed over, the place is an older one's
            self._say_place(parity, 0)
        self.own[_ABORTED + parity] = operation + 1
        fence()

    def is_void(self, operation: int) -> bool:
        """Whether another rank has given `operation` up. The data that was read may then be
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
        """Whether all of `peers` have reached `stamp`."""
        words = self.words
        for peer in peers:
            if words[peer][STAMP] < stamp:
                break
        else:
            return True
        return False

    def met(self, peers: Iterable[int], stamp: int) -> bool | None:
        """True if all of `peers` have reached `stamp`, None if not yet."""
        words = self.words
        for peer in peers:
            if words[peer][STAMP] < stamp:
                return None
        return True

    def here(self) -> int:
        """Publish and return 1 + the core that this rank is on, or 0 if the core is unknown."""
        here = core() + 1
        if here != self.own[CORE]:
            self.own[CORE] = here
        return here

    def apart(self, peers: Iterable[int], stamp: int) -> bool:
        """Whether the `peers` that are still missing were last seen on other cores than this rank.

        They may have moved since then. An outdated answer costs time, but is safe. Also publishes
        the core of this rank.
        """
        here = self.here()
        for peer in peers:
            words = self.words[peer]
            if words[STAMP] < stamp and words[CORE] in (0, here):
                return False
        return here > 0

    def show_thread(self) -> None:
        """Say which thread this rank is, because ranks of one thread cannot be parted."""
        self.own[_THREAD] = threading.get_native_id()

    def where(self) -> list[tuple[int, int]]:
        """Return 1 + the core on which each rank was seen last: this rank first, and no others of
        its thread."""
        own = self.own
        others = [(r, w[CORE]) for r, w in self._words if w[_THREAD] != own[_THREAD]]
        return [(self.rank, own[CORE]), *others]

    def sleep(self, peers: Sequence[int], wanted: int, dozes: int = 0) -> None:
        """Ask to be woken once all of `peers` have reached the stamp `wanted`.

        Check once more whether they have before you wait, and check again when woken. `dozes`: 1 +
        the rank at whose stamp it sleeps, or 0 if a frame wakes it.
        """
        self._nap += 1
        # If this rank needs only some of the others, it names the first one that is missing. After
        # the wake-up it looks for the next one.
        everyone = len(peers) == len(self._words)
        how = (0 if everyone else 1 + self._missing(peers, wanted)) << 32 | dozes
        own = self.own
        own[WANTED] = wanted
        if how != self._slept:
            self._slept = own[_HOW] = how
        own[SLEEP] = self._nap
        with _fence:  # see `fence`
            pass

    def awake(self) -> None:
        """Take the request back: this rank need not be woken."""
        self.own[SLEEP] = 0

    def doze(self, peers: Sequence[int], stamp: int, seconds: float) -> bool:
        """Sleep within the call until all of `peers` have reached `stamp`, and return whether they
        have.

        The sleep may end early, and lasts `seconds` at most. Call this only if `can_doze`.
        """
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
        """Write the stamp of this rank, because everything before it is done.

        Wakes the ranks that doze for it. Returns the ranks that need a wake-up by frame. Each sleep
        is ended once.
        """
        self.own[STAMP] = stamp
        with _fence:  # see `fence`
            pass
        return self.rouse(stamp)

    def rouse(self, stamp: int) -> list[int]:
        """Do the rest of `reach` after the stamp is written."""
        asleep = []
        for peer, words in self._words:
            nap = words[SLEEP]
            if nap and nap != self._kicked[peer] and words[WANTED] <= stamp:
                asleep.append((peer, nap))
        return self._wake(asleep) if asleep else []

    def _wake(self, asleep: Iterable[tuple[int, int]]) -> list[int]:
        """Wake the ranks that doze and now have everything they need. Return the ranks that need a
        wake-up by frame.

        `asleep`: pairs of a rank and its nap. Each wants a stamp that this rank has reached.
        """
        woken: list[int] = []
        rung = 0
        for peer, nap in asleep:
            how = self.words[peer][_HOW]
            if not self._completes(peer, self.words[peer][WANTED], how >> 32):
                continue
            # Record this nap and no other. If the rank sleeps anew by now, its second look comes
            # after our stamp.
            self._kicked[peer] = nap
            dozes = how & 0xFFFF_FFFF
            if not dozes:
                woken.append(peer)
            elif dozes != rung and dozes - 1 in self._stamps:
                futex.ring(self._stamps[dozes - 1])
                rung = dozes  # the ranks that doze mostly do so at the same stamp
        return woken

    def _missing(self, peers: Iterable[int], stamp: int) -> int:
        """Return the first of `peers` that has not reached `stamp`, or -1."""
        words = self.words
        for peer in peers:
            if words[peer][STAMP] < stamp:
                return peer
        return -1

    def _completes(self, sleeper: int, wanted: int, needs: int) -> bool:
        """Whether this rank is the last one that `sleeper` needs. An earlier rank lets it sleep on.

        If two ranks arrive at the same time, at least one of them sees the other.
        """
        if needs:
            return needs == self.rank + 1
        return all(words[STAMP] >= wanted for peer, words in self._words if peer != sleeper)


def digest_of(call: bytes) -> int:
    """Return a digest of the call, as an integer of 64 bits."""
    return int.from_bytes(hashlib.blake2b(call, digest_size=8).digest(), "little")


# Order between processors. One rank writes words, and another reads them without a lock or a system
# call. So it matters in which order the other rank sees the writes. We rely on three facts.
#
# 1. Data first, then the stamp. x86-64 shows the ordinary stores of a core to all others in program
#    order, and each core does its reads in program order. The copy functions of the C library may
#    use other stores for large blocks, but end with a fence of their own. So a rank that sees the
#    stamp also sees everything written before it, and plain stores are enough. CPython does not
#    reorder two statements either.
# 2. Sleep, then look again. Each side writes its own word and then reads the other's:
#
#        falls asleep:   WANTED = s, SLEEP = n    fence    is its stamp >= s by now?
#        gets there:     STAMP = s                fence    does a rank sleep that wants <= s?
#
#    This is the one order that x86-64 does not keep. A read may overtake an earlier write to
#    another word, because the write may still wait in the buffer of its core. Without fences both
#    sides could read old words, and the sleeper would never be woken. With a fence on both sides at
#    least one side sees the other. So the sleeper does not wait, or it is woken. Both may happen,
#    and that is harmless. `test_without_fences_wake_ups_would_be_lost` counts the interleavings
#    that lose a wake-up. So `reach`, `sleep` and `abort` have a fence. Looks at words have none.
#
#    If a sleeper needs several ranks, only the last one wakes it. Earlier ranks see that another
#    one is missing, and let the sleeper sleep on. If two ranks arrive at once, at least one of them
#    sees the other, for the same reason. A rank that dozes does so at the stamp of one that was
#    missing when it looked. If this stamp changes before the kernel has put the rank to sleep, the
#    rank stays awake. So the last rank to arrive finds the sleeper at that stamp, and rings there,
#    even if the stamp belongs to another rank.
# 3. Other processors (aarch64, say) do not even keep the order of 1, so every look would need a
#    fence on both sides. aiodist does not use shared memory on such machines: their ranks use
#    sockets, see `aiodist.buffers.segment.unsupported_reason`.
#
# SLEEP counts the naps of its rank instead of being a flag. So a rank that has ended nap n does not
# wake the sleeper again before nap n + 1. WANTED is written before SLEEP. So a rank that sees a nap
# sees the stamp that is wanted in this nap or in a later one. In the second case it may wake the
# sleeper once too often, and the sleeper looks again.


def fence() -> None:
    """Make all earlier writes visible to others before anything later is read.

    Taking a lock does that, because its instruction waits for the writes of its core.
    """
    with _fence:  # an interrupt between two calls would leave it taken
        pass
