"""What ranks of a host post: each writes small things for all others, who take them in any order.

A lane has one order, which all its ranks keep to. Collectives of different tags have none: each
rank calls them as it comes to them, and what is called first here may be called last elsewhere. So
what a rank gives to such a collective must not wait for a turn. It is a *post*: words that say what
it is for, and the data. Each rank has a ring of posts in its segment, that it alone writes; all
others read it from end to end, and keep what they cannot use yet. Nothing of it stays in the ring
for the sake of a collective that is called late, so no tag holds up another one::

    rank 0 writes    [a #0][b #0][c #0]···         ← head: bytes that were ever posted
    rank 1 has read   ──────────►                  ← its cursor: bytes that it has read of rank 0
    rank 2 has read   ────────────────►

**Words.** All are of the first page, one writer each (see `aiodist.shared_memory.board`): the head,
whether the rank sleeps, and one cursor for each other rank. The data is written before the head
that says that it is there; and read before the cursor that says that it may be written over.
Whoever goes to sleep writes so and looks again, and whoever posts writes its head and looks who
sleeps: with a fence on both sides, as on a lane, so no wake-up is lost. A rank is woken once for
each sleep, whatever is posted meanwhile, and reads all that is there then. Who sleeps within a call
does so at the head of one that it needs, who alone rings there.

**Not before all read.** Ranks come to share memory one after the other, each at a time of its own.
So each says by a word that it reads posts, and nobody posts before all others have said so: what is
posted can be read at once, whatever comes over links after it.

**No room.** A reader that does nothing for long leaves the ring full. Nobody waits for it: `put`
says no, and what was to be posted goes over links as ever. What a post is for stands in its words,
so the readers need not know which way it came.

**Laps.** Who writes goes back to the beginning of its ring once it is further than `NEAR`,
and all have read what lies there: so large data stays in the memory that it was in the last time,
which is in the caches. What the head was then is a word of its own (`LAP`): a reader that has read
so many bytes goes back as well. It cannot miss that, for the rank begins no further lap before all
have read something of this one.

A post is ``bytes to the next one, of words, of data; number; words; data``, its data aligned.
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

# Words, behind those of the board. The head is looked at by all others again and again, so it is
# alone in its line.
HEAD: Final = 384
LAP: Final = 385
"""What the head was when the rank went back to the beginning of its ring. Who looks at it has the
line of the head at hand."""
GIVEN_UP: Final = 386
"""How many calls the rank has given up, of which it has told the others over links. In that line,
too."""
SLEEP: Final = 392
DOZES: Final = 393
"""1 + the rank at whose head it sleeps; 0: it is a frame that wakes it."""
READS: Final = 394
"""Not 0: the rank reads what others post."""
CURSORS: Final = 400
"""And further ones, by rank on this host: bytes that were read of that rank."""
MOST_RANKS: Final = PAGE // 8 - CURSORS

_BEGIN = struct.Struct("<IIIxxxxQ")
_UNIT: Final = 32
"""Posts begin at multiples of this, and so does their data."""
NEAR: Final = 512 * 1024
"""Behind this, posts go back to the beginning of the ring as soon as there is room: what was used a
short while ago is in the caches."""
CHEAP_COPY: Final = 1024
"""Of so few bytes a copy is made sooner than a view."""


def padded(length: int) -> int:
    """How much room data of this length takes."""
    return length + _UNIT - 1 & -_UNIT


class Post(NamedTuple):
    """One that is there. `number` and `words` say what it is for; `data` lies in the ring, where
    the post takes `whole` bytes."""

    number: int
    words: bytes
    data: memoryview
    whole: int


def prefixes(words: bytes, nbytes: int, first: bytes = b"") -> Callable[[int], bytes]:
    """What makes of a number the bytes of a post before its data of `nbytes`, and the `first` of
    these."""
    length = len(words)
    tail = words + bytes(-(_BEGIN.size + length) % _UNIT)
    whole = _BEGIN.size + len(tail) + padded(nbytes)
    tail += first
    begin = _BEGIN.pack
    return lambda number: begin(whole, length, nbytes, number) + tail


class Ring(Naps):
    """What a rank knows of the ring of its own posts. The compiled part has the same."""

    __slots__ = ("_base", "_before", "_head", "_limit")

    _head: int
    """Bytes that were posted."""
    _base: int
    """The same when this lap of the ring began."""
    _before: int
    """And when the one before did."""
    _limit: int
    """Up to here there is room in this lap, for all that is known."""


class Cursor:
    """How far a rank has read the posts of another one. The compiled part has the same."""

    __slots__ = ("at", "given_up", "held", "taken")

    taken: int
    """Bytes that were read."""
    at: int
    """Where the next post lies."""
    given_up: int
    """Calls that the other rank has given up, when last asked."""
    held: int
    """Bytes of the next post, if it is held."""


if TYPE_CHECKING:
    CoreRing: TypeAlias = Ring
    CoreCursor: TypeAlias = Cursor
else:
    CoreRing, CoreCursor = (Ring, Cursor) if core is None else (core.Ring, core.Cursor)


class Posts(CoreRing):
    """The posts of the ranks of a host, as one of them reads and writes them."""

    def __init__(self, board: Board) -> None:
        ranks = sorted((board.rank, *board.words))
        assert len(ranks) <= MOST_RANKS
        place = ranks.index(board.rank)
        self._own = board.own
        self._here = board.here
        self.rank = board.rank
        self._dozes = board.can_doze
        self.ring = board.memory(board.rank)[START : START + SIZE]
        # There is no room in this lap before all read.
        self._head = self._base = self._before = self._limit = 0
        self._is_read = False  # by all others, as far as known
        # The words of the others in which they say how far they have read, and whether they sleep.
        self._words = list(board.words.values())
        self._cursor = CURSORS + place
        self._sleepers = list(board.words.items())
        self._woken = dict.fromkeys(board.words, 0)  # by rank: the sleep that was ended last
        self._nap = self._slept = 0
        self.can_doze = self._dozes
        self._given_up = 0  # calls that this rank has given up
        self.asleep = False
        self.readers = [  # the posts of the others
            Reader(rank, board.memory(rank), board.words[rank], board.own, CURSORS + at)
            for at, rank in enumerate(ranks)
            if rank != board.rank
        ]
        self._own[READS] = 1
        if self._dozes:
            # By rank: where its head lies.
            self._heads = {r: futex.address_of(board.memory(r)[8 * HEAD :]) for r in ranks}
            self._address = self._heads[board.rank]

    def put(self, prefix: bytes, data: bytes | memoryview) -> bool:
        """Post `data`. False: there is no room. `tell` comes next."""
        length, nbytes = len(prefix), len(data)
        whole = length + (nbytes + _UNIT - 1 & -_UNIT)
        at = self._head - self._base
        if at + whole > self._limit:
            at = self._find(whole)
            if at < 0:
                return False
        ring = self.ring
        if nbytes <= CHEAP_COPY:
            ring[at : at + length + nbytes] = prefix + data
        else:
            ring[at : at + length] = prefix
            ring[at + length : at + length + nbytes] = data
        self._head += whole
        return True

    def put_parts(self, head: bytes, rest: Iterable[bytes | memoryview], whole: int) -> int:
        """Post `head`, which is a prefix and perhaps the first of the data, and the `rest` of it,
        in so many bytes: it is joined where it goes. Returns where it begins in `ring`, where it
        stays until the next post; -1: there is no room."""
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

    def last(self, before: int, nbytes: int) -> memoryview:
        """The data of what was put last, `nbytes` behind a prefix of `before`. It stays until
        something else is put."""
        stop = self._head - self._base - padded(nbytes) + nbytes
        return self.ring[stop - nbytes : stop]

    def has_room(self, nbytes: int) -> bool:
        """Whether there is room for a post of that length."""
        at = self._head - self._base
        return at + nbytes <= self._limit or self._find(nbytes) >= 0

    def _find(self, whole: int) -> int:
        """Where there is room for so many bytes, see "Laps"; -1: nowhere."""
        if not self._is_read:
            self._is_read = all(words[READS] for words in self._words)
            if not self._is_read:
                return -1
        head, cursor = self._head, self._cursor
        at = head - self._base
        read = min([words[cursor] for words in self._words])
        if read < self._base:  # some of the last lap is not read
            self._limit = read - self._before
            return at if at + whole <= self._limit else -1
        oldest = read - self._base
        if at >= NEAR and whole <= oldest:  # so some of this lap is read
            self._before, self._base = self._base, head
            self._own[LAP] = head
            self._limit = min(oldest, NEAR)
            return 0
        self._limit = min(NEAR, SIZE)
        return at if at + whole <= SIZE else -1

    def tell(self) -> list[int]:
        """Show what was put. Returns who is to be woken."""
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
        """Have this rank woken by whoever posts next. False: something is there already."""
        self._lie_down(0)
        for reader in self.readers:
            if reader.has_more():
                self._own[SLEEP] = 0
                return False
        self.asleep = True
        self.can_doze = False  # a rank has one word to say how it sleeps
        return True

    def _lie_down(self, dozes: int) -> None:
        """Say that this rank sleeps, and how, see `DOZES`. Look once more before it does."""
        self._nap += 1
        if dozes != self._slept:
            self._slept = self._own[DOZES] = dozes
        self._own[SLEEP] = self._nap
        fence()

    # Who looks for posts, and then dozes: see `aiodist.transports.polling.Stamps`.

    def met(self, readers: Sequence[Reader], _: int) -> bool | None:
        """True: there is something to read of one of them."""
        for reader in readers:
            if reader.words[HEAD] != reader.taken + reader.held:
                return True
        return None

    def apart(self, readers: Sequence[Reader], _: int) -> bool:
        """Whether all of `readers` that have posted nothing were last seen on other cores than this
        rank, as it says by this."""
        here = self._here()
        for reader in readers:
            words = reader.words
            if words[CORE] in (0, here) and words[HEAD] == reader.taken + reader.held:
                return False
        return here > 0

    def doze(self, readers: Sequence[Reader], _: int, seconds: float) -> bool:
        """Sleep within the call until the first of `readers` has posted, or may have, but no longer
        than that: whether there is something to read."""
        reader = readers[0]
        self._lie_down(reader.rank + 1)
        if not self.met(readers, 0):
            futex.wait(self._heads[reader.rank], reader.taken + reader.held, seconds)
        self._own[SLEEP] = 0
        return self.met(readers, 0) is True

    def awake(self) -> None:
        """Nobody need wake this rank."""
        self.asleep = False
        self.can_doze = self._dozes
        self._own[SLEEP] = 0

    # A post stays where it is when its call is given up: others may have read it. The word that it
    # is given up goes over links, and whoever calls later has to hear that first, though all that
    # it needs is posted. To look at each link in each call would take a tenth of a small one.

    def give_up(self) -> None:
        """Tell the others that this rank has given a call up: a word of that has left before."""
        self._given_up += 1
        self._own[GIVEN_UP] = self._given_up

    def is_given_up(self) -> bool:
        """Whether one of the others has given a call up since this was asked the last time."""
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
        """The words of this rank, and of all others in the order of `readers`."""
        return [self._own, *(reader.words for reader in self.readers)]

    def close(self) -> None:
        """Let go of all memory."""
        self.readers.clear()
        self._words.clear()
        self._sleepers.clear()
        self.ring = memoryview(b"")
        self._own = memoryview(bytearray(PAGE)).cast("Q")


class Reader(CoreCursor):
    """The posts of `rank`, one after the other. What is used later may be held where it lies, as
    long as no further one is to be read."""

    __slots__ = ("_own", "cursor", "holder", "rank", "ring", "words")

    def __init__(
        self, rank: int, memory: memoryview, words: memoryview, own: memoryview, cursor: int
    ) -> None:
        self.rank = rank
        self.ring = memory[START : START + SIZE]  # its bytes, that this rank only reads
        self.words = words
        self._own = own  # this rank's words
        self.cursor = cursor  # where in these it says how far it has read
        self.taken = self.at = self.given_up = self.held = 0
        self.holder: Any = None  # who uses that

    def has_more(self) -> bool:
        """Whether there is one to read, beside what is held."""
        return self.words[HEAD] != self.taken + self.held

    def next_at(self) -> int:
        """Where in `ring` the next post lies, which is there."""
        if self.words[LAP] == self.taken:
            self.at = 0
        return self.at

    def shown(self, prefix: bytes, nbytes: int) -> memoryview | None:
        """The data of the next post, which is there, if it begins like that. It stays, until it is
        `passed`."""
        ring, at = self.ring, self.next_at()
        start = at + len(prefix)
        return ring[start : start + nbytes] if ring[at:start].tobytes() == prefix else None

    def passed(self, prefix: bytes, nbytes: int) -> None:
        """What was `shown` is needed no more."""
        self.move(len(prefix) + padded(nbytes))

    def next_post(self) -> Post:
        """The next post, which is there, and stays until `move`. Raises ProtocolError."""
        at, ring = self.next_at(), self.ring
        whole, length, nbytes, number = _BEGIN.unpack_from(ring, at)
        start = at + padded(_BEGIN.size + length)
        there = min(self.words[HEAD] - self.taken, SIZE - at)
        if not 0 < whole == start + padded(nbytes) - at <= there:
            raise ProtocolError(f"rank {self.rank} posted {nbytes} bytes in {whole}")
        words = ring[at + _BEGIN.size : at + _BEGIN.size + length].tobytes()
        return Post(number, words, ring[start : start + nbytes], whole)

    def give_up(self) -> None:
        """Read nothing more: the rank posts what makes no sense, and is lost."""
        self.words = memoryview(bytearray(PAGE)).cast("Q")
        self.taken = self.held = 0

    def hold(self, nbytes: int, holder: object) -> None:
        """The next post, of so many bytes, stays where it is until `let_go`. That comes before the
        one behind it is read."""
        self.held = nbytes
        self.holder = holder

    def let_go(self) -> None:
        """What was held is needed no more."""
        held = self.held
        self.held, self.holder = 0, None
        self.move(held)

    def move(self, nbytes: int) -> None:
        """So many bytes more were read."""
        self.at += nbytes
        self.taken += nbytes
        self._own[self.cursor] = self.taken
