"""Polling: look for data that is about to come, instead of waiting for a wake-up.

A wake-up by the event loop costs tens of microseconds. A peer that works on the same operation
often answers sooner. So a rank first looks again and again, at a stamp in shared memory or at a
link. The loop `Progress._spin` does this. How long it lasts depends on who else needs the core:

- **As long as it pays.** A poll lasts at most `LONGEST`, and half of that after each one in vain,
  down to `SHORTEST`. Every `AGAIN` polls one is long again. Without that, ranks that poll too
  briefly would always miss each other, because each has to be woken and is late for the next one.
- **The core of a missing rank.** Ranks that share memory say on which core they last waited. If a
  missing rank was last seen on this core, it may need it. So we offer the core (`sched_yield`)
  before every look. If all missing ranks were seen elsewhere, looks alone are faster: for `ALONE`
  with a core for each rank, and for `APART` on crowded hosts. A yield that let another program work
  is the last one, because each further yield costs two switches.
- **A core for each rank.** If more ranks share a core than need to, one of them moves (`part`).
- **Neighbours.** A yield that took longer than `OTHERS` let another program work. It does not count
  as waiting. One that took longer than `HOGGED` was a whole time slice of a program that computes,
  and more will follow. The scheduler prefers a thread that has slept to one that yields. So for
  `A_WHILE` this process does not yield: a wait for a stamp dozes at once, and a wait for a link
  sleeps soon. On crowded hosts a wait for a stamp yields once all the same, because most neighbours
  are ranks there. The thread also asks for short time slices from then on (`slices`). Otherwise it
  would wait for the end of another one's slice when it wakes, and a yield would give a whole slice
  away.
- **Dozing.** After polling for a stamp or a post in vain, a rank sleeps within the call
  (`Stamps.doze`), if the system can wake it for a word in memory. That takes a few microseconds,
  and a frame through two event loops takes a hundred. A doze lasts `DOZE` times as long as a poll,
  because it takes no processor time. It gets shorter after dozes in vain, because it holds up the
  loop. On crowded hosts it lasts until the loop has waited for long enough (`HELD`). The
  awaited ranks need this core first there, and a wait by the loop would give them more to do.
- **The loop's own turn.** Operations that complete within their calls never let the loop run. If it
  had no turn for `LOOP_DUE`, it is due. Results other than those of receives then come with the
  next turn, and a rank does not poll for links. For stamps and posts there is still one poll, and
  on crowded hosts a doze (`HELD`). Without it this call and all later ones would have to wait. In a
  program that makes one call after the other the loop would not have its turn sooner. A receive
  also goes on for `HELD`: most programs send next, and then the loop has its turn while that
  message is on its way. Other calls that are done when they return, such as those of a group of one
  rank, give the loop its turn when they are awaited (`Work.after_turn`).

A caller that must not hold up the loop looks once in each turn (`linger`). A link in shared memory
does so after it has moved something.
"""

from __future__ import annotations

import asyncio
import ctypes
import math
import os
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from aiodist import compiled
from aiodist.transports import slices
from aiodist.transports.surroundings import is_virtual

if TYPE_CHECKING:
    from aiodist.transports.base import Link
    from aiodist.transports.framed import FramedLink


class Stamps(Protocol):
    """Memory in which the ranks of a host show their progress. For posts, `peers` are the
    readers."""

    def met(self, peers: Sequence[Any], stamp: int, /) -> bool | None:
        """Return True once all of `peers` have reached `stamp`, and None before."""
        ...

    def apart(self, peers: Sequence[Any], stamp: int, /) -> bool:
        """Tell whether all of `peers` that have not were last seen on other cores."""
        ...

    def where(self) -> list[tuple[int, int]]:
        """Return this rank and those of other threads, with 1 + the core where each was seen
        last."""
        ...

    @property
    def can_doze(self) -> bool:
        """Whether the system can wake a rank that dozes."""
        ...

    def doze(self, peers: Sequence[Any], stamp: int, seconds: float, /) -> bool:
        """Sleep at most `seconds` until they have reached it, or may have. Returns whether they
        have."""
        ...


class Finishing(Protocol):
    """An operation that is done within its call."""

    _on_cancel: Callable[[Any], None] | None
    """Called first if the program cancels it."""

    def finish_within_call(self, result: Any, ended: float, /) -> None:
        """Complete it. It was done at `ended`, by the clock of its loop."""
        ...


LOOP_DUE = 0.0007
"""Seconds after which the loop is due before anything else is polled for."""
HELD = 1e-3
"""Seconds for which a loop that is due for a turn waits for frames, stamps and posts.

With more ranks than cores, they come after all other ranks have had the core. Leaving the call
before that costs about a tenth of its whole time, for nothing.
"""
UNREAD = 0.0007
"""Seconds after which links may hold something unread. A rank that was busy for longer reads all of
them before the next call."""
LONGEST = 100e-6
"""The most seconds that one poll waits while nothing comes."""
SHORTEST = 5e-6
AGAIN = 8
"""Every so many polls in vain, one has full length. What the others miss may come just after them,
because a rank that does not poll is late itself."""
OTHERS = 10e-6
"""Seconds. A longer yield let another program work, and does not count as waiting."""
ALONE = 10e-6
"""Seconds of polling after which a rank with a core of its own would have had its result."""
APART = 30e-6
"""Seconds of polling on a crowded host for ranks that do not need this core. A rank takes about as
long from one operation to the next if others have used its core meanwhile."""
HOGGED = 2e-3
"""Seconds. A longer yield was a whole time slice of another program: stop polling."""
A_WHILE = 1.0
"""Seconds for which that program counts as computing on this core. A yield to check that may take
ten milliseconds."""
PART = 5e-3
"""Seconds after which ranks that share a core are parted again."""
DOZE = 5
"""How many times as long as a poll a doze lasts."""

SPINS = 8
"""Looks at shared memory between two looks at the clock."""

_PATIENCE: Sequence[float] = [max(SHORTEST, LONGEST / 2**k) for k in range(AGAIN)]
"""How long to poll, by the number of polls in vain before."""
_LATER: Sequence[float] = [LONGEST] + [SHORTEST] * (AGAIN - 1)
"""How long to poll after those, by the number of polls in vain modulo AGAIN."""


def _no_yield() -> None:
    """Do nothing, because the system has no `sched_yield`."""


_yield: Callable[[], None] = getattr(os, "sched_yield", _no_yield)
_clock = time.perf_counter


def _unknown() -> int:
    """Return -1, because the system does not say on which core a thread is."""
    return -1


core: Callable[[], int] = _unknown
"""Returns the number of this thread's core; -1 if the system does not say."""
if sys.platform == "linux":
    core = getattr(ctypes.PyDLL(None), "sched_getcpu", _unknown)


def cores() -> int:
    """Return how many processors this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Neighbours:
    """Notes whether other programs compute on the cores of this process. Shared by all of its
    loops."""

    __slots__ = ("_asked", "seen")

    def __init__(self) -> None:
        self.seen = 0.0  # when one was seen last; 0: never
        self._asked = threading.local()  # knows the threads that have asked for short slices

    def yielded(self, since: float, now: float) -> None:
        """Note that the core was offered to others from `since` to `now`."""
        if now - since > HOGGED:
            self.seen = now
            if not hasattr(self._asked, "done"):
                self._asked.done = slices.shorten()

    def compute(self, now: float) -> bool:
        """Tell whether one was seen a short while ago."""
        return self.seen > 0 and 0 <= now - self.seen < A_WHILE


neighbours = Neighbours()


def others_compute() -> bool:
    """Tell whether programs were seen that compute on the cores of this process."""
    return neighbours.compute(_clock())


def linger(until: float) -> bool:
    """Tell whether to look again in the next turn of the loop, instead of sleeping.

    That is so before `until`, by `time.perf_counter`, if no other program computes here. The core
    was then offered to the awaited peer.
    """
    now = _clock()
    if now >= until or neighbours.compute(now):
        return False
    _yield()
    return True


class Pace:
    """How long the calls of one endpoint poll. The compiled part has the same, and waits by it."""

    __slots__ = ("_dozed_in_vain", "_due", "_in_vain", "_parts_at", "polls")

    polls: bool
    """False in virtual time, because nothing comes while a rank looks."""
    _in_vain: int
    """Polls in a row that have ended in vain."""
    _dozed_in_vain: int
    """The same of dozes."""
    _due: float
    """When the loop is due for a turn; inf: no call was made since the last one."""
    _parts_at: float
    """When to ask again whether ranks should be parted: see `Progress.part`."""


if TYPE_CHECKING:
    CorePace: TypeAlias = Pace
else:
    CorePace = Pace if compiled.core is None else compiled.core.Pace


class Progress(CorePace):
    """Polls within the calls of one endpoint. What pays for one of its groups pays for all."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.polls = not is_virtual(loop)
        self._in_vain = self._dozed_in_vain = 0
        self._due = math.inf
        self._parts_at = 0.0
        self._read = -math.inf  # when all links were read for a call
        # Done operations that complete with the next turn: see `finish`.
        self._late: deque[tuple[Finishing, Any, float]] = deque()

    def _turned(self) -> None:
        self._due = math.inf

    def is_due(self, held: float = 0.0) -> bool:
        """Tell whether the loop has been due for a turn for `held` seconds. Time counts from the
        first call after the last turn."""
        if not self.polls:
            return False
        if self._due == math.inf:
            self._begin_to_wait()
            return False
        return _clock() >= self._due + held

    def is_unread(self) -> bool:
        """Tell whether the caller should read all links now.

        A rank that has something to say may not be one that a call needs. We do not know when the
        loop has read the links, because noting each of its turns would cost more than reading them
        once too often.
        """
        if not self.polls:
            return False
        now = _clock()
        if now - self._read < UNREAD:
            return False
        self._read = now
        return True

    def _begin_to_wait(self) -> None:
        """Make the loop due for a turn after a while, because of the first call since the last
        one."""
        self._loop.call_soon(self._turned)
        self._due = _clock() + LOOP_DUE

    def finish(self, work: Finishing, result: Any, ended: float) -> bool:
        """Complete `work`, which is done within its call, now or after the loop's next turn.

        Later if the loop is due, so that it has its turn before the caller goes on. Returns whether
        that is so.
        """
        if not self.is_due():
            work.finish_within_call(result, ended)
            return False
        # One handle of the loop for a row of calls, because one for each would take twice as long.
        if not self._late:
            self._loop.call_soon(self._finish_late)
        self._late.append((work, result, ended))
        # The operation cannot be withdrawn, because others have its data by now.
        work._on_cancel = self._finish_late
        return True

    def _finish_late(self, _: object = None) -> None:
        late = self._late
        try:
            while late:
                work, result, ended = late.popleft()
                work._on_cancel = None
                work.finish_within_call(result, ended)
        finally:
            if late:  # a trace hook has raised, and the others must go on
                self._loop.call_soon(self._finish_late)

    def _patience(self, tried: int) -> float:
        """Return how many seconds to poll after so many polls in vain.

        What has paid may pay again: ranks that are awake meet each other, and waking one that
        sleeps takes the others longer than a short poll.
        """
        return _PATIENCE[tried] if tried < AGAIN else _LATER[tried % AGAIN]

    def _spin(
        self,
        look: Callable[[Any, Any], bool | None],
        a: Any,
        b: Any,
        spins: int,
        *,
        crowded: bool,
        alone: float = 0.0,
        hogged: float = HOGGED,
        due: float | None = None,
    ) -> bool | None:
        """Call ``look(a, b)`` until it is not None, and return that; None once the budget is used
        up.

        The clock is read after `spins` looks. `crowded`: there are more ranks than cores, or the
        caller gains nothing by speed. `alone`: seconds before the first yield then. `hogged`:
        seconds of a yield after which there is one more look, and no yield. `due`: when the loop is
        due for a turn, if not as usual.
        """
        if not self.polls:
            return None
        # Three times bound a poll. `limit` is for this rank, because sleeping is cheaper after
        # that. `alone` is for ranks that need this core, which is offered to them after that. `due`
        # is for the other tasks of this loop. They are compared after some looks, because reading
        # the clock takes longer than a look.
        looks = range(spins)
        if due is None:
            due = self._due
        now = _clock()
        limit = now + self._patience(self._in_vain)
        alone += now if crowded else now + ALONE
        if not crowded and neighbours.seen and neighbours.compute(now):
            alone, limit = math.inf, now + SHORTEST
        while now < due:
            if now >= alone:
                _yield()
            for _ in looks:
                found = look(a, b)
                if found is not None:
                    self._in_vain = 0
                    if now >= alone:
                        neighbours.yielded(now, _clock())
                    return found
            before, now = now, _clock()
            away = now - before
            if away > OTHERS:
                limit += away
            neighbours.yielded(before, now)
            if now > limit or away > hogged:
                self._in_vain += 1
                break
        return None

    def watch(self, board: Stamps, peers: Sequence[Any], stamp: int, *, crowded: bool) -> bool:
        """Poll until all of `peers` have reached `stamp`. Returns False once the budget is used
        up."""
        if self.is_due() and not crowded:
            due = _clock() + HELD
            return self._spin(board.met, peers, stamp, SPINS, crowded=False, due=due) is True
        until = self._due + HELD if crowded else self._due
        near = not board.apart(peers, stamp)  # one that is missing may need this core
        if near and self.polls and _clock() >= self._parts_at:
            self.part(board.where())
        dozes = board.can_doze and self.polls
        if crowded or near:
            hogged = OTHERS if board.can_doze else HOGGED
            found = self._spin(
                board.met, peers, stamp, 1,
                crowded=True, alone=0.0 if near else APART, hogged=hogged, due=until,
            )  # fmt: skip
        elif dozes and neighbours.seen and neighbours.compute(_clock()):
            found = None
        else:
            found = self._spin(board.met, peers, stamp, SPINS, crowded=False)
        return found is True or (dozes and self._doze(board, peers, stamp, until, crowded=crowded))

    def part(self, where: Sequence[tuple[int, int]]) -> None:
        """Move this thread to another core if too many ranks share this one.

        `where`: see `Stamps.where`. Of the ranks that share a core, the last one moves, to the core
        with the fewest ranks. The thread keeps the set of cores on which it may run.
        """
        # Linux tends to put a thread on the core of the one that has woken it. It leaves both
        # there, although another core is idle, because each runs for too short a time. Two ranks on
        # one core take three to six times as long.
        now = _clock()
        self._parts_at = now + PART
        (rank, here), *_ = where
        if not here or rank < max(r for r, core in where if core == here):
            return
        if neighbours.compute(now) or not hasattr(os, "sched_setaffinity"):
            return
        try:
            allowed = os.sched_getaffinity(0)
            ranks = Counter(core for _, core in where)
            best = min(allowed, key=lambda core: ranks[1 + core])
            if ranks[1 + best] + 2 <= ranks[here]:
                os.sched_setaffinity(0, {best})
                os.sched_setaffinity(0, allowed)
        except OSError:  # not allowed here
            self._parts_at = math.inf

    def _doze(
        self, board: Stamps, peers: Sequence[Any], stamp: int, due: float, *, crowded: bool
    ) -> bool:
        """Sleep within the call until all of `peers` have reached `stamp`. Returns False after the
        budget, or when the loop is `due` for a turn."""
        now = _clock()
        until = due if crowded else min(now + DOZE * self._patience(self._dozed_in_vain), due)
        while now < until:
            if board.doze(peers, stamp, until - now):
                self._dozed_in_vain = 0
                return True
            now = _clock()
        self._dozed_in_vain += 1
        return False

    def _doze_at(
        self,
        link: FramedLink,
        look: Callable[[Any, Any], bool | None],
        a: Any,
        b: Any,
        due: float,
    ) -> bool | None:
        """Sleep within the call at a link until ``look(a, b)`` is not None, and return that. None
        after the budget, and not later than `due`."""
        if not self.polls:
            return None
        now = _clock()
        until = min(now + DOZE * self._patience(self._dozed_in_vain), due)
        while now < until:
            if not link.doze(until - now):
                return None
            found = look(a, b)
            if found is not None:
                self._dozed_in_vain = 0
                return found
            now = _clock()
        self._dozed_in_vain += 1
        return None

    def look(
        self,
        link: FramedLink,
        look: Callable[[Any, Any], bool | None],
        a: Any,
        b: Any,
        *,
        crowded: bool,
    ) -> bool | None:
        """Call ``look(a, b)``, which looks for something on `link`, until that has come: True.

        False if something else comes first, and None once the budget is used up.
        """
        found = look(a, b)
        if found is None and self.polls:
            if self._due == math.inf:
                self._begin_to_wait()
            found = self._spin(look, a, b, 1, crowded=crowded, due=self._due + HELD)
        if found is None and not crowded:
            found = self._doze_at(link, look, a, b, self._due + HELD)
        return found

    def inline(
        self,
        is_done: Callable[[], bool],
        link_of: Callable[[], Link | None],
        only: FramedLink | None = None,
    ) -> None:
        """Poll the awaited link `link_of()` until `is_done()`, or until the budget is used up.

        `link_of()` returns None if there is nothing to poll. What comes meanwhile renews the
        budget. `only`: it is always this link, and this rank has a core of its own.
        """
        while not self.is_due() and (link := link_of()) is not None:
            # The peer of an in-process link runs in this loop, and needs a turn of it.
            if not link.poll() and (
                link.kind == "inproc"
                or not (
                    self._spin(_come, link_of, None, 1, crowded=only is None)
                    or (only is not None and self._doze_at(only, _come, link_of, None, self._due))
                )
            ):
                return
            if is_done():
                self._in_vain = 0
                return


def _come(link_of: Callable[[], Link | None], _: None) -> bool | None:
    """Tell whether something has come on the awaited link."""
    link = link_of()
    return True if link is None or link.poll() else None
