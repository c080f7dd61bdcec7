"""The rounds of one part of an averager: which members contribute, and when a round ends.

A round goes through three states::

    open ──(quorum, and all present or `grace` over)──> moving ──(all remaining hold it)──> recorded
      ^                                                  │   │
      └────────(fewer than the quorum remain)────────────┘   └── a contributor is gone, or behind:
                                                                 another attempt without it

While a round moves, its contributors exchange slices: each reduces one slice, and sends its mean to
the others. They report what they have, so that this machine knows which pairs still wait. A round
is recorded when no pair waits. From then on it never changes.

Each round has a digest of its contributors and of the digest of the round before, its parent. So
the digest of a member's last result tells whether it has the same history as the others. It may
have another one if rounds were decided again while all that had their results were away.

The machine has no I/O, clock or randomness. Members are known by id; `order` says which came first.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median

from aiodist.membership.rulings import losers
from aiodist.wire.averaging import Reached

AUTO_FIRST = 1.0
"""Seconds of grace that "auto" gives before a round was recorded."""

AUTO_SHARE = 1 / 4
"""The share of the median length of the last rounds that "auto" gives as grace."""

AUTO_ROUNDS = 8
"""The number of rounds that this median is taken of."""

LEAST_CORE = 2
"""The fewest members that must be done with each other before another one counts as behind,
because a member alone has nothing to be compared with."""


@dataclass(frozen=True, slots=True)
class Contribution:
    """What a member would contribute: its `call` number, and its weight (0: it only receives).

    `after`: its last result; None: it had none.
    """

    call: int
    weight: float
    after: Reached | None = None


@dataclass(slots=True)
class Got:
    """Whose contributions a member has for the slices that it reduces, and whose means."""

    contributions: frozenset[str] = frozenset()
    means: frozenset[str] = frozenset()


@dataclass(slots=True)
class Moving:
    """A round that is decided. `offers`: those of the first decision, in the order of members.
    `parent`: the digest of the round before. `begun`: the attempt of that decision; `attempt`: that
    of the newest one. `remaining`: the members that are still in. `lacking`: those of them that
    have given their call up, and nothing of it is left. `late_since`: when the core was done and
    others were not."""

    round: int
    parent: bytes
    begun: int
    attempt: int
    offers: dict[str, Contribution]
    remaining: list[str]
    lacking: set[str] = field(default_factory=set)
    got: dict[str, Got] = field(default_factory=dict)
    late_since: float | None = None

    def decided(self, left_out: Mapping[str, str]) -> Decided:
        remaining = tuple(self.remaining)
        return Decided(
            self.round, self.parent, self.begun, self.attempt, self.offers, remaining, left_out
        )

    @property
    def sources(self) -> list[str]:
        """The remaining members whose contributions count."""
        return [one for one in self.remaining if self.offers[one].weight > 0]

    def missing(self) -> list[tuple[str, str]]:
        """The pairs (member, source) in which the member waits for data of the source."""
        sources = self.sources
        full = frozenset(sources)
        reduced = {
            one for one in sources if full <= (self._of(one).contributions | frozenset([one]))
        }
        pairs = []
        for one in self.remaining:
            got = self._of(one)
            for source in sources:
                if source == one:
                    continue
                waits = one in full and source not in got.contributions
                if waits or (source in reduced and source not in got.means):
                    pairs.append((one, source))
        return pairs

    @property
    def is_held(self) -> bool:
        """Whether every remaining member has reported the whole result."""
        full = frozenset(self.sources)
        return all(
            one in self.got and full <= self.got[one].means | frozenset([one])
            for one in self.remaining
        )

    def _of(self, member: str) -> Got:
        return self.got.get(member, _NOTHING)


_NOTHING = Got()


@dataclass(frozen=True, slots=True)
class Recorded:
    """A round that is over: the digest of the one before and its own, the members that contributed,
    in order, with their weights, and the members that hold its result."""

    round: int
    parent: bytes
    digest: bytes
    contributors: tuple[tuple[str, float], ...]
    holders: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Decided:
    """A round was decided, or decided anew.

    Tell all of its `remaining` members, and those that were `left_out` now, with these reasons. For
    the other fields, see `Moving`.
    """

    round: int
    parent: bytes
    begun: int
    attempt: int
    offers: Mapping[str, Contribution]
    remaining: tuple[str, ...]
    left_out: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Reopened:
    """Too few members remain in a round, so it is open again. `members` had heard of it."""

    round: int
    members: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Owed:
    """`member` has called for a round that is recorded without its contribution."""

    member: str
    round: int


@dataclass(frozen=True, slots=True)
class Astray:
    """`member` has made its call `call`, but its last result is of another history."""

    member: str
    call: int


Outcome = Decided | Recorded | Reopened | Owed


class PartRounds:
    """The rounds of one part. Call `settle` after each method that changes something.

    `quorum`: the fewest members that must contribute. `grace`: seconds; None: "auto".
    """

    def __init__(self, quorum: int, grace: float | None) -> None:
        self.quorum = quorum
        self._grace = grace
        self.round = 0  # the last one that was recorded
        self.digests = {0: b""}  # of the last rounds, by number
        self.has_recorded = False  # here, and not in an earlier machine
        self.attempts = 0  # of all rounds; so each decision has a number of its own
        self.present: set[str] = set()  # the members whose absence holds up a round
        self.offers: dict[
            str, Contribution
        ] = {}  # for the open round, or the one after the moving one
        self.late: dict[str, Contribution] = {}  # by members that are not in the moving round
        self.moving: Moving | None = None
        self.patient_until: float | None = None
        """No round closes before that time, because members may come back that know of later
        rounds."""
        self._ready_at: float | None = None  # when the open round had its quorum
        self._lengths: deque[float] = deque(maxlen=AUTO_ROUNDS)
        self._began: float | None = None  # when the last round was recorded
        self._withdrawn = 0  # how many calls were withdrawn so far
        self._begins: dict[str, int] = {}  # by member: how many were when its last call came
        self._ends: dict[str, int] = {}  # by member: how many were when its last call was withdrawn

    @property
    def grace(self) -> float:
        """Seconds that a round waits for others once it has its quorum."""
        if self._grace is not None:
            return self._grace
        return AUTO_SHARE * median(self._lengths) if self._lengths else AUTO_FIRST

    @property
    def deadline(self) -> float | None:
        """When `settle` is wanted next; None: not before something changes."""
        moving = self.moving
        if moving is not None:
            return None if moving.late_since is None else moving.late_since + self.grace
        if self._ready_at is None:
            return None
        due = self._ready_at if self._all_are_here else self._ready_at + self.grace
        return due if self.patient_until is None else max(due, self.patient_until)

    @property
    def named(self) -> set[str]:
        """The members that the open round or the moving one names. Some may be gone."""
        moving = () if self.moving is None else self.moving.offers
        return {*self.offers, *self.late, *moving}

    @property
    def is_empty(self) -> bool:
        """Whether no member takes part, and there is no result that one could come back with."""
        return not self.present and self.round == 0 and self.moving is None

    # Changes.

    def enter(self, member: str) -> None:
        self.present.add(member)

    def is_astray(self, reached: Reached) -> bool:
        """Whether the last result of a member is of another history."""
        known = self.digests.get(reached.round, reached.digest)
        return reached.round > self.round or known != reached.digest

    def offer(self, member: str, offer: Contribution) -> Owed | Astray | None:
        """Note the call of a member, and return what it is owed at once."""
        moving = self.moving
        self._begins[member] = self._withdrawn
        if offer.after is not None and self.is_astray(offer.after):
            self._forget(member)
            return Astray(member, offer.call)
        if offer.after is not None and offer.after.round < self.round:
            self._forget(member)
            return Owed(member, offer.after.round + 1)
        if moving is None:
            self.offers[member] = offer
        elif offer.after is None:
            if member not in moving.remaining:
                self.offers[member] = offer
        elif member not in moving.remaining:
            self.late[member] = offer
        return None

    def withdraw(self, member: str, call: int) -> bool:
        """A member gives up a call. True: it is too late, since the call was decided on.

        A call that this machine does not know counts for nothing here. If it was in a round that is
        recorded, the member knows that, because it has reported that it holds the result.
        """
        for offers in (self.offers, self.late):
            if member in offers and offers[member].call <= call:
                del offers[member]
                self._withdrawn += 1
                self._ends[member] = self._withdrawn
        moving = self.moving
        return (
            moving is not None and member in moving.remaining and moving.offers[member].call == call
        )

    def missing(self, member: str) -> list[str]:
        """The other members whose calls the last call of `member` has waited for in vain.

        Other calls that were withdrawn meanwhile are not among them.
        """
        begin = self._begins.get(member, self._withdrawn)
        others = self.present - self.offers.keys() - {member}
        return sorted(one for one in others if self._ends.get(one, 0) <= begin)

    def report(self, member: str, round: int, attempt: int, got: Got) -> None:
        moving = self._moving_of(member, round, attempt)
        if moving is not None:
            moving.got[member] = got

    def lacks(self, member: str, round: int, attempt: int) -> None:
        """A member has nothing of the call that the moving round names.

        It gave the call up, and an earlier machine had decided on it by then. Or it was away, and
        said again first what it asks, and then what it tells, so that the offer came too late.
        """
        moving = self._moving_of(member, round, attempt)
        if moving is not None:
            moving.lacking.add(member)

    def _moving_of(self, member: str, round: int, attempt: int) -> Moving | None:
        """Return the moving round, if this is its attempt, and the member remains in it."""
        moving = self.moving
        if moving is None or (moving.round, moving.attempt) != (round, attempt):
            return None
        return moving if member in moving.remaining else None

    def gone(self, members: Iterable[str]) -> None:
        """Remove members that are lost or have left."""
        for member in members:
            self.present.discard(member)
            self._forget(member)
            self._begins.pop(member, None)
            self._ends.pop(member, None)

    def _forget(self, member: str) -> None:
        self.offers.pop(member, None)
        self.late.pop(member, None)

    # Decisions.

    def settle(self, now: float, alive: Iterable[str], order: Mapping[str, int]) -> list[Outcome]:
        """Decide what can be decided.

        `alive`: the members that are not gone. `order`: the place of each member, including those
        that are gone.
        """
        outcomes: list[Outcome] = []
        living = set(alive)
        while True:
            if self.moving is None:
                self._count(now)
                if not self._may_close(now):
                    return outcomes
                outcomes.append(self._close(order))
            elif not self._advance(self.moving, now, living, order, outcomes):
                return outcomes

    def _count(self, now: float) -> None:
        counted = sum(1 for offer in self.offers.values() if offer.weight > 0)
        if counted < self.quorum:
            self._ready_at = None
        elif self._ready_at is None:
            self._ready_at = now

    @property
    def _all_are_here(self) -> bool:
        return self.present <= self.offers.keys()

    def _may_close(self, now: float) -> bool:
        if self._ready_at is None:
            return False
        if self.patient_until is not None and now < self.patient_until:
            return False
        return self._all_are_here or now >= self._ready_at + self.grace

    def _close(self, order: Mapping[str, int]) -> Decided:
        members = sorted(self.offers, key=order.__getitem__)
        self.attempts += 1
        self.moving = Moving(
            self.round + 1,
            self.digests[self.round],
            self.attempts,
            self.attempts,
            {one: self.offers[one] for one in members},
            members,
        )
        self.offers = {}
        self._ready_at = None
        return self.moving.decided({})

    def _advance(
        self,
        moving: Moving,
        now: float,
        living: set[str],
        order: Mapping[str, int],
        outcomes: list[Outcome],
    ) -> bool:
        """Whether the moving round has changed its state."""
        left_out = {one: "it is gone" for one in moving.remaining if one not in living}
        left_out |= self._behind(moving, now, living, order)
        lacking, moving.lacking = moving.lacking, set()
        left_out |= dict.fromkeys(lacking, "it has given its call up")
        if left_out:
            counted = any(moving.offers[one].weight > 0 for one in left_out)
            moving.remaining = [one for one in moving.remaining if one not in left_out]
            for one in left_out:
                if one in living and one not in lacking:  # it will get the result for its call
                    self.late[one] = moving.offers[one]
            if len(moving.sources) < self.quorum:
                outcomes.append(self._reopen(moving, left_out))
                return True
            if counted:
                self.attempts += 1
                moving.attempt = self.attempts
                moving.got = {}
                moving.late_since = None
            outcomes.append(moving.decided(left_out))
            return True
        if moving.is_held:
            outcomes.extend(self._record(moving, now))
            return True
        return False

    def _behind(
        self, moving: Moving, now: float, living: set[str], order: Mapping[str, int]
    ) -> dict[str, str]:
        pairs = [pair for pair in moving.missing() if living.issuperset(pair)]
        slow = losers(pairs, order.__getitem__)
        core = [one for one in moving.sources if one in living and one not in slow]
        if not slow or len(core) < max(LEAST_CORE, self.quorum):
            moving.late_since = None
            return {}
        if moving.late_since is None:
            moving.late_since = now
        if now < moving.late_since + self.grace:
            return {}
        text = f"it is behind the others by more than {self.grace:g} s"
        return dict.fromkeys(slow, text)

    def _reopen(self, moving: Moving, left_out: Iterable[str]) -> Reopened:
        back = {one: moving.offers[one] for one in moving.remaining}
        self.offers = {**self.late, **back, **self.offers}
        self.late = {}
        self.moving = None
        return Reopened(moving.round, (*moving.remaining, *left_out))

    def _record(self, moving: Moving, now: float) -> list[Outcome]:
        contributors = tuple((one, moving.offers[one].weight) for one in moving.sources)
        digest = _digest(moving.parent, moving.round, contributors)
        self.round = moving.round
        self.digests[moving.round] = digest
        self.has_recorded = True
        if self._began is not None:
            self._lengths.append(now - self._began)
        self._began = now
        self.moving = None
        late, self.late = self.late, {}
        remaining = tuple(moving.remaining)
        recorded = Recorded(moving.round, moving.parent, digest, contributors, remaining)
        return [recorded, *(Owed(one, moving.round) for one in late)]

    # Restarts.

    def go_back(self, reached: Reached) -> None:
        """No round after `reached` holds any more."""
        self.moving = None
        self.round = reached.round
        self.digests = {round: one for round, one in self.digests.items() if round < reached.round}
        self.digests[reached.round] = reached.digest
        self.has_recorded = False

    def restore(
        self, moving: Moving | None, reached: Reached, attempts: int
    ) -> list[Owed | Astray]:
        """Take up the decisions of an earlier machine.

        Members may have called before these were known here, so return what they are owed now.
        """
        self.moving = moving
        self.round = max(self.round, reached.round)
        self.digests[reached.round] = reached.digest
        self.attempts = max(self.attempts, attempts)
        waiting = {**self.late, **self.offers}
        self.late, self.offers = {}, {}
        found = [self.offer(member, offer) for member, offer in waiting.items()]
        return [owed for owed in found if owed is not None]


def _digest(parent: bytes, round: int, contributors: Iterable[tuple[str, float]]) -> bytes:
    return hashlib.blake2b(repr((parent, round, *contributors)).encode(), digest_size=8).digest()
