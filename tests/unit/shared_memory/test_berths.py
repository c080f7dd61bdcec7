"""Berths, word by word (see `processors`); and where they are free again."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from lane_users import Loop, Progress, Rider
from processors import Machine, machine_of

from aiodist.collectives import reductions
from aiodist.errors import GroupClosedError, ProtocolError
from aiodist.links.moved import Moved
from aiodist.phases import berths as meeting
from aiodist.shared_memory import berths
from aiodist.shared_memory.berths import BerthBoard, BerthOffer, Berths, Offered
from aiodist.shared_memory.board import BERTH, stamp_of
from aiodist.types import SUM, ReduceOp

# -- word by word ---------------------------------------------------------------------------------


class Voyage:
    """One call of one rank: it offers a berth, and goes on where all have."""

    def __init__(self, user: User, seq: int, phases: int) -> None:
        self.user = user
        self.seq = seq
        self.phases = phases
        self.offer: BerthOffer | None = user.berths.offer()
        self.rider: Rider | None = None
        self.outcome = ""

    def look(self) -> None:
        """Go on, if all have offered."""
        words = self.user.mail[self.seq]
        if self.outcome or self.rider is not None or len(words) < self.user.size:
            return
        if None in words.values():
            self.finish("over links")
            return
        assert self.offer is not None
        offers = [words[rank] for rank in range(self.user.size)]
        berth = self.offer.moor(offers, 0)
        self.rider = Rider(self.user, berth, self.seq, self.phases, self.user.size)
        berth.turns.add(self.rider)

    def finish(self, outcome: str) -> None:
        if self.outcome or (self.rider is not None and self.rider.outcome):
            return
        if self.rider is not None:
            self.rider.finish(outcome)
        self.outcome = outcome
        self.offer = None


class User:
    """One rank, and what its loop is to do."""

    def __init__(self, machine: Machine, rank: int, phases: list[int]) -> None:
        self.rank = rank
        self.size = len(machine.segments)
        self.loop: Any = Loop()
        self.users: list[User] = []
        self.voyages: dict[int, Voyage] = {}
        self.mail: dict[int, dict[int, Any]] = {seq: {} for seq in range(len(phases))}
        self.verdicts: set[int] = set()
        self.calls: list[Callable[[], None]] = []
        self.cancels: list[Callable[[], None]] = []
        self.gives_up: set[int] = set()
        self._phases = phases
        progress: Any = Progress()
        self.berths = Berths(
            machine.board(rank),
            self.loop,
            progress,
            self._kick,
            Moved(),
            crowded=False,
            polls=False,
        )

    def number(self, seq: int, phase: int) -> int:
        return 1 + 1000 * seq + 100 * phase + self.rank

    def _kick(self, peer: int) -> None:
        user = self.users[peer]
        user.loop.ready.append(user.berths.kicked)

    def call(self, seq: int) -> None:
        voyage = self.voyages[seq] = Voyage(self, seq, self._phases[seq])
        if seq in self.verdicts:
            voyage.finish("aborted")
            return
        if seq in self.gives_up:
            self.cancels.append(lambda: self.cancel(seq))
        words = None if voyage.offer is None else voyage.offer.words
        for user in self.users:
            if user is not self:
                user.loop.ready.append(lambda user=user: user.hear(seq, self.rank, words))
        self.hear(seq, self.rank, words)

    def hear(self, seq: int, rank: int, words: Offered | None) -> None:
        self.mail[seq][rank] = words
        if seq in self.voyages:
            self.voyages[seq].look()

    def cancel(self, seq: int) -> None:
        voyage = self.voyages[seq]
        if not (voyage.outcome or (voyage.rider is not None and voyage.rider.outcome)):
            voyage.finish("cancelled")
            for user in self.users:
                if user is not self:
                    user.loop.ready.append(lambda user=user: user.give_up(seq))

    def give_up(self, seq: int) -> None:
        """Someone gave `seq` up."""
        if seq in self.voyages:
            self.voyages[seq].finish("aborted")
        else:
            self.verdicts.add(seq)


@pytest.mark.parametrize("seed", range(80))
@pytest.mark.sample(31)
def test_berths_word_by_word(seed, monkeypatch):
    """In whatever order ranks call, and whatever comes in between: all operations end, with the
    numbers of that very operation; then all berths are free."""
    chance = random.Random(seed)
    monkeypatch.setattr(berths, "BERTHS", chance.choice([1, 2, 2, 3]))
    size = chance.choice([2, 2, 3])
    phases = [chance.choice([1, 1, 2, 3]) for _ in range(5)]
    given_up = {(chance.randrange(size), chance.randrange(5)) for _ in range(chance.randrange(4))}
    with machine_of(size, chance) as machine:
        users = [User(machine, rank, phases) for rank in range(size)]
        for user in users:
            user.users = users
            order = chance.sample(range(5), 5)
            user.calls = [lambda user=user, seq=seq: user.call(seq) for seq in order]
            user.gives_up = {seq for rank, seq in given_up if rank == user.rank}
        machine.run(lambda rank: [users[rank].calls, users[rank].cancels, users[rank].loop.ready])
        for user in users:
            for seq, voyage in user.voyages.items():
                rider = voyage.rider
                outcome = voyage.outcome if rider is None else rider.outcome
                where = f"rank {user.rank} #{seq}: {outcome}"
                assert outcome, f"{where} hangs"
                if outcome in ("cancelled", "aborted"):
                    assert seq in {seq for _, seq in given_up}, where
                for phase, row in enumerate(rider.rows if rider is not None else ()):
                    assert row == [other.number(seq, phase) for other in users], where
            assert all(berth.is_free for berth in user.berths._all)


def test_who_sleeps_on_another_berth_is_woken_too():
    """Naps are counted by berth, so two may have the same number."""
    own, here, there = (memoryview(bytearray(BERTH)) for _ in range(3))
    board = BerthBoard(0, own, {1: here.toreadonly()})
    for nap, memory in enumerate((here, there)):
        board.see({1: memory.toreadonly()})
        sleeper = BerthBoard(1, memory, {0: own.toreadonly()})
        sleeper.sleep([0], stamp_of(nap))
        assert board.reach(stamp_of(nap)) == [1]
        assert board.reach(stamp_of(nap, 0, 1)) == []  # once
        sleeper.awake()


# -- of groups ------------------------------------------------------------------------------------

LARGE = 10_000
"""Elements of an array that is not posted."""
LARGER = 40_000
"""Of one of which ranks may reduce slices."""


@pytest.fixture
def world(lanes, monkeypatch):
    monkeypatch.setattr(reductions, "POSTED_OF_TWO", reductions.EAGER_LIMIT)
    world = lanes.World(2, lanes.Chance(0))
    for context in world.contexts:
        context.may_post = True
    return world


def call(context, tag, value=1.0, n=LARGE, op=SUM):
    return context.post_express.all_reduce(np.full(n, value), op, math.inf, tag)


def test_who_never_calls_holds_up_nothing_else(world):
    """All berths of one rank are offered to calls that the other does not make."""
    one, two = world.contexts
    held = [call(one, f"held {number}") for number in range(berths.BERTHS + 3)]
    works = [call(context, "all", 1.0 + rank) for rank, context in enumerate(world.contexts)]
    world.settle()
    assert all((work.result() == 3).all() for work in works)
    assert not any(work.done() for work in held)
    late = [call(two, f"held {number}") for number in range(berths.BERTHS + 3)]
    world.settle()
    assert all((work.result() == 2).all() for work in held + late)
    assert all(berth.is_free for context in world.contexts for berth in context.berths._all)


def test_one_after_the_other_takes_two_berths(world):
    for number in range(6):
        works = [call(context, "t", number) for context in world.contexts]
        world.settle()
        assert all((work.result() == 2 * number).all() for work in works)
    for context in world.contexts:
        assert len(context.berths._all) == 2
        assert [berth.along for berth in context.berths._all] == [[0, 0], [1, 1]]


def test_free_again_though_another_gave_up_what_is_done_here(world):
    one, two = world.contexts
    works = [call(one, "t"), call(two, "t")]
    assert (works[1].result() == 2).all()  # what one showed was there
    assert not two.berths._all[0].is_free  # it may be read
    assert works[0].cancel()
    assert two.berths._all[0].is_free
    world.settle()
    assert one.berths._all[0].is_free


def test_the_group_ends_on_berths(world):
    """Of one that has called, and of one that is under way."""
    one, two = world.contexts
    called = call(one, "b")
    # Of an average ranks reduce slices, so one waits for the other.
    under_way = [call(context, "a", n=LARGER, op=ReduceOp.AVG) for context in world.contexts][1]
    assert two.berths._moored
    for context, work in ((two, under_way), (one, called)):
        context.close(GroupClosedError("over"))
        assert isinstance(work.exception(), GroupClosedError)


@pytest.mark.parametrize(
    "words", [b"", bytes(15), b"\xff" * 16, b"\x08" + bytes(15), bytes(12) + b"\x02" + bytes(3)]
)
def test_an_offer_that_makes_no_sense(words):
    with pytest.raises(ProtocolError, match="rank 1"):
        meeting.read([meeting.NOTHING, words])


def test_what_is_offered_is_read():
    words = [bytes(16), b"\x07" + bytes(3) + b"\x05" + bytes(7) + b"\x01" + bytes(3)]
    assert meeting.read(words) == [Offered(0, 0), Offered(7, 5, True)]
    assert meeting.read([*words, meeting.NOTHING]) is None
