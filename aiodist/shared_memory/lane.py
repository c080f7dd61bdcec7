"""A lane: where the collectives of a group whose ranks share a host run, one after the other.

The lane holds operations in the order of their calls (`turns`); the first of them runs. It waits by
looking at the others' stamps for a short while; then it asks to be woken, and the event loop goes
on (`waiting`). What it shows to the others lies in staging memory (`areas`).

**The stamp of one operation**, all its life long, at one rank. Others wait for some of its values
(see `aiodist.shared_memory.board`); n.p.k is operation n, phase p, published k times::

    stamp       written by              what others may conclude
    (n-1).…     the operation before    they may enter n once all have entered n - 1
    n.0.0       enter                   it was called here, with these words: compare them
    n.0.1 …     publish                 what was copied to the area so far may be read
    n.1.0       next_phase, or end      nothing of phase 0 is read here any more: write over it
    n.1.1 …     publish                 the second phase, on another area
    (n+1).0.0   enter of the next one   all of n is over here

    Within the call n.0.0 is left out: n.0.1 says that, too; but not where a rank may wait before
    that, as in groups that span hosts (`show_entry`). Of a call that is passed over there is n.0.0
    alone, behind its abort word.

**One at a time.** A rank has one stamp, and there are words for two operations only (see
`aiodist.shared_memory.board`), so what a rank does in shared memory is one row of steps, the same
at all ranks. An operation has its turn when all before it have ended here, and may enter once the
others have entered the one before it. It is then run from whatever wakes the lane, again and again,
as far as it goes without waiting::

    called ──> queued ──> its turn ──> enters: words, then the stamp ──> phases ──> ended
       │         │            │                                             │
       │         └─ given up ─┴─> a placeholder: abort word, then stamp     └─> given up: abort word
       │
       └── seen before, nothing queued, the others are there: the whole row within the call

**Given up before its turn.** Its number is taken, and the others wait for a stamp of it: they
cannot enter the next operation while this rank has not come to this one. Nor can the stamp be
written at once, for it would say that the operations before are over here, too. So a placeholder
takes its place in the queue. When its turn comes, it writes the abort word, then the stamp: whoever
takes the stamp for an entry sees the abort word before it completes. The reason travels over the
links, at once. Nothing has to be passed over when a rank of the lane is lost: then no later
operation can be done, and nobody waits for its stamp any more.

**Given up after it has entered.** The abort word is written, and the turn is over. No stamp is
written for what was not done: the others wait until the verdict comes over a link, or until the
stamp of the next operation takes them through what is void to the look that says so.

**Within the call.** An operation of a kind that was seen before needs nothing from the event loop
if nothing is queued here and the others' stamps already allow that it enters and that it writes to
its area. Then it takes its turn without being an `Operation`: this lane keeps its number, phase and
publishes as of any other, so the others cannot tell the difference. One stamp is saved: that of its
entry, since its first publish says that as well; but where arrays lie in memory that all see, the
others choose what to do by the entry, so there it is written. Until the call returns nothing else
can touch the lane: all of it is synchronous, on one loop, and only words are polled, no links. The
call ends in one of two ways: all is done, and the lane is free; or something has to wait, and an
operation becomes the current one that finds the lane entered, and goes on with the steps that are
left (see `aiodist.prepared.express`). In both cases the turn is over before the next begins.

**Nobody waits for ever.** Whoever waits goes on with the next turn of the loop, or has said on the
board what it waits for, and is woken by the rank that gets there (see the comment above
`aiodist.shared_memory.board.fence`). A rank that gives up or is lost is heard of over the links,
where an operation on a lane is known like any other, and each has its deadline, if it was given
one. When a rank is lost, what it has left in shared memory is still taken, without waiting
(`hurry`): an operation to which it had given all it has may complete.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from aiodist.buffers.vector import Vector
from aiodist.compiled import core
from aiodist.links.moved import Moved
from aiodist.schedules.costs import ONE_HOST_TCP, Costs
from aiodist.schedules.teams import Teams
from aiodist.shared_memory.areas import Areas
from aiodist.shared_memory.board import (
    A_PHASE,
    AN_OPERATION,
    AREAS,
    CROWDED_SMALL,
    MAX_PHASES,
    SMALL,
    STAMP,
    Board,
    stamp_of,
)
from aiodist.shared_memory.turns import Rider, SkippedCall, Turns
from aiodist.shared_memory.waiting import Waiting
from aiodist.transports.polling import Progress


class Sharing(enum.Enum):
    """How the collectives of some ranks may share memory."""

    NONE = enum.auto()
    POLLED = enum.auto()
    """Who waits looks at memory, for a while."""
    WOKEN = enum.auto()
    """Who waits goes to sleep at once."""


class Layout(NamedTuple):
    """Which ranks of a group are on one host, and how they may share memory. `costs`: what plans
    over links are chosen by. `hosts`: the ranks of each host, whether they share memory or not."""

    sharing: Sharing
    teams: Teams
    costs: Costs = ONE_HOST_TCP
    hosts: Teams = ()


class DifferentCallsError(Exception):
    """Others called something else: `calls` by rank."""

    def __init__(self, calls: dict[int, bytes]) -> None:
        super().__init__(calls)
        self.calls = calls


class Row:
    """What a lane knows of the operation whose turn it is. The compiled part has the same, and
    tapes that change it (`aiodist.prepared.tapes`)."""

    __slots__ = (
        "_agreed", "_base", "_digest", "_entered", "_known", "_phase", "_publishes", "_seq",
    )  # fmt: skip

    _entered: bool
    """Its words are on the board."""
    _agreed: bool
    """All others are known to have called the same."""
    _seq: int
    """Its number."""
    _digest: int
    """Of what was called."""
    _phase: int
    """The number of its phase; -1: none has begun."""
    _base: int
    """The stamp with which that began."""
    _publishes: int
    """How often this rank has published in it."""
    _known: int
    """All others have reached this stamp, perhaps a later one."""


if TYPE_CHECKING:
    LaneRow: TypeAlias = Row
else:
    LaneRow = Row if core is None else core.Row


class Lane(LaneRow):
    """One rank's end of a lane. `first`: the number of the first operation that runs on it; `size`:
    the ranks of the group, of whom those on this host are on the board. `crowded`: there are more
    of these than cores, as all of them know."""

    def __init__(
        self,
        board: Board,
        loop: asyncio.AbstractEventLoop,
        progress: Progress,
        kick: Callable[[int], None],
        first: int,
        moved: Moved,
        *,
        size: int,
        crowded: bool,
        polls: bool,
    ) -> None:
        self.board = board  # the words of the ranks
        self.first = first
        self.moved = moved  # bytes that were shown to others, or read of them
        self.others: Sequence[int] = tuple(board.words)  # the other ranks of this host
        self.is_broken = False  # a rank is lost, see `break_off`
        self.crowded = crowded
        # Most bytes that operations put into an area that they use by turns: see `board`.
        self.by_turns = CROWDED_SMALL if crowded else SMALL
        self.polls = polls  # whether waiting begins with a look at memory, again and again
        self._kick = kick  # wakes a rank that sleeps
        self._turns = Turns(loop)  # whose turn it is
        here = len(self.others) + 1
        self._spans = size > here  # whether the group spans hosts
        self._dozes = board.can_doze  # whether who waits may sleep within the call
        # How it waits for the others: it looks for a while, then sleeps.
        self._waiting = Waiting(
            board,
            progress,
            self._turns.resume_soon,
            polls=polls,
            # Between hosts a yield of the core costs little of the time that is waited anyway.
            crowded=crowded or self._spans,
        )
        self._areas = Areas(board, size)  # staging memory
        self._entered = self._agreed = False
        self._seq = self._phase = -1
        self._digest = self._base = self._publishes = self._known = 0

    # -- the order of operations ------------------------------------------------------------------

    @property
    def current(self) -> Rider | SkippedCall | None:
        """Whose turn it is."""
        return self._turns.current

    @property
    def idle(self) -> bool:
        """Whether an operation could run at once."""
        return self._turns.current is None and not self._turns.queue

    def add(self, rider: Rider | SkippedCall) -> None:
        """Run `rider` once it is its turn; perhaps at once."""
        self._turns.add(rider)

    def leave(self, rider: Rider, *, failed: bool) -> None:
        """`rider` has ended. If it failed, nobody completes with what it writes from here on."""
        if rider is self._turns.current and self._entered:
            if failed:
                self.board.abort(rider.seq)
            self._waiting.woken()
            self._next()
            return
        # Its turn has not come. Then the others have to be told that it is passed over, unless
        # nobody will come to hear of it.
        skipped = None if self.is_broken else SkippedCall(self.pass_over, rider.seq)
        self._turns.replace(rider, skipped)

    def _next(self) -> None:
        """Nothing is left to do for the current operation."""
        self._entered = self._agreed = False
        self._phase = -1
        self._turns.next()

    def kicked(self) -> None:
        """One of the others has come as far as we waited for."""
        if self._waiting.woken():
            self._turns.resume()

    def resume_soon(self) -> None:
        """Go on with whose turn it is with the next turn of the loop."""
        self._turns.resume_soon()

    def hurry(self) -> None:
        """Go on as far as what is there allows, without waiting: one of the others is gone."""
        self._waiting.hurries = True
        try:
            while self._turns.resume():
                pass
        finally:
            self._waiting.hurries = False

    def break_off(self) -> None:
        """One of the ranks is lost: nothing that is called from here on can be done."""
        self.is_broken = True
        self._turns.clear()

    def close(self) -> None:
        """The group has ended: let go of all memory."""
        self._turns.clear()
        self._turns.current = None
        self._waiting.close()
        self._areas.close()

    def look(self, looks: bool) -> None:
        """Whether waiting begins with a look at memory, again and again."""
        self._waiting.polls = looks

    # -- memory -----------------------------------------------------------------------------------

    def area(self, rank: int, index: int) -> memoryview:
        """The bytes of an area of `rank`; those of others are read-only."""
        return self.board.area(rank, index)

    def vectors(self, index: int, dtype: np.dtype[Any]) -> list[Vector]:
        """See `Areas.vectors`."""
        return self._areas.vectors(index, dtype)

    # -- what the current operation does ----------------------------------------------------------

    def enter(self, rider: Rider) -> bool:
        """Tell the others that `rider` was called here. False: wait, and `resume` again."""
        if self._entered:
            return True
        if self._waiting.gives_way():
            return False
        if not self._waiting.wait(self.others, self._before(rider.seq)):
            return False
        self._enter(rider.seq, stamp_of(rider.seq), rider.digest, rider.call, rider.place)
        self._write(self._base)
        return True

    def _before(self, seq: int) -> int:
        """The stamp of others with which the operation `seq` may be entered. Then nobody needs the
        words of the operation two before any more, whose parity this one has."""
        return stamp_of(seq - 1) if seq > self.first else 0

    def pass_over(self, seq: int) -> bool:
        """Tell the others that `seq` was given up before its turn. False: wait, and call again."""
        if not self._waiting.wait(self.others, self._before(seq)):
            return False
        self.board.abort(seq)
        self._write(stamp_of(seq))
        self._next()
        return True

    def try_enter(
        self,
        seq: int,
        area: int,
        digest: int,
        call: bytes,
        place: int,
        rider: Rider | None = None,
    ) -> bool:
        """Enter the operation `seq`, which is called now, or is `rider`, whose turn it is, and
        needs `area`, if that takes no more than a moment. `finish_inline` comes next, or
        `finish_turn`, or `add` of an operation that goes on. False: nothing is done.

        `place`: where its array lies, see `Board.announce`.
        """
        turns = self._turns
        if turns.current is not rider or self.is_broken or seq < self.first:
            return False
        if turns.queue and rider is None:
            return False
        base = (seq + 1) * AN_OPERATION
        before = base - AN_OPERATION if seq > self.first else 0  # as in `_before`
        free = self._areas.free[area]
        known = self._known
        if known < before or known < free:
            needed = max(before, free)
            # The others may still read what was shown in the operation before. They are nearly
            # through with that, and a wait here is shorter than one in the loop.
            there = self.board.reached(self.others, needed)
            if not (there or self._waiting.poll(self.others, needed)):
                return False
        self._enter(seq, base, digest, call, place)
        self._phase = 0
        if place:
            # The others' arrays decide what comes next, so they have to hear that we are here.
            self._write(base)
        return True

    def _enter(self, seq: int, base: int, digest: int, call: bytes, place: int) -> None:
        self.board.announce(seq, digest, call, place)
        self._seq = seq
        self._base = base
        self._digest = digest
        self._publishes = 0
        self._entered = True

    def show_entry(self) -> None:
        """Tell the others what `try_enter` has entered: from here on it is as if `enter` had, and
        no phase has begun. For plans in which a rank may have to wait before it publishes."""
        self._write(self._base)
        self._phase = -1

    def finish_inline(self) -> None:
        """What `try_enter` entered is done within its call."""
        self._entered = self._agreed = False
        self._phase = -1

    def finish_turn(self) -> None:
        """What `try_enter` entered at its turn is done."""
        self._next()

    def gives_way(self) -> bool:
        """Whether the loop is due for a turn, with the next of which it is resumed whose turn it
        is."""
        return self._waiting.gives_way()

    def entered(self, seq: int) -> list[int]:
        """The others that have entered operation `seq`."""
        return [peer for peer in self.others if self.board.words[peer][STAMP] >= stamp_of(seq)]

    def next_phase(self) -> int:
        """The number of the phase that begins: nothing of the one before is read here any more."""
        self._phase += 1
        self._publishes = 0
        if self._phase >= MAX_PHASES:
            raise RuntimeError(f"an operation has at most {MAX_PHASES} phases")
        if self._phase:
            self._base = stamp_of(self._seq, self._phase)
            self._write(self._base)
        return self._phase

    def begin(self, area: int) -> bool:
        """Wait until the own `area` may be written. False: wait, and call again."""
        if self._spans:
            # What is large comes from other hosts piece by piece, and that is for the loop.
            self.board.can_doze = self._dozes and area != len(AREAS) - 1
        return self._waiting.wait(self.others, self._areas.free[area])

    def places(self) -> dict[int, int] | None:
        """Where the arrays of the others lie, see `Board.places`."""
        return self.board.places(self._seq)

    def publish(self) -> None:
        """What was written to the area so far may be read."""
        self._publishes += 1
        for peer in self.board.reach(self._base + self._publishes):
            self._kick(peer)

    def wait_for(self, peers: Sequence[int], publishes: int) -> bool:
        """Wait until `peers` have published that often in this phase. False: wait, and call again.

        Raises DifferentCallsError.
        """
        if (publishes > 1 or not peers) and self._waiting.gives_way():
            # Between two pieces, though they may be there: a large array takes many.
            return False
        there = self._waiting.wait(peers, self._base + publishes)
        if not self._agreed:
            calls = self._compare()
            if calls:
                raise DifferentCallsError(calls)
        return there

    def watch(self, peers: Sequence[int], publishes: int) -> bool:
        """Wait for that for a moment only. False also for what `wait_for` raises."""
        if publishes > 1 and self._waiting.is_due():
            return False
        stamp = self._base + publishes
        board = self.board
        waiting = self._waiting
        if not (board.reached(peers, stamp) or waiting.poll(peers, stamp)):
            return False
        if len(peers) == len(self.others):
            self._known = stamp
            if not self._agreed:
                self._agreed = board.agree(self._seq, self._digest)
                return self._agreed
        return True

    def _compare(self) -> dict[int, bytes]:
        """Which of the other ranks have called something else, and what."""
        entered = self.entered(self._seq)
        calls = self.board.different(entered, self._seq, self._digest)
        self._agreed = not calls and len(entered) == len(self.others)
        return calls

    def has_published(self, peer: int, publishes: int) -> bool:
        """Whether `peer` has published that often in this phase."""
        return self.board.reached((peer,), self._base + publishes)

    def is_void(self) -> bool:
        """Whether one of the others has given the current operation up, or turned (see
        `Board.is_void`): what was read of it may be anything."""
        return self.board.is_void(self._seq)

    def end(self, area: int) -> bool:
        """The phase is over. False: one of the others gave the operation up, or turned, while we
        read from it; its word comes over the link."""
        if (not self._agreed and self._compare()) or self.board.is_void(self._seq):
            return False
        over = self._base + A_PHASE
        self._areas.free[area] = over
        if self.is_shared_by_all(area):
            # Used by one operation after the other: let others go on before our next one.
            self._write(over)
        return True

    def _write(self, stamp: int) -> None:
        for peer in self.board.reach(stamp):
            self._kick(peer)

    # -- for the compiled part --------------------------------------------------------------------

    def rouse(self, stamp: int) -> None:
        """Wake the ranks that sleep until this one has reached `stamp`, as it has."""
        for peer in self.board.rouse(stamp):
            self._kick(peer)

    @staticmethod
    def is_shared_by_all(area: int) -> bool:
        """Whether all operations use `area`, so that the others wait for the end of each phase."""
        return area == len(AREAS) - 1

    def inner(self) -> tuple[Turns, list[int], Waiting]:
        """Return whose turn it is, the stamps that free areas, and how this rank waits."""
        return self._turns, self._areas.free, self._waiting
