"""The rounds of a part: when they close, who is left out, what is owed. In random histories no
contribution counts twice, and every round closes as soon as its rule allows."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from unittest.mock import ANY

import pytest
from seeds import seeds

from aiodist.membership.rounds import (
    AUTO_FIRST,
    Astray,
    Contribution,
    Decided,
    Got,
    Moving,
    Outcome,
    Owed,
    PartRounds,
    Recorded,
    Reopened,
)
from aiodist.wire.averaging import Reached

NAMES = "abcdef"
ORDER = {name: place for place, name in enumerate(NAMES)}


@dataclass
class Table:
    """A part with its members at a table: `say` one thing, and see what follows."""

    part: PartRounds
    alive: set[str]
    now: float = 0.0

    def settle(self) -> list[Outcome]:
        return self.part.settle(self.now, self.alive, ORDER)

    def offers(self, *members: str, weight: float = 1.0, call: int = 1) -> list[Outcome]:
        after = reached(self.part)
        for member in members:
            assert self.part.offer(member, Contribution(call, weight, after)) is None
        return self.settle()

    def at(self, now: float) -> list[Outcome]:
        self.now = now
        return self.settle()

    def hold(self, *members: str) -> list[Outcome]:
        """These have everything of the moving round."""
        moving = self.part.moving
        assert moving is not None
        everything = frozenset(moving.sources)
        for member in members:
            self.part.report(member, moving.round, moving.attempt, Got(everything, everything))
        return self.settle()

    def has(self, member: str, contributions: str, means: str = "") -> list[Outcome]:
        moving = self.part.moving
        assert moving is not None
        got = Got(frozenset(contributions), frozenset(means))
        self.part.report(member, moving.round, moving.attempt, got)
        return self.settle()

    def dies(self, *members: str) -> list[Outcome]:
        self.alive -= {*members}
        self.part.gone(members)
        return self.settle()


def table(members: str = "abc", quorum: int = 2, grace: float | None = 1.0) -> Table:
    part = PartRounds(quorum, grace)
    for member in members:
        part.enter(member)
    return Table(part, set(members))


def round_1(contributors: tuple[tuple[str, float], ...], holders: tuple[str, ...]) -> Recorded:
    """The first round is over."""
    return Recorded(1, b"", ANY, contributors, holders)


def reached(part: PartRounds, back: int = 0) -> Reached:
    """The last round of a part, or one before it."""
    return Reached(part.round - back, part.digests[part.round - back])


def remaining(outcomes: list[Outcome]) -> list[tuple[str, ...]]:
    return [one.remaining for one in outcomes if isinstance(one, Decided)]


def test_a_round_closes_when_all_present_have_contributed() -> None:
    t = table()
    assert t.offers("b", "a") == []
    assert remaining(t.offers("c")) == [("a", "b", "c")]  # in the order of members
    assert t.hold("a", "b") == []
    [recorded] = t.hold("c")
    assert recorded == round_1((("a", 1.0), ("b", 1.0), ("c", 1.0)), ("a", "b", "c"))
    assert t.part.round == 1


def test_a_round_closes_when_grace_is_over_after_the_quorum() -> None:
    t = table()
    t.offers("a")
    assert t.at(50.0) == []
    assert t.part.deadline is None
    t.offers("b")
    assert t.part.deadline == 51.0
    assert t.at(50.9) == []
    assert remaining(t.at(51.0)) == [("a", "b")]


def test_a_member_that_leaves_is_not_waited_for() -> None:
    t = table()
    t.offers("a", "b")
    assert remaining(t.dies("c")) == [("a", "b")]


def test_fewer_than_the_quorum_wait() -> None:
    t = table(quorum=3)
    t.offers("a", "b")
    assert t.dies("c") == []
    assert t.at(1000.0) == []
    t.alive.add("d")
    t.part.enter("d")
    assert remaining(t.offers("d")) == [("a", "b", "d")]


def test_a_member_of_weight_0_receives_and_does_not_count() -> None:
    t = table("ab", quorum=2)
    t.offers("a")
    assert t.offers("b", weight=0.0) == []
    t.alive.add("c")
    t.part.enter("c")
    [decided] = t.offers("c", weight=3.0)
    assert isinstance(decided, Decided)
    assert decided.remaining == ("a", "b", "c")
    t.hold("a", "c")
    # It reduces nothing, and nobody waits for anything of it.
    [recorded] = t.has("b", "", "ac")
    assert recorded == round_1((("a", 1.0), ("c", 3.0)), ("a", "b", "c"))


def test_a_receiver_that_dies_changes_nothing_for_the_others() -> None:
    t = table("abc", quorum=2)
    t.offers("a", "b")
    [decided] = t.offers("c", weight=0.0)
    assert isinstance(decided, Decided)
    t.hold("a", "b")
    [again, recorded] = t.dies("c")
    assert isinstance(again, Decided)
    assert again.attempt == decided.attempt
    assert recorded == round_1((("a", 1.0), ("b", 1.0)), ("a", "b"))


def test_a_contributor_that_dies_is_left_out_by_a_second_decision() -> None:
    t = table()
    [first] = t.offers("a", "b", "c")
    assert isinstance(first, Decided)
    t.hold("a", "b")
    [second] = t.dies("c")
    assert isinstance(second, Decided)
    assert second.remaining == ("a", "b")
    assert second.left_out == {"c": "it is gone"}
    assert (second.begun, second.attempt) == (first.begun, first.attempt + 1)
    # What was said of the attempt before does not count.
    t.part.report("a", 1, first.attempt, Got(frozenset("abc"), frozenset("abc")))
    t.part.report("b", 1, first.attempt, Got(frozenset("abc"), frozenset("abc")))
    assert t.settle() == []
    assert t.hold("a", "b") == [round_1((("a", 1.0), ("b", 1.0)), ("a", "b"))]


def test_a_contributor_that_lacks_its_call_is_left_out_and_owed_nothing() -> None:
    t = table("abc", quorum=2)
    [first] = t.offers("a", "b", "c")
    t.part.lacks("c", 1, 7)  # of another attempt
    t.part.lacks("d", 1, first.attempt)
    assert t.settle() == []
    t.part.lacks("c", 1, first.attempt)
    [second] = t.settle()
    assert second.left_out == {"c": "it has given its call up"}
    t.part.lacks("b", 1, second.attempt)
    assert t.settle() == [Reopened(1, ("a", "b"))]
    assert t.part.offers == {"a": Contribution(1, 1.0, reached(t.part))}
    assert remaining(t.offers("b", "c", call=2)) == [("a", "b", "c")]


def test_a_round_opens_again_with_its_contributions_when_too_few_remain() -> None:
    t = table("abc", quorum=2)
    t.offers("a", "b", "c")
    assert isinstance(t.dies("a")[0], Decided)
    [reopened] = t.dies("b")
    assert reopened == Reopened(1, ("c", "b"))
    assert t.part.offers == {"c": Contribution(1, 1.0, reached(t.part))}
    t.alive.add("d")
    t.part.enter("d")
    [decided] = t.offers("d")
    assert isinstance(decided, Decided)
    assert decided.round == 1
    assert decided.attempt == 3  # no decision has the number of another one


def test_a_member_behind_is_left_out_after_grace_and_owed_the_result() -> None:
    t = table()
    t.offers("a", "b", "c")
    t.has("a", "b", "")
    t.now = 10.0
    assert t.part.deadline is None  # nobody is done with anybody
    assert t.has("b", "a", "") == []
    assert t.part.deadline == 11.0  # a and b have what they can have of each other
    assert t.at(10.5) == []
    [second] = t.at(11.0)
    assert isinstance(second, Decided)
    assert second.remaining == ("a", "b")
    assert "behind the others by more than 1 s" in second.left_out["c"]
    assert t.hold("a", "b") == [
        round_1((("a", 1.0), ("b", 1.0)), ("a", "b")),
        Owed("c", 1),
    ]


def test_two_members_have_nobody_to_be_compared_with() -> None:
    t = table("ab", quorum=1)
    t.offers("a", "b")
    t.has("a", "b")
    assert t.at(1000.0) == []


def test_a_late_call_gets_the_result_and_missed_rounds_come_in_order() -> None:
    t = table("abc", grace=0.0)
    t.offers("a", "b")
    none = reached(t.part)
    assert t.part.offer("c", Contribution(1, 1.0, none)) is None  # decided, and not recorded yet
    assert t.hold("a", "b")[-1] == Owed("c", 1)
    t.offers("a", "b", call=2)
    t.hold("a", "b")
    assert t.part.offer("c", Contribution(2, 1.0, none)) == Owed("c", 1)
    assert t.part.offer("c", Contribution(3, 1.0, reached(t.part, 1))) == Owed("c", 2)
    last = Contribution(4, 1.0, reached(t.part))
    assert t.part.offer("c", last) is None
    assert t.part.offers == {"c": last}


def test_a_member_whose_last_result_is_of_another_history_is_astray() -> None:
    t = table("abc", grace=0.0)
    t.offers("a", "b")
    t.hold("a", "b")
    for round, digest in (1, b"other"), (2, t.part.digests[1]):
        after = Reached(round, digest)
        assert t.part.offer("c", Contribution(7, 1.0, after)) == Astray("c", 7)
    assert t.part.offers == {}


def test_a_new_member_belongs_to_the_round_that_is_open() -> None:
    t = table("abc", grace=0.0)
    t.offers("a", "b")
    assert t.part.offer("c", Contribution(1, 1.0, None)) is None
    assert t.part.offers == {"c": Contribution(1, 1.0)}  # of round 2
    t.hold("a", "b")
    assert remaining(t.offers("a", call=2)) == [("a", "c")]


def test_a_call_is_withdrawn_until_it_is_decided() -> None:
    t = table()
    t.offers("a", "b")
    assert not t.part.withdraw("a", 1)
    assert t.settle() == []
    assert t.at(100.0) == []
    t.offers("a", call=2)
    assert not t.part.withdraw("a", 1)  # of a call before, which is over
    assert remaining(t.at(101.0)) == [("a", "b")]
    assert t.part.withdraw("a", 2)
    assert t.hold("a", "b")[0] == round_1((("a", 1.0), ("b", 1.0)), ("a", "b"))


def test_grace_auto_is_a_quarter_of_the_median_length() -> None:
    t = table("ab", grace=None)
    assert t.part.grace == AUTO_FIRST
    for now in (0.0, 8.0, 16.0, 40.0):
        t.now = now
        t.offers("a", "b")
        t.hold("a", "b")
    assert t.part.grace == 2.0  # of lengths 8, 8 and 24


def test_a_patient_part_waits_for_members_that_may_come_back() -> None:
    t = table("ab")
    t.part.patient_until = 0.5
    assert t.offers("a", "b") == []
    assert t.part.deadline == 0.5
    assert remaining(t.at(0.5)) == [("a", "b")]


def test_grace_does_not_end_patience() -> None:
    t = table("abc")
    t.part.patient_until = 5.0
    t.offers("a", "b")
    assert t.at(1.0) == []
    assert t.part.deadline == 5.0
    assert remaining(t.at(5.0)) == [("a", "b")]


def test_what_members_are_owed_after_what_another_one_knows() -> None:
    """Their calls came first. None of them may count for a round after the one that it was for."""
    part = PartRounds(2, 1.0)
    four, six, seven = Reached(4, b"4"), Reached(6, b"6"), Reached(7, b"7")
    assert part.restore(None, four, 3) == []
    for member, after in ("a", four), ("c", None):
        assert part.offer(member, Contribution(1, 1.0, after)) is None
    assert part.restore(None, six, 12) == [Owed("a", 5)]
    assert part.offer("b", Contribution(1, 1.0, six)) is None
    part.offers["d"] = Contribution(2, 1.0, Reached(6, b"other"))
    moving = Moving(8, b"7", 13, 13, {"d": Contribution(1, 1.0, seven)}, ["d"])
    assert part.restore(moving, seven, 13) == [Owed("b", 7), Astray("d", 2)]
    assert set(part.offers) == {"c"}  # it is new, and comes in with the next round


# Random histories: members that compute, contribute, transfer, die, come and give calls up.


class History:
    """Members in virtual time, with messages that take their time, in order for each member.

    What a contribution is worth is its (member, call); a mean is the set of those that are in it.
    """

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.quorum = self.random.randint(1, 4)
        grace = self.random.choice([0.0, 0.5, 3.0, None])
        self.part = PartRounds(self.quorum, grace)
        self.order: dict[str, int] = {}
        self.alive: dict[str, Simulated] = {}
        self.now = 0.0
        self.is_calm = False  # no member dies, comes, gives up or has no weight any more
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self.results: dict[int, frozenset[tuple[str, int]]] = {}
        self.recorded: dict[int, Recorded] = {}
        self.calls: dict[tuple[str, int], str] = {}
        self.ready_since: float | None = None

    def after(self, seconds: float, work: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._numbers), work))

    def run(self, until: float) -> None:
        while self._events and self._events[0][0] <= until:
            due = self.part.deadline
            if due is not None and due < self._events[0][0]:
                self.now = max(self.now, due)
                self.settle()
                continue
            self.now, _, work = heapq.heappop(self._events)
            work()

    def join(self) -> None:
        name = f"m{len(self.order)}"
        self.order[name] = len(self.order)
        self.alive[name] = Simulated(self, name)
        self.part.enter(name)
        self.settle()
        self.alive[name].compute()

    def die(self, name: str) -> None:
        if name in self.alive:
            del self.alive[name]
            self.part.gone([name])
            self.settle()

    def settle(self) -> None:
        for outcome in self.part.settle(self.now, self.alive.keys(), self.order):
            match outcome:
                case Decided():
                    for name in (*outcome.remaining, *outcome.left_out):
                        self.tell(name, lambda one, said=outcome: one.decided(said))
                case Recorded():
                    assert outcome.round not in self.recorded
                    assert len(outcome.contributors) >= self.quorum
                    self.recorded[outcome.round] = outcome
                    for name in outcome.holders:
                        self.tell(name, lambda one, said=outcome: one.finished(said))
                case Reopened():
                    for name in outcome.members:
                        self.tell(name, lambda one, said=outcome: one.reopened(said))
                case Owed(name, number):
                    self.tell(name, lambda one, number=number: one.owed(number))
        self.check_rule()

    def tell(self, name: str, work: Callable[[Simulated], None]) -> None:
        if name in self.alive:
            self.alive[name].inbox(work)

    def check_rule(self) -> None:
        """A round that may close is not open."""
        part = self.part
        if part.moving is None:
            counted = [one for one in part.offers.values() if one.weight > 0]
            if len(counted) < self.quorum:
                self.ready_since = None
                return
            assert part.present - part.offers.keys(), "all are here, and it is open"
            if self.ready_since is None:
                self.ready_since = self.now
            assert self.now < self.ready_since + part.grace, "grace is over, and it is open"
        else:
            self.ready_since = None


class Simulated:
    """One member, as `aiodist.averaging` is one: calls, takes part in transfers, gets results."""

    def __init__(self, history: History, name: str) -> None:
        self.history = history
        self.name = name
        self.last: Reached | None = None
        self.call = 0
        self.waiting = False
        self.attempt = 0
        self.decision: Decided | None = None
        self.got = Got()
        self.heard: dict[str, frozenset[tuple[str, int]]] = {}
        self._free = 0.0  # when the next message to it arrives at the earliest

    @property
    def is_alive(self) -> bool:
        return self.history.alive.get(self.name) is self

    def later(self, seconds: float, work: Callable[[], None]) -> None:
        self.history.after(seconds, lambda: work() if self.is_alive else None)

    def inbox(self, work: Callable[[Simulated], None]) -> None:
        history = self.history
        self._free = max(self._free, history.now + history.random.uniform(0, 0.2))
        self.later(self._free - history.now, lambda: work(self))

    def compute(self) -> None:
        slow = 10 if self.history.order[self.name] % 4 == 3 else 1
        self.later(slow * self.history.random.uniform(0.1, 2.0), self.contribute)

    def contribute(self) -> None:
        history = self.history
        self.call += 1
        self.waiting = True
        weight = float(history.random.choice([0, 1, 1, 2, 5] if not history.is_calm else [1, 2]))
        history.calls[self.name, self.call] = "waits" if weight else "receives"
        owed = history.part.offer(self.name, Contribution(self.call, weight, self.last))
        if owed is not None:
            assert isinstance(owed, Owed)
            history.calls[self.name, self.call] = "late"
            history.tell(self.name, lambda one: one.owed(owed.round))
        history.settle()
        if history.random.random() < 0.1 and not history.is_calm:
            call = self.call
            self.later(history.random.uniform(0, 2), lambda: self.give_up(call))

    def give_up(self, call: int) -> None:
        history = self.history
        if not self.waiting or call != self.call:
            return
        decided = history.part.withdraw(self.name, call)
        history.settle()
        self.inbox(lambda one: one.answered(call, decided=decided))

    def answered(self, call: int, *, decided: bool) -> None:
        if decided or not self.waiting or call != self.call:
            return  # it has the result by now, or will have it
        if self.history.calls[self.name, call] == "waits":
            self.history.calls[self.name, call] = "withdrawn"
        self.waiting = False
        self.compute()

    def decided(self, decided: Decided) -> None:
        if self.name not in decided.remaining:
            self.decision = None
            return
        if decided.attempt != self.attempt:
            self.attempt = decided.attempt
            self.got, self.heard = Got(), {}
        self.decision = decided
        counts = [one for one in decided.remaining if decided.offers[one].weight > 0]
        if self.name in counts:
            for other in counts:
                if other != self.name:
                    self.send(other, decided.attempt, lambda one: one.has_contribution(self.name))
            if counts == [self.name]:
                self.has_contribution(self.name)
        self.report()

    def send(self, other: str, attempt: int, work: Callable[[Simulated], None]) -> None:
        seconds = self.history.random.uniform(0, 1)

        def arrive() -> None:
            peer = self.history.alive.get(other)
            if peer is None:
                return
            if peer.attempt < attempt:  # it has not heard of the decision yet
                self.history.after(0.1, arrive)
            elif peer.attempt == attempt and peer.decision is not None:
                work(peer)

        self.history.after(seconds, arrive)

    def has_contribution(self, source: str) -> None:
        decision = self.decision
        assert decision is not None
        counts = {one for one in decision.remaining if decision.offers[one].weight > 0}
        self.got = Got(self.got.contributions | {source}, self.got.means)
        if counts <= self.got.contributions | {self.name}:
            mean = frozenset((one, decision.offers[one].call) for one in counts)
            self.heard[self.name] = mean
            for other in decision.remaining:
                if other != self.name:
                    self.send(other, self.attempt, lambda one: one.has_mean(self.name, mean))
        self.report()

    def has_mean(self, source: str, mean: frozenset[tuple[str, int]]) -> None:
        self.heard[source] = mean
        self.got = Got(self.got.contributions, self.got.means | {source})
        self.report()

    def report(self) -> None:
        decision, got = self.decision, self.got
        assert decision is not None
        if decision.attempt != self.attempt:
            return
        round, attempt = decision.round, self.attempt

        def arrive() -> None:
            self.history.part.report(self.name, round, attempt, got)
            self.history.settle()

        self.later(0.05, arrive)

    def finished(self, recorded: Recorded) -> None:
        counted = frozenset(name for name, _ in recorded.contributors)
        means = set(self.heard.values())
        assert len(means) == 1, f"{self.name} holds slices of different sets"
        [mean] = means
        assert {name for name, _ in mean} == counted
        assert self.history.results.setdefault(recorded.round, mean) == mean
        self.decision = None
        self.take(recorded.round)

    def reopened(self, reopened: Reopened) -> None:
        if self.decision is not None and self.decision.round == reopened.round:
            self.decision = None

    def owed(self, round: int) -> None:
        if self.last is None or round == self.last.round + 1:
            self.decision = None
            self.take(round)

    def take(self, round: int) -> None:
        recorded = self.history.recorded[round]
        if self.last is not None:
            assert self.last.digest == recorded.parent, "missed rounds come in order"
        self.last = Reached(round, recorded.digest)
        if self.waiting:
            self.waiting = False
            self.compute()


@pytest.mark.parametrize("seed", seeds(20, 400))
def test_random_histories(seed: int) -> None:
    history = History(seed)
    for _ in range(history.random.randint(max(2, history.quorum), 6)):
        history.join()
    for _ in range(history.random.randint(0, 6)):
        at = history.random.uniform(0, 30)
        history.after(at, lambda: history.die(history.random.choice([*history.alive, "none"])))
    for _ in range(history.random.randint(0, 4)):
        history.after(history.random.uniform(0, 30), history.join)
    history.run(30.0)
    history.is_calm = True
    # Whoever is left, and as many as it takes to meet the quorum, go on.
    while len(history.alive) < history.quorum + 1:
        history.join()
    for member in history.alive.values():
        member.give_up(member.call)  # it may have no weight
    before = history.part.round
    history.run(130.0)
    assert history.part.round > before, "no round closes any more"
    counted = [one for mean in history.results.values() for one in mean]
    assert len(counted) == len(set(counted)), "a contribution counts twice"
    for one in counted:
        assert history.calls[one] == "waits", f"{one} counts, though it was {history.calls[one]}"
