"""A lane runs the collectives of ranks that share a host, one after the other.

A lane keeps operations in the order of their calls (`turns`), and the first of them runs. If the
operation has to wait, it looks at the others' stamps for a short while. Then it asks to be woken,
and the event loop goes on (`waiting`). It shows data to others in staging memory (`areas`).

**The stamps of one operation** at one rank, in order (see `aiodist.shared_memory.board`). Others
wait for some of them. n.p.k is operation n, phase p, published k times::

    stamp       written by              what others may conclude
    (n-1).…     the operation before    they may enter n once all have entered n - 1
    n.0.0       enter                   it was called here, with these words: compare them
    n.0.1 …     publish                 what was copied to the area so far may be read
    n.1.0       next_phase, or end      nothing of phase 0 is read here any more: write over it
    n.1.1 …     publish                 the second phase, on another area
    (n+1).0.0   enter of the next one   all of n is over here

    Within the call n.0.0 is left out, because n.0.1 says it as well. It is written if a rank may
    wait before n.0.1, as in groups that span hosts (`show_entry`). A call that is passed over
    writes n.0.0 only, after its abort word.

**One at a time.** A rank has one stamp, and words for two operations only. So a rank does its work
in shared memory as one row of steps, in the same order as all other ranks. An operation gets its
turn when all earlier ones have ended here. It may enter once the others have entered the one
before. Each event that wakes the lane then runs the operation as far as it goes without a wait::

    called ──> queued ──> its turn ──> enters: words, then the stamp ──> phases ──> ended
       │         │            │                                             │
       │         └─ given up ─┴─> a placeholder: abort word, then stamp     └─> given up: abort word
       │
       └── seen before, nothing queued, the others are there: the whole row within the call

**If a call is given up before its turn**, its number is taken already, and the others wait for its
stamp. Without this stamp they cannot enter the next operation. But the stamp cannot be written at
once, because it would say that all earlier operations are over here. So a placeholder takes the
place of the call in the queue. When its turn comes, it writes the abort word, then the stamp. A
rank that takes the stamp for an entry sees the abort word before it completes. The reason for the
abort travels over the links at once. If a rank of the lane is lost, no placeholder is needed: no
later operation can be done, so no rank waits for the stamp any more.

**If an operation is given up after it has entered**, the rank writes the abort word, and the turn
is over. It writes no stamps for steps that it has not done. The others wait until the verdict comes
over a link. Or they see the stamp of the next operation, go through the void data, and then find
the abort word when they check it.

**Within the call.** An operation needs nothing from the event loop if three conditions hold. This
kind of call was seen before. Nothing is queued here. The stamps of the others already allow the
rank to enter and to write to its area. Such a call takes its turn without an `Operation`. The lane
counts its number, phase and publishes as for any other, so other ranks see no difference. The stamp
of the entry is left out, because the first publish says the same. It is written if arrays lie in
memory that all ranks see, because the others then choose their plan by the entry.

Nothing else can touch the lane before the call returns, because the call is synchronous, on one
loop, and polls words only, not links. The call ends in one of two ways. Either everything is done,
and the lane is free. Or a step has to wait: then an operation becomes the current one. It finds the
lane entered, and goes on with the remaining steps (see `aiodist.prepared.express`). In both cases
this turn is over before the next begins.

**No rank waits for ever.** A rank that waits goes on with the next turn of the loop, or the board
says what it waits for. In the second case the rank that gets there wakes it (see the comment above
`aiodist.shared_memory.board.fence`). If a rank gives up or is lost, the others hear it over the
links, because links know each operation on a lane. An operation can also have a deadline. When a
rank is lost, the others still take what it left in shared memory, without waiting (`hurry`). So an
operation may complete if the lost rank had given all its data.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

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
    digest_of,
    stamp_of,
)
from aiodist.shared_memory.turns import Rider, SkippedCall, Turns
from aiodist.shared_memory.waiting import LaneWaiting
from aiodist.transports.polling import Progress


class Sharing(enum.Enum):
    """How the collectives of some ranks may share memory."""

    NONE = enum.auto()
    POLLED = enum.auto()
    """A rank that waits looks at memory first, for a while."""
    WOKEN = enum.auto()
    """A rank that waits goes to sleep at once."""


class Layout(NamedTuple):
    """Which ranks of a group are on one host, and how they may share memory.

    `costs` are used to choose plans over links. `hosts` has the ranks of each host, whether they
    share memory or not.
    """

    sharing: Sharing
    teams: Teams
    costs: Costs = ONE_HOST_TCP
    hosts: Teams = ()


class DifferentCallsError(Exception):
    """Other ranks called something else. `calls` has their calls, by rank."""

    def __init__(self, calls: dict[int, bytes]) -> None:
        super().__init__(calls)
        self.calls = calls


class Row:
    """The state of the operation that has its turn. The compiled part has the same class, and tapes
    that change it (`aiodist.prepared.tapes`)."""

    __slots__ = (
        "_agreed", "_base", "_digest", "_entered", "_known", "_phase", "_publishes", "_seq",
    )  # fmt: skip

    _entered: bool
    """Whether its words are on the board."""
    _agreed: bool
    """Whether all others are known to have called the same."""
    _seq: int
    """The number of the operation."""
    _digest: int
    """The digest of the call."""
    _phase: int
    """The number of the current phase; -1: no phase has begun."""
    _base: int
    """The stamp with which the phase began."""
    _publishes: int
    """How often this rank has published in the phase."""
    _known: int
    """All others have reached at least this stamp."""


if TYPE_CHECKING:
    LaneRow: TypeAlias = Row
else:
    LaneRow = Row if core is None else core.Row


class Lane(LaneRow):
    """One rank's end of a lane.

    Args:
        first: The number of the first operation that runs on the lane.
        size: The number of ranks in the group. Only those of this host are on the board.
        crowded: Whether this host has more ranks than cores. All its ranks must agree on it.
    """

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
        self.board = board  # the words of all ranks
        self.first = first
        self.moved = moved  # counts bytes that were shown to others, or read from them
        self.others: Sequence[int] = tuple(board.words)  # the other ranks of this host
        self.is_broken = False  # whether a rank is lost, see `break_off`
        self.crowded = crowded
        # The most bytes that operations put into the areas that are used in turn: see `board`.
        self.by_turns = CROWDED_SMALL if crowded else SMALL
        # Whether they begin in another place each time: see `board.in_round`. If ranks share cores,
        # they share caches, too.
        self.goes_round = not crowded
        self.polls = polls  # whether a wait begins with polling of memory
        self._kick = kick  # wakes a rank that sleeps
        self.turns = Turns(loop, self._resumed)  # the order of operations
        here = len(self.others) + 1
        self._spans = size > here  # whether the group spans hosts
        self._dozes = board.can_doze  # whether this rank may sleep within a call
        # Waits look for a while, then sleep.
        self.waiting = LaneWaiting(
            board,
            progress,
            self.turns.resume_soon,
            polls=polls,
            # Waits for other hosts are long anyway, so a yield of the core costs little there.
            crowded=crowded or self._spans,
        )
        self.areas = Areas(board, size)  # staging memory
        self._entered = self._agreed = False
        self._seq = self._phase = -1
        self._digest = self._base = self._publishes = self._known = 0

    # -- the order of operations ------------------------------------------------------------------

    @property
    def seq(self) -> int:
        """The number of the operation that entered last."""
        return self._seq

    @property
    def idle(self) -> bool:
        """Whether an operation could run at once."""
        return self.turns.current is None and not self.turns.queue

    def leave(self, rider: Rider, *, failed: bool) -> None:
        """End the turn of `rider`, or take it out of the queue.

        If it failed, no other rank completes with data that this rank writes from now on.
        """
        if rider is self.turns.current and self._entered:
            if failed:
                self.board.abort(rider.seq)
            self.waiting.woken()
            self.finish_turn()
            return
        # Its turn has not come. The others must hear that it is passed over, unless a rank is lost,
        # because then no rank waits for it.
        skipped = None if self.is_broken else SkippedCall(self.pass_over, rider.seq)
        self.turns.replace(rider, skipped)

    def finish_turn(self) -> None:
        """End the current operation, and begin the next."""
        self._entered = self._agreed = False
        self._phase = -1
        self.turns.next()

    def _resumed(self) -> None:
        """Note that the loop resumes the current operation."""
        self.waiting.is_fresh = True

    def kicked(self) -> None:
        """Go on, because another rank has come as far as this one waited for."""
        if self.waiting.woken():
            self.turns.resume()

    def hurry(self) -> None:
        """Go on as far as possible without a wait, because another rank is gone."""
        self.waiting.hurries = True
        try:
            while self.turns.resume():
                pass
        finally:
            self.waiting.hurries = False

    def break_off(self) -> None:
        """Drop all that is queued: a rank is lost, so no later operation can be done."""
        self.is_broken = True
        self.turns.clear()

    def close(self) -> None:
        """Release all memory, because the group has ended."""
        self.turns.clear()
        self.turns.current = None
        self.waiting.close()
        self.areas.close()

    # -- what the current operation does ----------------------------------------------------------

    def enter(self, rider: Rider) -> bool:
        """Tell the others that `rider` was called here. If False, wait for the next `resume`."""
        if self._entered:
            return True
        if self.waiting.gives_way():
            return False
        if not self.waiting.wait(self.others, self._before(rider.seq)):
            return False
        seq, call = rider.seq, rider.call
        self._enter(seq, stamp_of(seq), digest_of(call), call, rider.place)
        self._write(self._base)
        return True

    def _before(self, seq: int) -> int:
        """Return the stamp that the others must reach before operation `seq` may be entered.

        No rank then needs the words of operation `seq` - 2 any more, which have the same parity.
        """
        return stamp_of(seq - 1) if seq > self.first else 0

    def pass_over(self, seq: int) -> bool:
        """Tell the others that `seq` was given up before its turn. If False, call this again."""
        if not self.waiting.wait(self.others, self._before(seq)):
            return False
        self.board.abort(seq)
        self._write(stamp_of(seq))
        self.finish_turn()
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
        """Enter operation `seq` if this takes no more than a moment. False: nothing was done.

        Afterwards call `finish_inline`, `finish_turn`, or `turns.add` of an operation that goes on.

        Args:
            seq: The number of the operation.
            area: The area that it will write to.
            digest: The digest of the call.
            call: The call in words.
            place: The location of its array, see `Board.announce`.
            rider: The operation if it has its turn, None if it is called now.
        """
        turns = self.turns
        if turns.current is not rider or self.is_broken or seq < self.first:
            return False
        if turns.queue and rider is None:
            return False
        base = (seq + 1) * AN_OPERATION
        before = base - AN_OPERATION if seq > self.first else 0  # the same as `_before`
        free = self.areas.free[area % len(AREAS)]
        known = self._known
        if known < before or known < free:
            needed = max(before, free)
            # The others may still read the data of the operation before. They are nearly done, so
            # a wait here is shorter than a wait in the loop.
            there = self.board.reached(self.others, needed)
            if not (there or self.waiting.poll(self.others, needed)):
                return False
        self._enter(seq, base, digest, call, place)
        self._phase = 0
        if place:
            # The arrays of all ranks decide the plan, so the others must hear of this entry now.
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
        """Write the stamp of the entry that `try_enter` has left out.

        The lane is then as after `enter`, and no phase has begun. Plans need this if a rank may
        wait before it publishes.
        """
        self._write(self._base)
        self._phase = -1

    def finish_inline(self) -> None:
        """End an operation that `try_enter` has entered, and that is done within its call."""
        self._entered = self._agreed = False
        self._phase = -1

    def entered(self, seq: int) -> list[int]:
        """Return the other ranks that have entered operation `seq`."""
        return [peer for peer in self.others if self.board.words[peer][STAMP] >= stamp_of(seq)]

    def next_phase(self) -> int:
        """Begin the next phase and return its number. This rank no longer reads data of the last.

        Raises RuntimeError if the plan has too many phases.
        """
        self._phase += 1
        self._publishes = 0
        if self._phase >= MAX_PHASES:
            raise RuntimeError(f"the plan has more than {MAX_PHASES} phases: make one with fewer")
        if self._phase:
            self._base = stamp_of(self._seq, self._phase)
            self._write(self._base)
        return self._phase

    def begin(self, area: int) -> bool:
        """Wait until this rank may write its `area`. If False, call this again after a wait."""
        if self._spans:
            # Large data comes from other hosts in pieces, and only the loop can receive them.
            self.board.can_doze = self._dozes and area != len(AREAS) - 1
        return self.waiting.wait(self.others, self.areas.free[area % len(AREAS)])

    def places(self) -> dict[int, int] | None:
        """Return the locations of the others' arrays, see `Board.places`."""
        return self.board.places(self._seq)

    def publish(self) -> None:
        """Allow the others to read what was written to the area so far."""
        self._publishes += 1
        for peer in self.board.reach(self._base + self._publishes):
            self._kick(peer)

    def wait_for(self, peers: Sequence[int], publishes: int) -> bool:
        """Wait until `peers` have published so often in this phase. If False, call this again after
        a wait.

        Raises DifferentCallsError.
        """
        if (publishes > 1 or not peers) and self.waiting.gives_way():
            # Give way even if the next piece is there, because a large array has many pieces.
            return False
        there = self.waiting.wait(peers, self._base + publishes)
        if not self._agreed:
            calls = self._compare()
            if calls:
                raise DifferentCallsError(calls)
        return there

    def watch(self, peers: Sequence[int], publishes: int) -> bool:
        """Do the same for a moment only. Also returns False if `wait_for` would raise."""
        if publishes > 1 and self.waiting.is_due():
            return False
        stamp = self._base + publishes
        board = self.board
        waiting = self.waiting
        if not (board.reached(peers, stamp) or waiting.poll(peers, stamp)):
            return False
        if len(peers) == len(self.others):
            self._known = stamp
            if not self._agreed:
                self._agreed = board.agree(self._seq, self._digest)
                return self._agreed
        return True

    def _compare(self) -> dict[int, bytes]:
        """Return the calls of the ranks that have entered, and have called something else."""
        # First, because a rank may enter meanwhile.
        all_entered = self.board.reached(self.others, (self._seq + 1) * AN_OPERATION)
        calls = self.board.different(self._seq, self._digest)
        self._agreed = all_entered and not calls
        return calls

    def has_published(self, peer: int, publishes: int) -> bool:
        """Whether `peer` has published so often in this phase."""
        return self.board.reached((peer,), self._base + publishes)

    def is_void(self) -> bool:
        """Whether another rank has given the current operation up. The data that was read of it may
        then be anything."""
        return self.board.is_void(self._seq)

    def end(self, area: int) -> bool:
        """End the phase. False: another rank gave the operation up while this rank read from it.

        The reason then comes over the link.
        """
        if (not self._agreed and self._compare()) or self.board.is_void(self._seq):
            return False
        over = self._base + A_PHASE
        self.areas.free[area % len(AREAS)] = over
        if self.is_shared_by_all(area):
            # Every operation uses this area. Let the others go on before our next call.
            self._write(over)
        return True

    def _write(self, stamp: int) -> None:
        for peer in self.board.reach(stamp):
            self._kick(peer)

    # -- for the compiled part --------------------------------------------------------------------

    def rouse(self, stamp: int) -> None:
        """Wake the ranks that sleep until this rank reaches `stamp`, which it has."""
        for peer in self.board.rouse(stamp):
            self._kick(peer)

    @staticmethod
    def is_shared_by_all(area: int) -> bool:
        """Whether all operations use `area`, so that the others wait for the end of each phase."""
        return area == len(AREAS) - 1
