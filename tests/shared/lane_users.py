"""Operations that ranks on `processors` do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from aiodist.engine.executor import Executor, begin_area
from aiodist.engine.phase import Phase, prepared
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
        self.areas = [lane.board.area(rank, area) for rank in range(len(self.found))]

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

    def why_lost(self, peer: int) -> None: ...


class Numbers(Protocol):
    """A rank. All that it shares are numbers of which no two are alike."""

    rank: int

    def number(self, seq: int, phase: int) -> int: ...


class Rider:
    """An operation of so many phases, in each of which all share a number."""

    place = 0

    def __init__(self, user: Numbers, lane: Lane, seq: int, phases: int, size: int) -> None:
        self.lane = lane
        self.seq = seq
        self.call = b"share"
        self.outcome = ""
        self.rows: list[list[int]] = []
        self._user = user
        self._phases = phases
        self._size = size
        self._run: Executor | None = None
        self._memory: Sharing | None = None

    def resume(self) -> None:
        lane = self.lane
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
            self.lane.leave(self, failed=outcome != "done")
