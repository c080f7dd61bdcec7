"""What a publisher sends where everybody turns to it: twice the size of a version, unless nobody
else has it any more."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from channel_stage import ChannelStage

from aiodist.channels import directory, manifest
from aiodist.testing.simulation import Killed

CHUNK = 1 << 14
W = np.arange(50 * CHUNK // 4, dtype=np.int32)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(manifest, "CHUNK", CHUNK)


@pytest.fixture
def publishers_first(monkeypatch):
    """Everybody asks the publisher, whoever else there is."""
    sources = directory.sources

    def wrong(places, me, publishers, *, maps=True):
        others = sources(places, me, publishers, maps=maps)
        return [*publishers, *(one for one in others if one not in publishers)]

    monkeypatch.setattr(directory, "sources", wrong)


class Stage(ChannelStage):
    async def publish(self):
        """How many times the version was sent."""
        async with self.publisher() as out:
            await out.publish({"w": W}, version=1)
            await self.done.wait()
            await asyncio.sleep(5)  # those it has met have left
            return out.bytes_sent / W.nbytes

    async def dying(self, rank, dies=lambda: None):
        """Takes most of it, and dies."""
        async with self.subscriber() as weights:
            await weights.wait()
            holding = weights._fetching.holding(weights._participant.releases[-1])
            taking = asyncio.ensure_future(weights.latest())
            while holding.filled < 45:
                await holding.news()
            dies()
            self.sim.nodes[rank].kill()
            await taking

    async def take(self, weights):
        _, got = await weights.latest()
        assert np.array_equal(got["w"], W)


@pytest.mark.usefixtures("publishers_first")
def test_those_who_are_refused_take_it_from_each_other():
    stage = Stage(9)
    left = {*range(1, 9)}

    async def main(rank):
        async with stage.subscriber() as weights:
            await stage.take(weights)
            left.discard(rank)
            if not left:
                stage.done.set()
            await stage.done.wait()

    sent, *_ = stage.play({0: stage.publish(), **{rank: main(rank) for rank in range(1, 9)}})
    assert sent <= 2.05  # and what is said beside the weights


@pytest.mark.usefixtures("publishers_first")
def test_those_who_die_cost_nothing_more_where_somebody_has_it():
    stage = Stage(9)

    has, dying = asyncio.Event(), {*range(2, 8)}
    all_died = asyncio.Event()

    async def first():
        async with stage.subscriber() as weights:
            await stage.take(weights)
            has.set()
            await stage.done.wait()

    async def victim(rank):
        def dies():
            dying.discard(rank)
            if not dying:
                all_died.set()

        await has.wait()
        await stage.dying(rank, dies)

    async def last():
        await all_died.wait()
        async with stage.subscriber() as weights:
            await stage.take(weights)
        stage.done.set()

    mains = {rank: victim(rank) for rank in range(2, 8)}
    sent, _, *died, _ = stage.play({0: stage.publish(), 1: first(), **mains, 8: last()})
    assert [isinstance(one, Killed) for one in died] == [True] * 6
    assert sent <= 2.05  # and what is said beside the weights


def test_what_nobody_else_has_any_more_is_sent_again():
    """There is no other way for them to get it."""
    stage = Stage(6)

    async def one_after_the_other(rank):
        await asyncio.sleep(20 * rank)
        await stage.dying(rank)

    async def last():
        await asyncio.sleep(120)
        async with stage.subscriber() as weights:
            await stage.take(weights)
        stage.done.set()

    mains = {rank: one_after_the_other(rank) for rank in range(1, 5)}
    sent, *died, _ = stage.play({0: stage.publish(), **mains, 5: last()})
    assert [isinstance(one, Killed) for one in died] == [True] * 4
    assert 3 < sent < 5.1
