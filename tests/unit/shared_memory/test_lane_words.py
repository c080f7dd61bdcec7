"""Lanes, word by word: whatever comes in between, operations end with what is theirs."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from store_buffers import Machine, machine_of

from aiodist.engine.executor import Executor, begin_area
from aiodist.engine.phase import Phase, prepared
from aiodist.links.moved import Moved
from aiodist.schedules import pull_whole
from aiodist.shared_memory.board import Board
from aiodist.shared_memory.lane import Lane


class Loop:
    def __init__(self) -> None:
        self.ready: list[Callable[[], None]] = []

    def call_soon(self, callback: Callable[[], None]) -> None:
        self.ready.append(callback)


class Progress:
    def is_due(self) -> bool:
        return False

    def watch(self, board: Board, peers: Any, stamp: int, *, crowded: bool) -> bool:
        return board.reached(peers, stamp)


class Sharing:
    """Every rank's number, through the first word of its area."""

    def __init__(self, rank: int, size: int, number: int) -> None:
        self.rank = rank
        self.number = number
        self.found = [0] * size
        self.areas: list[Any] = []

    def bind(self, lane: Lane, area: int) -> None:
        self.areas = [lane.area(rank, area) for rank in range(len(self.found))]

    def unbind(self) -> None:
        self.areas = []

    def copy(self, step: Any) -> None:
        if step.into.buffer >= 3:
            self.areas[self.rank][0] = self.number
            return
        for rank in range(step.into.start, step.into.stop):
            self.found[rank] = self.number if rank == self.rank else self.areas[rank][0]


class Links:
    """Where nobody is lost."""

    def check(self, peer: int) -> None: ...


class Rider:
    """An operation of so many phases, in each of which all share a number."""

    place = 0

    def __init__(self, user: User, seq: int, phases: int, size: int) -> None:
        self.seq = seq
        self.call = b"share"
        self.digest = 77
        self.outcome = ""
        self.rows: list[list[int]] = []
        self._user = user
        self._phases = phases
        self._size = size
        self._run: Executor | None = None
        self._memory: Sharing | None = None

    def resume(self) -> None:
        lane = self._user.lane
        if self.outcome or not lane.enter(self):
            return
        while True:
            if self._run is None:
                number = self._user.number(self.seq, len(self.rows))
                self._memory = Sharing(self._user.rank, self._size, number)
                plan = prepared(pull_whole.share, self._user.rank, self._size, 1)
                phase = Phase(plan, self._memory, 8, 8)
                links: Any = Links()
                self._run = Executor(phase, links, lane, begin_area(phase, lane, self.seq))
            if not self._run.run():
                return
            assert self._memory is not None
            self.rows.append(self._memory.found)
            self._run.close()
            self._run = None
            if len(self.rows) == self._phases:
                self.finish("done")
                return

    def finish(self, outcome: str) -> None:
        if not self.outcome:
            self.outcome = outcome
            self._user.lane.leave(self, failed=outcome != "done")


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
            polls=polls,
        )

    def number(self, seq: int, phase: int) -> int:
        return 1 + 1000 * seq + 100 * phase + self.rank

    def _kick(self, peer: int) -> None:
        user = self.users[peer]
        user.loop.ready.append(user.lane.kicked)

    def call(self) -> None:
        seq = len(self.riders)
        rider = Rider(self, seq, self._phases[seq], self._size)
        self.riders.append(rider)
        if seq in self.verdicts:
            rider.finish("aborted")
            return
        if seq in self.gives_up:
            self.cancels.append(lambda: self.cancel(seq))
        self.lane.add(rider)

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
