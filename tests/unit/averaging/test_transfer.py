"""The transfer of one round: what counts in which attempt, and what is exchanged again."""

from __future__ import annotations

import asyncio
import gc
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aiodist.averaging.transfer import Transfer
from aiodist.errors import PeerLostError
from aiodist.work import Work


class Links:
    """The group of member 0. `receives`: by source and tag. `sent`: the member and tag of each."""

    rank = 0

    def __init__(self) -> None:
        self._context = SimpleNamespace(ended=None, saved=lambda count: None)
        self.receives: dict[tuple[int, int], Work[Any]] = {}
        self.sent: list[tuple[int, int]] = []

    def recv(self, src: int, tag: int, out: Any, timeout: float) -> Work[Any]:
        work = self.receives[src, tag] = Work.begin(asyncio.get_running_loop(), "recv")
        return work

    def send(self, data: Any, to: int, tag: int, timeout: float) -> Work[Any]:
        self.sent.append((to, tag))
        work: Work[Any] = Work.begin(asyncio.get_running_loop(), "send")
        work.finish(None)
        return work


class Reducer:
    """Member 0 of a transfer of some members, each with this many equal values of its own."""

    def __init__(self, weights: list[float], count: int = 400, value: float = 1.0) -> None:
        self.links = Links()
        self.said: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        links: Any = self.links
        self.transfer = Transfer(
            links,
            weights,
            [np.full(count, value, np.float32)],
            ["float32"],
            codec=None,
            residuals=None,
            sums=False,
            report=lambda contributions, means: self.said.append((contributions, means)),
            failed=lambda error: None,
        )

    def owned_by(self, member: int) -> list[int]:
        return [at for at, owner in enumerate(self.transfer._owner) if owner == member]

    def come(self, source: int, tag: int, value: float) -> None:
        """What a member sends under a tag: equal values."""
        count = self.transfer._chunks[tag % len(self.transfer._chunks)].count
        self.links.receives[source, tag].finish(np.full(count, value, np.float32))

    def mean_comes(self, attempt: int, at: int, value: float) -> None:
        tag = (1 + attempt) * len(self.transfer._chunks) + at
        self.come(self.transfer._owner[at], tag, value)

    async def contributions_come(self, values: dict[int, float]) -> None:
        for at in self.owned_by(0):
            for source, value in values.items():
                self.come(source, at, value)
        await asyncio.sleep(0)


def test_a_mean_that_came_just_before_another_attempt_is_not_of_that_one(run):
    async def main():
        member = Reducer([1.0, 1.0, 1.0])
        transfer = member.transfer
        transfer.begin(0, [0, 1, 2])
        await member.contributions_come({1: 2.0, 2: 30.0})
        [at] = member.owned_by(1)
        member.mean_comes(0, at, 11.0)  # in the turn in which member 2 is left out
        transfer.begin(1, [0, 1])
        await asyncio.sleep(0)
        assert not transfer.is_held
        assert member.said[-1] == ((1,), ())
        member.mean_comes(1, at, 1.5)
        await asyncio.sleep(0)
        assert transfer.is_held
        assert set(transfer.results[0].tolist()) == {1.5}

    run(main())


def test_an_error_that_came_just_before_another_attempt_is_no_unseen_one(run):
    async def main():
        unseen: list[Any] = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: unseen.append(context))
        member = Reducer([1.0, 1.0, 1.0])
        member.transfer.begin(0, [0, 1, 2])
        for work in member.links.receives.values():
            work.fail(PeerLostError("rank 2 is lost", ranks=[2]))
        member.transfer.begin(1, [0, 1])
        await asyncio.sleep(0)
        member.links.receives.clear()
        del work, member
        gc.collect()
        assert unseen == []

    run(main())


def test_a_receiver_that_is_left_out_changes_nothing_for_the_others(run):
    async def main():
        member = Reducer([1.0, 1.0, 0.0])
        transfer = member.transfer
        transfer.begin(0, [0, 1, 2])
        await member.contributions_come({1: 2.0})
        [at] = member.owned_by(1)
        member.mean_comes(0, at, 1.5)
        await asyncio.sleep(0)
        sent = list(member.links.sent)
        said = member.said.copy()
        transfer.begin(0, [0, 1])
        assert transfer.is_held
        assert member.links.sent == sent
        assert member.said == [*said, ((1,), (1,))]  # a coordinator that is back hears it

    run(main())


def test_a_receiver_that_is_left_out_gets_no_means(run):
    async def main():
        member = Reducer([1.0, 1.0, 0.0])
        member.transfer.begin(0, [0, 1, 2])
        member.transfer.begin(0, [0, 1])
        await member.contributions_come({1: 2.0})
        assert [to for to, _ in member.links.sent] == [1, 1]

    run(main())


@pytest.mark.parametrize(
    ("weights", "values", "mean"),
    [
        ([1e39, 3e39], (1.0, 2.0), 1.75),
        ([1e308, 1e308], (1.0, 2.0), 1.5),
        ([1e-50, 1e-50], (1.0, 2.0), 1.5),
        ([5e-324, 5e-324], (1.0, 2.0), 1.5),
        ([1e-50, 1.0], (1.0, 2.0), 2.0),
        ([1e4, 1e4], (1e35, 1e35), np.float32(1e35)),
        ([1.0, 1.0], (3e38, 3e38), 3e38),
        ([1.5, 1.5], (3e38, -3e38), 0.0),
        ([3.0, 1.0], (-3.4e38, -3.4e38), -3.4e38),
        ([1.0, 3.0], (np.inf, 3e38), np.inf),
    ],
)
def test_weights_and_sums_need_not_be_in_the_range_of_float32(run, weights, values, mean):
    async def main():
        own, other = values
        member = Reducer(weights, value=own)
        member.transfer.begin(0, [0, 1])
        await member.contributions_come({1: other})
        [at] = member.owned_by(0)
        chunk = member.transfer._chunks[at]
        found = member.transfer.results[0][chunk.start : chunk.stop]
        np.testing.assert_allclose(found, mean, rtol=1e-6)

    run(main())


def test_the_mean_is_the_sum_divided_once(run):
    """Its bits do not depend on how weights are kept in range."""

    async def main():
        weights = [3.0, 7.0, 1000.0]
        member = Reducer(weights, value=0.1)
        member.transfer.begin(0, [0, 1, 2])
        await member.contributions_come({1: 0.7, 2: 1 / 3})
        [at] = member.owned_by(0)
        total = np.float32(0.1) * np.float32(3)
        total += np.float32(0.7) * np.float32(7)
        total += np.float32(1 / 3) * np.float32(1000)
        start = member.transfer._chunks[at].start
        assert member.transfer.results[0][start] == total / np.float32(1010)

    run(main())
