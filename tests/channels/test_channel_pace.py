"""How long one who takes a version waits for those whom he hands it on to."""

from __future__ import annotations

import asyncio

import pytest

from aiodist.channels.directory import Release
from aiodist.channels.holding import Holding
from aiodist.channels.pace import GRACE, ParticipantPace
from aiodist.testing.virtual_loop import VirtualLoop

PATIENCE = 8.0
PARTS = 100
TAKES = 0.01
"""Seconds that a part takes to come."""


class Hand:
    """One who takes a version of many parts, and those who are given it."""

    def __init__(self):
        self.loop = VirtualLoop(0)
        self.holding = Holding(Release(1, 1, PARTS, 1, 0))
        self.calls = 0
        self.most_ahead = 0
        self.late = []  # how long it has waited, by part

    def run(self, *others):
        async def main():
            tasks = [asyncio.ensure_future(one) for one in others]
            pace = ParticipantPace(self.holding, lambda: self.calls, PATIENCE)
            for number in range(PARTS):
                begin = self.loop.time()
                await pace.keep(number)
                self.late.append(self.loop.time() - begin)
                await asyncio.sleep(TAKES)
                self.holding.fill()
                given = min(self.holding.given.values(), default=number)
                self.most_ahead = max(self.most_ahead, number - given)
            for one in tasks:
                one.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        self.loop.run_until_complete(main())
        self.loop.close()

    async def gives(self, seconds, stops=PARTS):
        """One who takes so long for a part."""
        self.holding.given[self] = 0
        for number in range(stops):
            while self.holding.filled <= number:
                await self.holding.news()
            await asyncio.sleep(seconds)
            self.holding.given[self] = number + 1
            self.holding.tell()


def test_nobody_is_waited_for_where_all_keep_up():
    hand = Hand()
    hand.run(hand.gives(TAKES))
    assert sum(hand.late) == pytest.approx(0, abs=1e-9)


def test_one_who_is_a_little_slower_is_waited_for():
    hand = Hand()
    hand.run(hand.gives(1.4 * TAKES))
    assert hand.most_ahead == 1
    assert 0.3 * PARTS * TAKES < sum(hand.late) < 0.5 * PARTS * TAKES


def test_one_who_is_much_slower_makes_it_half_as_long_again_at_most():
    hand = Hand()
    hand.run(hand.gives(10 * TAKES))
    assert sum(hand.late) <= GRACE * PATIENCE + PARTS * TAKES / 2 + 1e-6
    assert hand.most_ahead > 1


def test_one_who_stands_still_is_waited_for_once():
    hand = Hand()
    hand.run(hand.gives(TAKES, stops=10))
    assert sum(hand.late) == pytest.approx(GRACE * PATIENCE, rel=0.1)


def test_one_who_is_at_the_door_is_waited_for_once():
    hand = Hand()
    hand.calls = 1
    hand.run()
    assert hand.late[0] == pytest.approx(GRACE * PATIENCE)
    assert not any(hand.late[1:])
