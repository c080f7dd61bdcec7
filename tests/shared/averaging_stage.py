"""Averagers on a simulated network, and a checker of what they give.

Each call contributes a vector with a single 1, at a place of its own, and members take the sum. So
a result shows which calls are in it, and the checker sees whether one of them counts twice, whether
it is missing, and whether all members have the same bits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection
from copy import copy
from random import Random
from typing import Any

import numpy as np

import aiodist
from aiodist.testing import Simulation
from aiodist.testing.simulation import Killed
from aiodist.testing.wires import Node

CALLS = 64
"""The most calls of one member."""


def stop_for(node: Node, seconds: float) -> None:
    node.network.later_by(seconds, node.stop())


class Stage:
    """Members, one on each node of a simulation, and what their calls gave in one part."""

    part = ""

    def __init__(self, size: int, seed: int = 0, **options: Any) -> None:
        self.lease = options.pop("lease", 3.0)
        self.durable = options.get("durable", False)
        self.sim = Simulation(size, seed=seed, **options)
        self.random = Random(seed)
        self.size = size
        self.carries = False  # calls may include earlier ones
        self._begin()

    def _begin(self) -> None:
        self.results: dict[int, dict[int, np.ndarray[Any, Any]]] = defaultdict(dict)
        self.late: dict[tuple[int, int], bool] = {}  # by (member, call): how it ended
        self.round_of: dict[tuple[int, int], int] = {}

    def beside(self, part: str) -> Stage:
        """The same members in another part."""
        other = copy(self)
        other.part = part
        other._begin()
        return other

    def averager(self, member: int, **options: Any) -> aiodist.Averager:
        chosen = {"quorum": 2, "grace": 0.5, "op": aiodist.ReduceOp.SUM, "name": f"m{member}"}
        options = {"transports": ("tcp",), "lease": self.lease, **chosen, **options}
        return aiodist.averager("outer", address=self.sim.address, **options)

    @property
    def nothing(self) -> np.ndarray[Any, Any]:
        return np.zeros(self.size * CALLS, np.float32)

    def place(self, member: int, call: int) -> np.ndarray[Any, Any]:
        x = self.nothing
        x[member * CALLS + call] = 1
        return x

    async def call(
        self, avg: aiodist.Averager, member: int, call: int, **options: Any
    ) -> aiodist.Averaged:
        """Call number `call` of a member. If rounds of its were decided again, it is told so, and
        what it had does not count."""
        try:
            found = await avg.average(self.place(member, call), part=self.part, **options)
        except aiodist.StaleError as error:
            if "decided again without" in str(error):
                self.forget(member)
            raise
        self.late[member, call] = found.late
        self.round_of[member, call] = found.round
        before = self.results[found.round].setdefault(member, found.value)
        assert np.array_equal(before, found.value)
        more = found.value.sum() - len(found.contributors)
        assert more >= 0 if self.carries else more == 0
        return found

    def play(
        self,
        main: Callable[[int], Awaitable[Any]],
        limit: float = 600.0,
        forgets: Callable[[], Collection[int]] = tuple,
    ) -> list[Any]:
        """`forgets()`: members that died. A round that they alone know may be lost, if the
        coordinator has no state file, or if all members were lost."""

        async def guarded(member: int) -> Any:
            return await main(member)

        outcomes = self.sim.play({one: guarded(one) for one in range(self.size)}, limit)
        for outcome in outcomes:
            if isinstance(outcome, BaseException) and not isinstance(outcome, Killed):
                raise outcome
        self.check(forgets())
        return outcomes

    def check(self, forgets: Collection[int] = ()) -> None:
        for one in forgets:
            self.forget(one)
        counted: dict[tuple[int, int], int] = {}
        for round, by_member in self.results.items():
            if not by_member:
                continue
            first, *others = by_member.values()
            for other in others:
                assert first.tobytes() == other.tobytes(), f"round {round} differs"
            assert set(np.unique(first)) <= {0.0, 1.0}
            for at in np.flatnonzero(first):
                key = (int(at) // CALLS, int(at) % CALLS)
                assert key not in counted, f"{key} counts in {counted[key]} and in {round}"
                counted[key] = round
        for key, late in self.late.items():
            if late:
                assert counted.get(key) != self.round_of[key]
            else:
                assert counted[key] == self.round_of[key], f"{key} is lost"

    def forget(self, member: int) -> None:
        """What a member had does not count."""
        for by_member in self.results.values():
            by_member.pop(member, None)
        self.late = {key: late for key, late in self.late.items() if key[0] != member}
