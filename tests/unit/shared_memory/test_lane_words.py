"""Lanes, word by word: see `processors`."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from lane_users import Loop, Progress, Rider
from processors import Machine, machine_of

from aiodist.links.moved import Moved
from aiodist.shared_memory.lane import Lane


class User:
    """One rank: its lane, and what its loop is to do."""

    def __init__(self, machine: Machine, rank: int, phases: list[int], *, polls: bool) -> None:
        self.rank = rank
        self.loop: Any = Loop()
        self.progress: Any = Progress()
        self.users: list[User] = []
        self.riders: list[Rider] = []
        self.verdicts: set[int] = set()
        self.calls: list[Callable[[], None]] = []
        self.cancels: list[Callable[[], None]] = []
        self.gives_up: set[int] = set()
        self._phases = phases
        self._size = len(machine.segments)
        self.lane = Lane(
            machine.board(rank),
            self.loop,
            self.progress,
            self._kick,
            0,
            Moved(),
            size=self._size,
            crowded=False,
            polls=polls,
        )

    def number(self, seq: int, phase: int) -> int:
        return 1 + 1000 * seq + 100 * phase + self.rank

    def _kick(self, peer: int) -> None:
        user = self.users[peer]
        user.loop.ready.append(user.lane.kicked)

    def call(self) -> None:
        seq = len(self.riders)
        rider = Rider(self, self.lane, seq, self._phases[seq], self._size)
        self.riders.append(rider)
        if seq in self.verdicts:
            rider.finish("aborted")
            return
        if seq in self.gives_up:
            self.cancels.append(lambda: self.cancel(seq))
        self.lane.turns.add(rider)

    def cancel(self, seq: int) -> None:
        if not self.riders[seq].outcome:
            self.riders[seq].finish("cancelled")
            for user in self.users:
                if user is not self:
                    user.loop.ready.append(lambda user=user: user.hear(seq))

    def hear(self, seq: int) -> None:
        """Someone gave `seq` up."""
        if seq < len(self.riders):
            self.riders[seq].finish("aborted")
        else:
            self.verdicts.add(seq)


@pytest.mark.parametrize("polls", [False, True])
@pytest.mark.parametrize("seed", range(40))
@pytest.mark.sample(31)
def test_lanes_word_by_word(seed, polls):
    """Whatever comes in between: all operations end, with the numbers of that very operation."""
    chance = random.Random(seed)
    size = chance.choice([2, 2, 3])
    phases = [chance.choice([1, 1, 2, 3]) for _ in range(4)]
    given_up = {(chance.randrange(size), chance.randrange(4)) for _ in range(chance.randrange(3))}
    with machine_of(size, chance) as machine:
        users = [User(machine, rank, phases, polls=polls) for rank in range(size)]
        for user in users:
            user.users = users
            user.calls = [user.call] * len(phases)
            user.gives_up = {seq for rank, seq in given_up if rank == user.rank}
        machine.run(lambda rank: [users[rank].calls, users[rank].cancels, users[rank].loop.ready])
        for user in users:
            assert len(user.riders) == len(phases)
            for rider in user.riders:
                where = f"rank {user.rank} #{rider.seq}: {rider.outcome} {rider.rows}"
                assert rider.outcome, f"{where} hangs"
                if rider.outcome != "done":
                    assert rider.seq in {seq for _, seq in given_up}, where
                for phase, row in enumerate(rider.rows):
                    assert row == [other.number(rider.seq, phase) for other in users], where
            assert user.lane.idle
