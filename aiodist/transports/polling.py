"""Looking for what is about to come, instead of waiting to be woken for it.

A wake-up by the event loop costs tens of microseconds. A peer that works on the same operation has
its answer ready sooner than that, so whoever needs it first looks again and again: at a stamp in
shared memory, at a link for a frame. There is one loop that does so, `Progress._spin`. For how long
it goes on is a matter of who else needs the core:

- **As long as it pays.** A poll lasts `LONGEST` at most, half of that after each one in vain, down
  to `SHORTEST`. Every `AGAIN` polls one is long again: ranks that poll too briefly miss each other
  for good, since each of them has to be woken by then, which makes it late for the next one.
- **The core of a missing rank.** Ranks that share memory say on which core they last waited. If one
  that is missing was last seen on this core, it may need it: the core is offered (`sched_yield`)
  before every look. If all that are missing were seen elsewhere, looks alone are faster: for
  `ALONE` with a core for each rank, for `APART` on crowded hosts. There a rank that is offered the
  core too early would find nothing to do, sleep, and have to be woken. A yield that let another
  program work is the last one, because each further one takes a switch there and back for nothing.
- **Neighbours.** A yield that took longer than `OTHERS` let somebody work: that was no waiting, and
  does not count. One that took longer than `HOGGED` was a whole time slice of a program that only
  computes, and there will be more of them: the scheduler holds a yield against whoever yields, but
  prefers who has slept to who has computed. So for `A_WHILE` nobody here yields: who waits for a
  stamp dozes at once, who waits for a link sleeps soon. Where there are more ranks than cores it is
  they who take the core, to copy, say.
- **Dozing.** Who has polled for a stamp, or a post, in vain sleeps within the call (`Stamps.doze`),
  where the system can wake it for a word in memory: that takes a few microseconds, and a frame by
  way of two event loops a hundred. It lasts for `DOZE` times as long as a poll, for it takes no
  processor time; and gets shorter like that where it is in vain, as it holds up the loop.
- **The loop's own turn.** Operations that complete within their calls never let the loop run. Once
  it had no turn for `LOOP_DUE`, or for `LOOP_DUE_FRAMES` where frames are looked for, it is due:
  who then has what it asked for gets it with the next turn, and nobody dozes, or polls for links.
  For stamps and posts of ranks with cores of their own there is one poll all the same. The loop has
  its turn no sooner without it, where a program makes one call after the other; but the call would
  have to wait, and all those behind it.

Who may not hold the loop up looks from one turn of it to the next (`linger`): so does a link in
shared memory that has just moved something.
"""

from __future__ import annotations

import asyncio
import ctypes
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from aiodist.transports.surroundings import is_virtual

if TYPE_CHECKING:
    from aiodist.transports.base import Link
    from aiodist.transports.framed import FramedLink


class Stamps(Protocol):
    """Where the ranks of a host show how far they are. Of posts, `peers` are their readers."""

    def met(self, peers: Sequence[Any], stamp: int, /) -> bool | None:
        """True once all of `peers` have reached `stamp`; None as long as one of them has not."""
        ...

    def apart(self, peers: Sequence[Any], stamp: int, /) -> bool:
        """Whether all of `peers` that have not were last seen on other cores than this one."""
        ...

    @property
    def can_doze(self) -> bool:
        """Whether the system can wake who dozes."""
        ...

    def doze(self, peers: Sequence[Any], stamp: int, seconds: float, /) -> bool:
        """Sleep, for so long at most, until they have reached it, or may have: whether they
        have."""
        ...


class Finishing(Protocol):
    """An operation that is done within its call."""

    def finish_within_call(self, result: Any, ended: float, /) -> None:
        """It was done at `ended`, by the clock of its loop: who awaits it goes on."""
        ...


LOOP_DUE = 0.0007
"""Seconds after which the loop is due before anything else is polled for."""
LOOP_DUE_FRAMES = 2e-3
"""The same of a call that looks for frames, one after the other, and nothing else was done in that
turn of the loop: with more ranks than cores these come once all others have had the core. To leave
the call before that takes as long as some tenth of all of it, for nothing."""
UNREAD = 0.0007
"""Seconds after which links may hold something that nobody has looked for: whoever was busy for
longer reads all of them before the next call."""
LONGEST = 100e-6
"""Most seconds that one poll waits while nothing comes."""
SHORTEST = 5e-6
AGAIN = 8
"""Every so many polls in vain, one is as long as can be: what the others are too short for may come
sooner than it seems, since whoever does not poll is late himself."""
OTHERS = 10e-6
"""A yield of the core that took longer let somebody else work: it was no waiting."""
ALONE = 10e-6
"""Seconds of polling after which a rank with a core of its own would have got what it waits for."""
APART = 30e-6
"""Seconds of polling on a crowded host for ranks that do not need this core. A rank takes about as
long from one operation to the next, where others have used its core meanwhile."""
HOGGED = 2e-3
"""A yield that took longer than this was a whole time slice of somebody: stop polling."""
A_WHILE = 1.0
"""Seconds for which somebody is taken to compute on this core after that. A yield that finds out
whether it still does so may take ten milliseconds."""
DOZE = 5
"""How many times as long as a poll a doze lasts."""

SPINS = 8
"""Looks at shared memory between two looks at the clock."""

_PATIENCE: Sequence[float] = [max(SHORTEST, LONGEST / 2**k) for k in range(AGAIN)]
"""How long to poll, by the number of polls in vain before it."""
_LATER: Sequence[float] = [LONGEST] + [SHORTEST] * (AGAIN - 1)
"""How long to poll after those, by the number of polls in vain modulo AGAIN."""


def _no_yield() -> None:
    """Where the system has no `sched_yield`, poll without it."""


_yield: Callable[[], None] = getattr(os, "sched_yield", _no_yield)
_clock = time.perf_counter


def _unknown() -> int:
    """Where the system does not say on which core a thread is."""
    return -1


core: Callable[[], int] = _unknown
"""The number of the core that this thread is on; -1 where the system does not say."""
if sys.platform == "linux":
    core = getattr(ctypes.PyDLL(None), "sched_getcpu", _unknown)


def cores() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0))


class Neighbours:
    """Whether other programs compute on the cores of this process: that goes for all its loops."""

    __slots__ = ("seen",)

    def __init__(self) -> None:
        self.seen = 0.0  # when one was seen last; 0: never

    def yielded(self, since: float, now: float) -> None:
        """The core was offered to others at `since`; it is `now`."""
        if now - since > HOGGED:
            self.seen = now

    def compute(self, now: float) -> bool:
        """Whether one was seen a short while ago."""
        return self.seen > 0 and 0 <= now - self.seen < A_WHILE


_neighbours = Neighbours()


def others_compute() -> bool:
    """Whether programs were seen that compute on the cores of this process."""
    return _neighbours.compute(_clock())


def linger(until: float) -> bool:
    """Whether it is not `until` yet, by `time.perf_counter`, and worth while: then look again in
    the next turn of the loop, rather than sleep. The core has been offered to the peer that is
    waited for."""
    now = _clock()
    if now >= until or _neighbours.compute(now):
        return False
    _yield()
    return True


class Progress:
    """Polls within the calls of one endpoint: what pays for one of its groups does so for all."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._polls = not is_virtual(loop)
        self._in_vain = 0  # polls, one after the other
        self._dozed_in_vain = 0  # the same of dozes
        self._due = math.inf  # when the loop is due for a turn; inf: nothing since the last one
        self._read = -math.inf  # when all links were read for a call
        # What is done, and has its result with the next turn: see `finish`.
        self._late: deque[tuple[Finishing, Any, float]] = deque()

    def _turned(self) -> None:
        self._due = math.inf

    def is_due(self) -> bool:
        """Whether the loop is due for a turn. Time counts from the first call after the last."""
        if not self._polls:
            return False
        now = _clock()
        if now >= self._due:
            return True
        self._turns_by(now + LOOP_DUE)
        return False

    def is_unread(self) -> bool:
        """Whether the caller is to read all links now. That of who has to say something may be none
        of those that a call needs; and it is not known when the loop has read them, since to hear
        of each of its turns would cost more than to read them once too often."""
        if not self._polls:
            return False
        now = _clock()
        if now - self._read < UNREAD:
            return False
        self._read = now
        return True

    def _turns_by(self, due: float) -> None:
        """The loop is due for a turn then, if not before."""
        if self._due == math.inf:
            self._loop.call_soon(self._turned)
        self._due = min(self._due, due)

    def finish(self, work: Finishing, result: Any, ended: float) -> None:
        """`work` is done within its call: now, or where the loop is due for a turn, after that, so
        that the loop has it before the caller goes on. The others need not wait for it."""
        if not self.is_due():
            work.finish_within_call(result, ended)
            return
        # All of a row of calls by one handle of the loop: one for each would take twice as long.
        if not self._late:
            self._loop.call_soon(self._finish_late)
        self._late.append((work, result, ended))

    def _finish_late(self) -> None:
        late = self._late
        try:
            while late:
                work, result, ended = late.popleft()
                work.finish_within_call(result, ended)
        finally:
            if late:  # a hook that traces has raised: that is no matter of the others
                self._loop.call_soon(self._finish_late)

    def _patience(self, tried: int) -> float:
        """How long to poll after so many polls in vain, in seconds. What has paid once may do so
        again: who is awake meets others that are, and whoever sleeps has to be woken, which takes
        the others longer than a short poll."""
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
        """``look(a, b)`` again and again until it is not None, and return that; None once the
        budget is used up. The clock is looked at after `spins` looks. `crowded`: there are more
        ranks than cores, or who waits has nothing to gain by being fast; `alone`: seconds before
        the first yield there. `hogged`: seconds of a yield after which there is one look more, and
        no yield. `due`: when the loop is due for a turn, if that is to be another time."""
        if not self._polls:
            return None
        # Three times bound a poll, and each is somebody's interest: `limit` is this rank's own, as
        # sleeping is cheaper from then on; `alone` is that of the ranks that need this core, to
        # whom it is offered after that; and `_due` is that of the other tasks of this loop. They
        # are compared after some looks, and not after each one: to read the clock takes longer.
        looks = range(spins)
        if due is None:
            due = self._due
        now = _clock()
        limit = now + self._patience(self._in_vain)
        alone += now if crowded else now + ALONE
        if not crowded and _neighbours.seen and _neighbours.compute(now):
            alone, limit = math.inf, now + SHORTEST
        while now < due:
            if now >= alone:
                _yield()
            for _ in looks:
                found = look(a, b)
                if found is not None:
                    self._in_vain = 0
                    if now >= alone and not crowded:
                        _neighbours.yielded(now, _clock())
                    return found
            before, now = now, _clock()
            away = now - before
            if away > OTHERS:
                limit += away
            if not crowded:
                _neighbours.yielded(before, now)
            if now > limit or away > hogged:
                self._in_vain += 1
                break
        return None

    def watch(self, board: Stamps, peers: Sequence[Any], stamp: int, *, crowded: bool) -> bool:
        """Poll until all of `peers` have reached `stamp`: True; or the budget is used up: False."""
        if self.is_due():
            if crowded:
                return False
            return self._spin(board.met, peers, stamp, SPINS, crowded=False, due=math.inf) is True
        near = not board.apart(peers, stamp)  # one that is missing may need this core
        if crowded or near:
            hogged = OTHERS if board.can_doze else HOGGED
            alone = 0.0 if near else APART
            if self._spin(board.met, peers, stamp, 1, crowded=True, alone=alone, hogged=hogged):
                return True
            return board.can_doze and self._polls and self._doze(board, peers, stamp)
        dozes = _neighbours.seen and board.can_doze and _neighbours.compute(_clock())
        if not dozes and self._spin(board.met, peers, stamp, SPINS, crowded=False):
            return True
        return board.can_doze and self._polls and self._doze(board, peers, stamp)

    def _doze(self, board: Stamps, peers: Sequence[Any], stamp: int) -> bool:
        """Sleep within the call until all of `peers` have reached `stamp`: True; or the budget is
        used up: False."""
        now = _clock()
        until = min(now + DOZE * self._patience(self._dozed_in_vain), self._due)
        while now < until:
            if board.doze(peers, stamp, until - now):
                self._dozed_in_vain = 0
                return True
            now = _clock()
        self._dozed_in_vain += 1
        return False

    def _doze_at(
        self, link: FramedLink, look: Callable[[Any, Any], bool | None], a: Any, b: Any
    ) -> bool | None:
        """Sleep within the call at a link, until ``look(a, b)`` is not None: what it gave then."""
        if not self._polls:
            return None
        now = _clock()
        until = min(now + DOZE * self._patience(self._dozed_in_vain), self._due)
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
        """``look(a, b)``, which looks for something on `link`, until that has come: True; until
        something else comes: False; or the budget is used up: None."""
        found = look(a, b)
        if found is None and self._polls:
            if self._due == math.inf:
                self._turns_by(_clock() + LOOP_DUE_FRAMES)
            found = self._spin(look, a, b, 1, crowded=crowded)
        if found is None and not crowded:
            found = self._doze_at(link, look, a, b)
        return found

    def inline(
        self,
        is_done: Callable[[], bool],
        link_of: Callable[[], Link | None],
        only: FramedLink | None = None,
    ) -> None:
        """Poll `link_of()`, the link that is waited for (None: there is nothing to poll), until
        `is_done()` or the budget is used up. What comes in between renews the budget. `only`: it
        is always this one, and this rank has a core of its own."""
        while not self.is_due() and (link := link_of()) is not None:
            # The peer of an in-process link runs in this loop: it needs a turn.
            if not link.poll() and (
                link.kind == "inproc"
                or not (
                    self._spin(_come, link_of, None, 1, crowded=only is None)
                    or (only is not None and self._doze_at(only, _come, link_of, None))
                )
            ):
                return
            if is_done():
                self._in_vain = 0
                return


def _come(link_of: Callable[[], Link | None], _: None) -> bool | None:
    """Whether something has come on the link that is waited for."""
    link = link_of()
    return True if link is None or link.poll() else None
