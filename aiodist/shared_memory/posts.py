"""Posts pass small data of tagged collectives to all other ranks of a host, which take it in any
order.

All ranks of a lane use the same order. Collectives with different tags have no such order: the
first call of one rank may be the last call of another. So data for a tagged collective must not
wait for a turn. It is sent as a *post*: words that say what it is for, and the data itself. Each
rank has a ring of posts in its segment, which it alone writes. All others read it from end to end,
and copy what they cannot use yet. Posts never stay in the ring for a collective that is called
late, so no tag can hold up another tag::

    rank 0 writes    [a #0][b #0][c #0]···         ← head: bytes that were ever posted
    rank 1 has read   ──────────►                  ← its cursor: bytes that it has read of rank 0
    rank 2 has read   ────────────────►

**Words.** These words are in the first page, and each has one writer (see
`aiodist.shared_memory.board`). They are the head, whether the rank sleeps, and one cursor for each
other rank. A rank writes the data first, then the head that announces it. A reader reads the data
first, then writes the cursor that allows the writer to reuse the memory. To sleep, a rank says so
and then looks once more. To post, a rank writes its head and then looks for sleepers. Both sides
have a fence in between, as on a lane, so that no wake-up is lost. A rank is woken once for each
sleep, and then reads everything that is there. A rank that sleeps within a call does so at the head
of one rank that it needs. Only that rank rings there.

**When posting begins.** Ranks start to share memory at different times. So each rank says by a word
that it reads posts, and no rank posts before all others have said so. Therefore a post can be read
at once, before anything that comes over links after it.

**If the ring is full**, because a reader has been busy for long, no rank waits, and the data goes
over links. Its words say what it is for, so readers need not know which way it came.

**Laps.** A writer goes back to the start of its ring once it is further than `NEAR` and all others
have read the start. So large data reuses memory that is still in a cache. The writer notes its
head at that moment in a word of its own (`LAP`). A reader that has read so many bytes goes back as
well. It cannot miss this, because the writer begins no further lap before all others have read
something of this one.

A post is ``bytes to the next one, of words, of data; number; words; data``. Its data is aligned.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from aiodist.compiled import core
from aiodist.errors import ProtocolError
from aiodist.shared_memory.board import CORE, PAGE, POSTS, Board, Naps, fence
from aiodist.transports import futex

START, SIZE = POSTS

# The words, behind those of the board. All others look at the head again and again, so it has a
# cache line for itself and the two words that are read with it.
HEAD: Final = 384
LAP: Final = 385
"""The head when the rank last went back to the start of its ring. It is in the line of the head,
because readers of the head need it, too."""
GIVEN_UP: Final = 386
"""How many calls the rank has given up. The others hear of each one over links. In the same line.
"""
SLEEP: Final = 392
DOZES: Final = 393
"""1 + the rank at whose head it sleeps, or 0 if a frame wakes it."""
READS: Final = 394
"""Not 0 if the rank reads posts."""
CURSORS: Final = 400
"""The first of several words, by rank on this host: the bytes that were read of that rank."""
MOST_RANKS: Final = PAGE // 8 - CURSORS

_BEGIN = struct.Struct("<IIIxxxxQ")
_UNIT: Final = 32
"""Posts, and the data in them, begin at multiples of this."""
NEAR: Final = 2048 * 1024
"""Posts beyond this go back to the start of the ring if there is room, because that memory is in
the cache that cores share. It is not less, because memory that other cores have just read is in
caches of their own, and takes longer to write (`aiodist.shared_memory.board.ROUND`).
"""
CHEAP_COPY: Final = 1024
"""Up to so many bytes, a copy is faster than a view."""


def padded(length: int) -> int:
    """Return the room that data of this length takes."""
    return length + _UNIT - 1 & -_UNIT


class Post(NamedTuple):
    """A post in the ring. `number` and `words` say what it is for. `data` is a view of the ring.

    `whole` is the number of bytes that the post takes in the ring.
    """

    number: int
    words: bytes
    data: memoryview
    whole: int


def prefixes(words: bytes, nbytes: int, first: bytes = b"") -> Callable[[int], bytes]:
    """Return a function from a post's number to the bytes before its data of `nbytes`.

    If the data starts with the same bytes each time, give them as `first`.
    """
    length = len(words)
    tail = words + bytes(-(_BEGIN.size + length) % _UNIT)
    whole = _BEGIN.size + len(tail) + padded(nbytes)
    tail += first
    begin = _BEGIN.pack
    return lambda number: begin(whole, length, nbytes, number) + tail


class Ring(Naps):
    """How far a rank has written its own ring. The compiled part has the same class."""

    __slots__ = ("_base", "_before", "_head", "_limit")

    _head: int
    """The bytes that were posted."""
    _base: int
    """The head when this lap of the ring began."""
    _before: int
    """The head when the lap before began."""
    _limit: int
    """This lap is known to have room up to here."""


class Cursor:
    """How far a rank has read the posts of another one. The compiled part has the same class."""

    __slots__ = ("at", "given_up", "held", "taken")

    taken: int
    """The bytes that were read."""
    at: int
    """The offset of the next post in the ring."""
    given_up: int
    """How many calls the other rank had given up when last asked."""
    held: int
    """The bytes of the next post if it is held."""


if TYPE_CHECKING:
    CoreRing: TypeAlias = Ring
    CoreCursor: TypeAlias = Cursor
else:
    CoreRing, CoreCursor = (Ring, Cursor) if core is None else (core.Ring, core.Cursor)


class Posts(CoreRing):
    """The posts of all ranks of a host, as one of them reads and writes them."""

    def __init__(self, board: Board) -> None:
        ranks = sorted((board.rank, *board.words))
        assert len(ranks) <= MOST_RANKS
        place = ranks.index(board.rank)
        self._own = board.own
        self._here = board.here
        self.where = board.where  # see `Stamps`
        self.rank = board.rank
        self._dozes = board.can_doze
        self.ring = board.memory(board.rank)[START : START + SIZE]
        # There is no room before all others read.
        self._head = self._base = self._before = self._limit = 0
        self._is_read = False  # whether all others are known to read posts
        # The others' words: how far they have read, and whether they sleep.
        self._words = list(board.words.values())
        self._cursor = CURSORS + place
        self._sleepers = list(board.words.items())
        self._woken = dict.fromkeys(board.words, 0)  # by rank: the last sleep that was ended
        self._nap = self._slept = 0
        self.can_doze = self._dozes
        self._given_up = 0  # how many calls this rank has given up
        self.asleep = False
        self.readers = [  # the posts of the others
            Reader(rank, board.memory(rank), board.words[rank], board.own, CURSORS + at)
            for at, rank in enumerate(ranks)
            if rank != board.rank
        ]
        self._own[READS] = 1
        if self._dozes:
            # The address of each rank's head.
            self._heads = {r: futex.address_of(board.memory(r)[8 * HEAD :]) for r in ranks}
            self._address = self._heads[board.rank]

    def put_parts(self, head: bytes, rest: Iterable[bytes | memoryview], whole: int) -> int:
        """Join `head` and `rest` in the ring as one post of `whole` bytes. Call `tell` afterwards.

        `head` is a prefix, perhaps with the first bytes of the data. Returns the offset of the post
        in `ring`, or -1 if there is no room. The bytes stay there until the next post.
        """
        at = self._head - self._base
        if at + whole > self._limit:
            at = self._find(whole)
            if at < 0:
                return -1
        ring = self.ring
        stop = at + len(head)
        ring[at:stop] = head
        for part in rest:
            start, stop = stop, stop + len(part)
            ring[start:stop] = part
        self._head += whole
        return at

    def last(self, nbytes: int) -> memoryview:
        """Return the data of the last post, which has so many bytes.

        It stays valid until the next post.
        """
        start = self.last_at(nbytes)
        return self.ring[start : start + nbytes]

    def last_at(self, nbytes: int) -> int:
        """Return the offset in `ring` of the last post's data, which has so many bytes."""
        return self._head - self._base - padded(nbytes)

    def has_room(self, nbytes: int) -> bool:
        """Whether there is room for a post of so many bytes."""
        at = self._head - self._base
        return at + nbytes <= self._limit or self._find(nbytes) >= 0

    def _find(self, whole: int) -> int:
        """Return an offset with room for so many bytes (see "Laps"), or -1."""
        if not self._is_read:
            self._is_read = all(words[READS] for words in self._words)
            if not self._is_read:
                return -1
        head, cursor = self._head, self._cursor
        at = head - self._base
        read = min([words[cursor] for words in self._words])
        if read < self._base:  # some of the last lap is still unread
            self._limit = read - self._before
            return at if at + whole <= self._limit else -1
        oldest = read - self._base
        if at >= NEAR and whole <= oldest:  # all others have read some of this lap
            self._before, self._base = self._base, head
            self._own[LAP] = head
            self._limit = min(oldest, NEAR)
            return 0
        self._limit = min(NEAR, SIZE)
        return at if at + whole <= SIZE else -1

    def tell(self) -> list[int]:
        """Show the posts to the others. Return the ranks that need a wake-up by frame."""
        self._own[HEAD] = self._head
        fence()
        found: list[int] = []
        for rank, words in self._sleepers:
            nap = words[SLEEP]
            if nap and nap != self._woken[rank]:
                dozes = words[DOZES]
                if not dozes:
                    found.append(rank)
                elif dozes == self.rank + 1:
                    futex.ring(self._address)
                else:
                    continue
                self._woken[rank] = nap
        return found

    def sleep(self) -> bool:
        """Ask for a wake-up by the next rank that posts. False: there is a post already."""
        self._lie_down(0)
        for reader in self.readers:
            if reader.has_more():
                self._own[SLEEP] = 0
                return False
        self.asleep = True
        self.can_doze = False  # because the one word about sleep is taken
        return True

    def _lie_down(self, dozes: int) -> None:
        """Say that this rank sleeps, and how (see `DOZES`). Look once more before you sleep."""
        self._nap += 1
        if dozes != self._slept:
            self._slept = self._own[DOZES] = dozes
        self._own[SLEEP] = self._nap
        fence()

    # The methods of `aiodist.transports.polling.Stamps`, to look for posts and then doze.

    def met(self, readers: Sequence[Reader], _: int) -> bool | None:
        """True if one of `readers` has a post to read, None if not yet."""
        for reader in readers:
            if reader.words[HEAD] != reader.taken + reader.held:
                return True
        return None

    def apart(self, readers: Sequence[Reader], _: int) -> bool:
        """Whether the `readers` without a post were last seen on other cores than this rank. Also
        publishes the core of this rank."""
        here = self._here()
        for reader in readers:
            words = reader.words
            if words[CORE] in (0, here) and words[HEAD] == reader.taken + reader.held:
                return False
        return here > 0

    def doze(self, readers: Sequence[Reader], _: int, seconds: float) -> bool:
        """Sleep within the call until the first of `readers` has a post. Return whether any has.

        The sleep may end early, and lasts `seconds` at most.
        """
        reader = readers[0]
        self._lie_down(reader.rank + 1)
        if not self.met(readers, 0):
            futex.wait(self._heads[reader.rank], reader.taken + reader.held, seconds)
        self._own[SLEEP] = 0
        return self.met(readers, 0) is True

    def awake(self) -> None:
        """Take the request back: this rank need not be woken."""
        self.asleep = False
        self.can_doze = self._dozes
        self._own[SLEEP] = 0

    # If a call is given up, its post stays, because others may have read it. The news goes over
    # links. A later call must hear it first, even if all posts that it needs are there. So a word
    # counts the calls that were given up: a look at every link in each call would add a tenth to
    # the time of a small call.

    def give_up(self) -> None:
        """Count one more call as given up. The frame about it must have left before."""
        self._given_up += 1
        self._own[GIVEN_UP] = self._given_up

    def is_given_up(self) -> bool:
        """Whether another rank has given a call up since the last time this was asked."""
        for reader in self.readers:
            if reader.words[GIVEN_UP] != reader.given_up:
                break
        else:
            return False
        for reader in self.readers:
            reader.given_up = reader.words[GIVEN_UP]
        return True

    @property
    def pages(self) -> list[memoryview]:
        """The words of this rank, then those of all others in the order of `readers`."""
        return [self._own, *(reader.words for reader in self.readers)]

    def close(self) -> None:
        """Release all memory."""
        self.readers.clear()
        self._words.clear()
        self._sleepers.clear()
        self.ring = memoryview(b"")
        self._own = memoryview(bytearray(PAGE)).cast("Q")


class Reader(CoreCursor):
    """Reads the posts of `rank`, one after the other.

    A post that is used later may be held in place, as long as no further post has to be read.
    """

    __slots__ = ("_own", "cursor", "holder", "rank", "ring", "words")

    def __init__(
        self, rank: int, memory: memoryview, words: memoryview, own: memoryview, cursor: int
    ) -> None:
        self.rank = rank
        self.ring = memory[START : START + SIZE]  # its bytes, which this rank only reads
        self.words = words
        self._own = own  # the words of this rank
        self.cursor = cursor  # the index of the word that says how far this rank has read
        self.taken = self.at = self.given_up = self.held = 0
        self.holder: Any = None  # the user of the post that is held

    def has_more(self) -> bool:
        """Whether there is a post to read beside the one that is held."""
        return self.words[HEAD] != self.taken + self.held

    def next_at(self) -> int:
        """Return the offset of the next post in `ring`. The post must be there."""
        if self.words[LAP] == self.taken:
            self.at = 0
        return self.at

    def shown(self, prefix: bytes) -> memoryview | None:
        """Return the data of the next post if the post begins with `prefix`, of `prefixes`.

        The post must be there. Its data stays valid until `move`. None: it is another post, or
        one that would go beyond the end of the ring.
        """
        ring, at = self.ring, self.next_at()
        start = at + len(prefix)
        stop = start + _BEGIN.unpack_from(prefix)[2]  # its data has so many bytes
        return ring[start:stop] if ring[at:start].tobytes() == prefix and stop <= SIZE else None

    def next_post(self) -> Post:
        """Return the next post, which must be there. It stays valid until `move`.

        Raises ProtocolError if its lengths make no sense.
        """
        at, ring = self.next_at(), self.ring
        there = min(self.words[HEAD] - self.taken, SIZE - at)
        if there < _BEGIN.size:
            raise ProtocolError(
                f"rank {self.rank} says that it has posted, but its ring has no room for that post:"
                " it counts as lost"
            )
        whole, length, nbytes, number = _BEGIN.unpack_from(ring, at)
        start = at + padded(_BEGIN.size + length)
        if not 0 < whole == start + padded(nbytes) - at <= there:
            raise ProtocolError(
                f"rank {self.rank} posted {nbytes} bytes of data in a post of {whole} bytes, which"
                " cannot be: it counts as lost"
            )
        words = ring[at + _BEGIN.size : at + _BEGIN.size + length].tobytes()
        return Post(number, words, ring[start : start + nbytes], whole)

    def post_for(self, words: bytes, number: int) -> Post | None:
        """Return the next post, which must be there. None: it is for something else."""
        try:
            post = self.next_post()
        except ProtocolError:
            return None  # the code that takes the post finds the error, too
        return post if post.words == words and post.number == number else None

    def give_up(self) -> None:
        """Read nothing more of this rank: its posts make no sense, so it counts as lost."""
        self.words = memoryview(bytearray(PAGE)).cast("Q")
        self.taken = self.held = 0

    def hold(self, nbytes: int, holder: object) -> None:
        """Keep the next post, of so many bytes, in place until `let_go`. Call that before the next
        read."""
        self.held = nbytes
        self.holder = holder

    def let_go(self) -> None:
        """Release the post that was held."""
        held = self.held
        self.held, self.holder = 0, None
        self.move(held)

    def passed_by(self, nbytes: int, taken: int) -> None:
        """Move on behind a post that was used, unless a call that was made meanwhile has done so.

        `taken`: the bytes that were read before it.
        """
        if self.taken == taken:
            self.move(nbytes)

    def move(self, nbytes: int) -> None:
        """Count so many bytes more as read."""
        self.at += nbytes
        self.taken += nbytes
        self._own[self.cursor] = self.taken
