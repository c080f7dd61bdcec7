"""Berths are lanes for one operation each, so that large collectives with a tag can share memory.

Collectives with different tags have no common order, but a lane needs one, because its ranks share
a single one. So each rank also has several *berths* in its segment: each is a board and areas, like
those of the lane. For each call a rank offers a free berth in its post (see `phases.berths`). When
all ranks have said which berth they offer, these berths together are a lane for this operation::

    rank 0   posts [a: berth 0, number 7]   ···   all have posted: a is number 9 on berths 0, 1
    rank 1   posts [a: berth 1, number 9]   ···   all have posted: a is number 9 on berths 0, 1

No rank waits for a berth. If a rank has none free, it offers none. All others hear that, and the
operation goes over links. So a busy berth holds up nothing else, and the order of tags does not
matter. It makes no difference why it is busy, for example because a rank never calls.

A rank may write its first data to the berth before it posts. Then the post says so, which saves one
wait (`BerthOffer.show`).

**Numbers.** Each rank offers its berth with a number that is higher than all earlier numbers of
this berth. The highest number that is offered becomes the number of the operation. So the stamps of
each berth grow, and have the same meaning at all ranks, as the board needs it.

**If a call is given up**, the rank that has offered a berth may not know yet which number the
operation gets. So the abort word of a berth is 1 + the number that the rank *offered*. It voids all
offers of this berth below that. The word stays, because later offers are higher. The berth is free
at once: a rank that still reads it sees the abort word after its last read, and does not complete.

**If the operation ends well**, other ranks may still read the berth. It is free when each of them
has given up, or has written a stamp behind all phases to say that it is done.
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
"""The index of the abort word. All offers of the berth with lower numbers are void."""
MOST: Final = 1 << 39
"""Numbers are below this limit, because a stamp has no room for more."""


class Offered(NamedTuple):
    """A rank's offer: the index of its berth, and a number. `shows` says whether the first data is
    on the berth already."""

    berth: int
    number: int
    shows: bool = False


class BerthBoard(Board):
    """The board of one berth of this rank, with the berths of the others that go with it."""

    offers: Sequence[Offered] = ()
    """The offers for the current operation or the last one, by rank."""

    def see(self, others: Mapping[int, memoryview]) -> None:
        """Use these berths of the others from now on."""
        self.words = {peer: memory[:PAGE].cast("Q") for peer, memory in others.items()}
        self._words = list(self.words.items())
        self._bytes = {self.rank: self._own_bytes, **others}
        # Naps are counted by berth, so these counts start anew. To wake a rank twice does no harm.
        self._kicked = dict.fromkeys(others, 0)
        if self.can_doze:
            self._stamps = {rank: futex.address_of(each) for rank, each in self._bytes.items()}

    def withdraw(self, number: int) -> None:
        """Void the offer with this number: no rank may complete with what it reads here."""
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
        """Whether no rank still reads data of the last operation. A rank that has written `stamp`
        is done with it."""
        for peer, words in self._words:
            if words[STAMP] < stamp and words[_VOID] <= self.offers[peer].number:
                return False
        return True


class Berth(Lane):
    """One berth of this rank: a lane that has one operation at a time.

    An operation is on it from `moor` to `leave` or `finish_inline`. It needs no turns and compares
    no calls, because its ranks have already agreed on the call.
    """

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
        # An operation has its areas to itself, so a higher limit would only take more memory.
        self.by_turns = SMALL
        self.goes_round = False
        self.index = index
        self.offered = -1  # the number with which it is offered, or -1
        self.along = [index] * size  # by rank, the berths that the board has now
        self.moored = False  # whether an operation is on it
        self._berths = berths
        self._number = 0  # the number of the next offer
        self._quit = 0  # others that have written this stamp are done with the last operation

    @property
    def is_free(self) -> bool:
        """Whether the berth may be offered."""
        return self.offered < 0 and self.board.is_quit(self._quit)

    def offer(self) -> BerthOffer:
        """Offer the berth to the others."""
        self.offered = self._number
        return BerthOffer(self, Offered(self.index, self._number))

    def withdraw(self) -> None:
        """Take the offer back. Any thread may call this, because the berth is free only after the
        last step."""
        self.board.withdraw(self.offered)
        self._number = self.offered + 1
        self._quit = 0
        self.offered = -1

    def moor(self, offers: Sequence[Offered], place: int, *, within: bool) -> None:
        """Begin an operation on the berths that all ranks have offered.

        Args:
            offers: The offers of all ranks, by rank.
            place: The location of the operation's array, see `Board.announce`.
            within: Whether it has one phase, and is done within a call.
        """
        along = [offer.berth for offer in offers]
        board = self.board
        if along != self.along:
            memories = self._berths.memories
            board.see({peer: memories[peer][along[peer]] for peer in self.others})
            self.areas.forget()
            self.along = along
        board.offers = offers
        number = max([offer.number for offer in offers])
        self._number = number + 1
        self.areas.free = [0] * len(AREAS)  # the operation before is over at all ranks
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
            self.waiting.woken()
            self._end(failed=failed)
            self.finish_turn()

    def _end(self, *, failed: bool) -> None:
        """End the operation. This rank reads nothing more of the others, or its result is void."""
        if failed:
            self.board.abort(self._seq)
            self._quit = 0
        else:
            self._quit = stamp_of(self._seq, MAX_PHASES)
            self._write(self._quit)
        self.offered = -1
        self._berths.now(self, moored=False)


class BerthOffer:
    """A berth that is offered for one call. If the offer is dropped before `moor`, the berth is
    withdrawn."""

    __slots__ = ("_berth", "words")

    def __init__(self, berth: Berth, words: Offered) -> None:
        self._berth: Berth | None = berth
        self.words = words  # what the others are told

    def show(self, show: Callable[[Berth], None]) -> None:
        """Let `show` write the first data to the berth now."""
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
        # Each berth's memory, by rank and berth.
        self.memories = [_berths_in(board.memory(rank)) for rank in range(self.size)]
        self._dozes = board.can_doze
        self._surroundings = loop, progress, kick, moved
        self._crowded = crowded
        self._polls = polls
        self._all: list[Berth] = []  # made at the first use
        self._moored: list[Berth] = []  # the berths with an operation

    def offer(self, first: int = 0) -> BerthOffer | None:
        """Offer a free berth, or return None if there is none.

        If all ranks give the same number as `first`, they mostly offer the same berths. Then the
        views of these berths are reused.
        """
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
        """Note whether an operation is on `berth` from now on."""
        berth.moored = moored
        if moored:
            self._moored.append(berth)
        else:
            self._moored.remove(berth)
        # With several operations, each rank may poll for another one, and a rank that polls holds
        # up the others.
        looks = self._polls and len(self._moored) == 1
        for each in self._moored:
            each.waiting.polls = looks

    def kicked(self) -> None:
        """Go on, because another rank has come as far as this one waited for."""
        for berth in list(self._moored):
            berth.kicked()

    def hurry(self) -> None:
        """Take what another rank has left, because it is gone."""
        for berth in list(self._moored):
            berth.hurry()

    def break_off(self) -> None:
        """Offer nothing more, because a rank is lost."""
        self.is_broken = True

    def close(self) -> None:
        """Release all memory, because the group has ended."""
        self.is_broken = True
        for berth in self._all:
            berth.close()
        self.memories.clear()


def _berths_in(segment: memoryview) -> list[memoryview]:
    return [segment[LANE + at * BERTH :][:BERTH] for at in range(BERTHS)]
