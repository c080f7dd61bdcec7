"""Chaos in averagers: `make chaos-averaging N=1000`. The members of each of some averagers average
without pause, some by shared memory and some by TCP: each is a process of its own
(`averager_member`). They are killed with SIGKILL, stopped with SIGSTOP, added and ended in order,
several at once. Their connections are cut, and the coordinator, which all averagers have in common,
is killed and started again. After every round of faults all members that live must get a new
result.

Each contribution says whose it is, so that each result shows which contributions are in it. All
that have the result of a round must have the same bits. No contribution may count twice. One whose
call has contributed must be in its round, and one that was late or withdrawn in none. Each round
must have a quorum. In the end nothing may be left.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from chaos_weights import Channel, Member, World, main
from restarts import cut

QUORUM = 2


class Fleet(Channel):
    """The members of one averager. Their versions are the rounds of their results."""

    program = Path(__file__).with_name("averager_member.py")
    fewest, most = QUORUM + 1, 5

    def __init__(self, world: World, number: int) -> None:
        super().__init__(world, number)
        self._numbers = 0
        self._results: dict[int, dict[str, Any]] = {}  # the first one of each round
        self._rounds: dict[tuple[int, int], int] = {}  # in which a contribution counts
        self._outside: set[tuple[int, int]] = set()  # contributions that must not count

    def common_kinds(self) -> list[str]:
        return ["stop", "stop", "restart", "cut"]

    async def add(self) -> None:
        self._numbers += 1
        self.subscribers.append(await self._start("average", self._numbers, QUORUM))

    async def cut(self) -> None:
        port = int(self.world.daemon.address.rpartition(":")[2])
        pids = {one.process.pid for one in self.subscribers}
        if not await asyncio.to_thread(cut, pids, port, self.chooser):
            self.world.happened["cut of nothing"] += 1

    async def begin(self) -> None:
        for _ in range(self.fewest):
            await self.add()
        await self.everyone_has(1, "the start")

    async def end(self) -> None:
        while self.subscribers:
            await self._end(self._one_less())

    def _hear(self, member: Member) -> None:
        super()._hear(member)
        for result in member.results:
            self._check(member, result)
        member.results.clear()

    def _check(self, member: Member, result: dict[str, Any]) -> None:
        key = (result["member"], result["call"])
        if result["contributes"] is False:
            self._outside.add(key)
        if "round" in result:
            number = result["round"]
            first = self._results.setdefault(number, result)
            if (first["bits"], first["counted"]) != (result["bits"], result["counted"]):
                self.world.note("mixed", f"{self.name}: {member}: {result}, but {first}")
            if len(result["counted"]) < QUORUM or len(result["counted"]) != result["contributors"]:
                self.world.note("wrong", f"{self.name}: {member}: {result}")
            for one in map(tuple, result["counted"]):
                if self._rounds.setdefault(one, number) != number:
                    text = f"{one} counts in {self._rounds[one]} and in {number}"
                    self.world.note("counted", f"{self.name}: {member}: {text}")
            if result["contributes"] and self._rounds.get(key) != number:
                self.world.note("counted", f"{self.name}: {member}: {key} is lost: {result}")
            self.newest = max(self.newest, number)
        for one in self._outside & self._rounds.keys():
            self.world.note("counted", f"{self.name}: {one} counts, but was late or withdrawn")
            self._outside.discard(one)


if __name__ == "__main__":
    main(Fleet, __doc__)
