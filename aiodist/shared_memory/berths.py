"""Berths: lanes for one operation each, so that large collectives with a tag share memory, too.

Collectives of different tags have no common order, and a lane needs one. But it needs it only since
there is one of it. So each rank has some *berths* in its segment: a board and areas each, as those
of the lane. It offers one that is free to each call, by what it posts (see `phases.berths`), and
once all ranks have said which one they offer, the operation has a lane of its own: the berths that
were offered, whichever they are::

    rank 0   posts [a: berth 0, number 7]   ···   all have posted: a is number 9 on berths 0, 1
    rank 1   posts [a: berth 1, number 9]   ···   all have posted: a is number 9 on berths 0, 1

Nobody waits for a berth. Who has none free offers none, all hear that, and the operation goes over
links: so whatever holds berths (a rank that never calls, one that is busy) holds up nothing else,
and the order of tags is of no matter.

What a rank would show first on its berth, it may show before it posts: then the post says that as
well, and there is one wait less (`BerthOffer.show`).

**Numbers.** Each rank offers a number with its berth, higher than all that this berth has had. The
highest of those offered is that of the operation. So the stamps of each berth grow, and are the
same at all ranks, as the board needs it.

**Given up.** Who has offered a berth, and gives the call up, may not know yet what number the
others make of it. So the abort word of a berth has the number that was *offered*, plus one: all
offers of this berth below that are void. It stays, for later offers are higher. After it the berth
is free at once: who still reads there sees the word after its last read, and does not complete.

**Ended well.** Then others may still read there: the berth is free when each of them has written
that it is through (a stamp behind all phases), or has given up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

from aiodist.links.moved import Moved
from aiodist.shared_memory.board import (
    AREAS,
    BERTH,
    BERTHS,
    LANE,
    MAX_PHASES,
    PAGE,
    SMALL,
    STAMP,
    Board,
    fence,
    stamp_of,
)
from aiodist.shared_memory.lane import Lane
from aiodist.shared_memory.turns import Rider
from aiodist.transports import futex
from aiodist.transports.polling import Progress

_VOID: Final = 3
"""A word: all offers of this berth that are below it are void. (On the lane: an abort word.)"""
MOST: Final = 1 << 39
"""Numbers are below this: a stamp has no room for more."""


class Offered(NamedTuple):
    """What a rank offers: which of its berths, and which number. `shows`: what it publishes first
    is there already."""

    berth: int
    number: int
    shows: bool = False


class BerthBoard(Board):
    """The board of one of this rank's berths, and of those of the others that go with it."""

    offers: Sequence[Offered] = ()
    """By rank, what was offered for the operation that is under way, or was the last one."""

    def see(self, others: Mapping[int, memoryview]) -> None:
        """The berths of the others are these from here on."""
        self.words = {peer: memory[:PAGE].cast("Q") for peer, memory in others.items()}
        self._words = list(self.words.items())
        self._bytes = {self.rank: self._own_bytes, **others}
        # To wake one that has been woken does no harm: naps are counted by berth.
        self._kicked = dict.fromkeys(others, 0)
        if self.can_doze:
            self._stamps = {rank: futex.address_of(each) for rank, each in self._bytes.items()}

    def withdraw(self, number: int) -> None:
        """The offer with this number is void: nobody may complete with what is read here."""
        self.own[_VOID] = number + 1
        fence()

    def abort(self, operation: int) -> None:
        self.withdraw(self.offers[self.rank].number)

    def is_void(self, operation: int) -> bool:
        for peer, words in self._words:
            if words[_VOID] > self.offers[peer].number:
                break
        else:
            return False
        return True

    def is_quit(self, stamp: int) -> bool:
        """Whether nobody reads any more what was shown for the last operation, of which `stamp`
        says that a rank is through."""
        for peer, words in self._words:
            if words[STAMP] < stamp and words[_VOID] <= self.offers[peer].number:
                return False
        return True


class Berth(Lane):
    """One of this rank's berths: a lane for one operation at a time, which is on it from `moor` to
    `leave` or `finish_inline`. There are no turns, and no calls to compare: its ranks have met."""

    board: BerthBoard

    def __init__(
        self,
        berths: Berths,
        index: int,
        board: BerthBoard,
        loop: asyncio.AbstractEventLoop,
        progress: Progress,
        kick: Callable[[int], None],
        moved: Moved,
        size: int,
        crowded: bool,
    ) -> None:
        super().__init__(
            board, loop, progress, kick, 0, moved, size=size, crowded=crowded, polls=False
        )
        self.by_turns = SMALL  # an operation has all of it to itself, and its areas take memory
        self.index = index
        self.offered = -1  # the number with which it is offered; -1: it is not
        self.along = [index] * size  # by rank, the berths that the board is about
        self.moored = False  # an operation is on it
        self._berths = berths
        self._number = 0  # that is offered next
        self._quit = 0  # the stamp with which others are through with the last operation

    @property
    def is_free(self) -> bool:
        """Whether it may be offered."""
        return self.offered < 0 and self.board.is_quit(self._quit)

    def offer(self) -> BerthOffer:
        """Offer it to the others."""
        self.offered = self._number
        return BerthOffer(self, Offered(self.index, self._number))

    def withdraw(self) -> None:
        """Nothing comes of the offer. Any thread may do this: it is free with the last step."""
        self.board.withdraw(self.offered)
        self._number = self.offered + 1
        self._quit = 0
        self.offered = -1

    def moor(self, offers: Sequence[Offered], place: int, *, within: bool) -> None:
        """All ranks have offered a berth: an operation is on these from here on. `place`: where its
        array lies, see `Board.announce`. `within`: it has one phase, and is done within a call."""
        along = [offer.berth for offer in offers]
        board = self.board
        if along != self.along:
            memories = self._berths.memories
            board.see({peer: memories[peer][along[peer]] for peer in self.others})
            self._areas.forget()
            self.along = along
        board.offers = offers
        number = max([offer.number for offer in offers])
        self._number = number + 1
        self._areas.free = [0] * len(AREAS)  # what was there before is over
        self._enter(number, stamp_of(number), 0, b"", place)
        self._agreed = True
        self._phase = 0 if within else -1
        self._berths.now(self, moored=True)
        if place:
            self._write(self._base)

    def enter(self, rider: Rider) -> bool:
        return True

    def entered(self, seq: int) -> list[int]:
        return list(self.others)

    def finish_inline(self) -> None:
        super().finish_inline()
        self._end(failed=False)

    def leave(self, rider: Rider, *, failed: bool) -> None:
        if self.moored:
            self._waiting.woken()
            self._end(failed=failed)
            self._next()

    def _end(self, *, failed: bool) -> None:
        """Nothing is read of the others any more, or counts."""
        if failed:
            self.board.abort(self._seq)
            self._quit = 0
        else:
            self._quit = stamp_of(self._seq, MAX_PHASES)
            self._write(self._quit)
        self.offered = -1
        self._berths.now(self, moored=False)


class BerthOffer:
    """A berth that is offered for one call. It is withdrawn when nobody has the offer any more,
    unless it was moored."""

    __slots__ = ("_berth", "words")

    def __init__(self, berth: Berth, words: Offered) -> None:
        self._berth: Berth | None = berth
        self.words = words  # for the others

    def show(self, show: Callable[[Berth], None]) -> None:
        """Have `show` write to the berth what is published first, now."""
        assert self._berth is not None
        show(self._berth)
        self.words = self.words._replace(shows=True)

    def moor(self, offers: Sequence[Offered], place: int, *, within: bool = False) -> Berth:
        """See `Berth.moor`."""
        berth = self._berth
        assert berth is not None
        self._berth = None
        berth.moor(offers, place, within=within)
        return berth

    def __del__(self) -> None:
        if self._berth is not None:
            self._berth.withdraw()


class Berths:
    """All berths of this rank."""

    def __init__(
        self,
        board: Board,
        loop: asyncio.AbstractEventLoop,
        progress: Progress,
        kick: Callable[[int], None],
        moved: Moved,
        *,
        crowded: bool,
        polls: bool,
    ) -> None:
        self.rank = board.rank
        self.size = len(board.words) + 1
        self.is_broken = False
        # By rank and berth.
        self.memories = [_berths_in(board.memory(rank)) for rank in range(self.size)]
        self._dozes = board.can_doze
        self._surroundings = loop, progress, kick, moved
        self._crowded = crowded
        self._polls = polls
        self._all: list[Berth] = []  # made when first needed
        self._moored: list[Berth] = []  # those with an operation

    def offer(self, first: int = 0) -> BerthOffer | None:
        """Offer a berth that is free; None: there is none. Where ranks give the same number as
        `first`, they mostly offer the same, so that views of these are at hand."""
        if not self.is_broken:
            for each in range(BERTHS):
                berth = self._berth(each ^ (first & 1))
                if berth.is_free:
                    return berth.offer()
        return None

    def _berth(self, index: int) -> Berth:
        while len(self._all) <= index:
            at = len(self._all)
            others = {r: m[at] for r, m in enumerate(self.memories) if r != self.rank}
            own = self.memories[self.rank][at]
            board = BerthBoard(self.rank, own, others, dozes=self._dozes)
            self._all.append(Berth(self, at, board, *self._surroundings, self.size, self._crowded))
        return self._all[index]

    def now(self, berth: Berth, *, moored: bool) -> None:
        """An operation is on `berth` from here on, or is no more."""
        berth.moored = moored
        if moored:
            self._moored.append(berth)
        else:
            self._moored.remove(berth)
        # Of several, each rank may look for another one: who looks holds up the others.
        looks = self._polls and len(self._moored) == 1
        for each in self._moored:
            each.look(looks)

    def kicked(self) -> None:
        """One of the others has come as far as this rank waits for."""
        for berth in list(self._moored):
            berth.kicked()

    def hurry(self) -> None:
        """One of the others is gone: take what it has left."""
        for berth in list(self._moored):
            berth.hurry()

    def break_off(self) -> None:
        """One of the ranks is lost: nothing is offered any more."""
        self.is_broken = True

    def close(self) -> None:
        """The group has ended: let go of all memory."""
        self.is_broken = True
        for berth in self._all:
            berth.close()
        self.memories.clear()


def _berths_in(segment: memoryview) -> list[memoryview]:
    return [segment[LANE + at * BERTH :][:BERTH] for at in range(BERTHS)]
