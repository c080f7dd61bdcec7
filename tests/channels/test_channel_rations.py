"""What a publisher sends where everybody turns to it: twice of what is wanted of a version, unless
nobody else has it any more."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from channel_stage import ChannelStage

import aiodist
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


def comings(participant):
    return [*participant.stock.holdings.values(), *participant.stock.lots.values()]


class Stage(ChannelStage):
    """`sliced`: rank 1 wants three quarters, those of even ranks the first two of them, the others
    the last two."""

    def __init__(self, size, *, sliced):
        super().__init__(size, seed=1)
        self.sliced = sliced
        self.wanted = W.nbytes * 3 / 4 if sliced else W.nbytes

    def into(self, rank):
        if not self.sliced:
            return {"w": np.zeros_like(W)}
        quarter = len(W) // 4
        first, last = (0, 3) if rank == 1 else (rank % 2, rank % 2 + 2)
        index = slice(first * quarter, last * quarter)
        own = np.zeros(index.stop - index.start, np.int32)
        return {"w": aiodist.Shard(own, (index,), W.shape)}

    async def publish(self):
        """How many times what is wanted was sent."""
        async with self.publisher() as out:
            await out.publish({"w": W}, version=1)
            await self.done.wait()
            await asyncio.sleep(5)  # those it has met have left
            return out.bytes_sent / self.wanted

    async def begun(self, weights):
        """What comes of the version."""
        while not (found := comings(weights._participant)):  # noqa: ASYNC110
            await asyncio.sleep(1e-4)
        return found[0]

    async def dying(self, rank, dies=lambda: None):
        """Takes most of it, and dies."""
        async with self.subscriber() as weights:
            taking = asyncio.ensure_future(weights.latest(into=self.into(rank)))
            coming = await self.begun(weights)
            while coming.here < 0.9 * (W.nbytes / 2 if self.sliced else W.nbytes):
                await coming.news()
            dies()
            self.sim.nodes[rank].kill()
            await taking

    async def take(self, weights, rank):
        into = self.into(rank)
        await weights.latest(into=into)
        if self.sliced:
            assert np.array_equal(into["w"].array, W[into["w"].index])
        else:
            assert np.array_equal(into["w"], W)


@pytest.mark.parametrize("sliced", [False, True])
@pytest.mark.usefixtures("publishers_first")
def test_those_who_are_refused_take_it_from_each_other(sliced):
    stage = Stage(9, sliced=sliced)
    left = {*range(1, 9)}

    async def main(rank):
        async with stage.subscriber() as weights:
            await stage.take(weights, rank)
            left.discard(rank)
            if not left:
                stage.done.set()
            await stage.done.wait()

    sent, *_ = stage.play({0: stage.publish(), **{rank: main(rank) for rank in range(1, 9)}})
    assert sent <= 2.05  # and what is said beside the weights


@pytest.mark.parametrize("sliced", [False, True])
@pytest.mark.usefixtures("publishers_first")
def test_those_who_die_cost_nothing_more_where_somebody_has_it(sliced):
    stage = Stage(9, sliced=sliced)

    has, dying = asyncio.Event(), {*range(2, 8)}
    all_died = asyncio.Event()

    async def first():
        async with stage.subscriber() as weights:
            await stage.take(weights, 1)
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
            await stage.take(weights, 1)
        stage.done.set()

    mains = {rank: victim(rank) for rank in range(2, 8)}
    sent, _, *died, _ = stage.play({0: stage.publish(), 1: first(), **mains, 8: last()})
    assert [isinstance(one, Killed) for one in died] == [True] * 6
    assert sent <= 2.05  # and what is said beside the weights


def test_slices_of_a_version_are_not_taken_for_the_whole():
    """Rank 1 has most of the version as slices, and rank 2 left with all of it. The publisher gives
    it again, because no other has the whole."""
    stage = Stage(4, sliced=False)
    stage.wanted = W.nbytes
    begun, gone, one_done = asyncio.Event(), asyncio.Event(), asyncio.Barrier(2)

    async def both():
        async with stage.subscriber() as weights:
            most = len(W) * 19 // 20
            into = aiodist.Shard(np.zeros(most, np.int32), (slice(most),), W.shape)
            await weights.latest(into={"w": into})
            begun.set()
            await gone.wait()
            await stage.take(weights, 1)
            await one_done.wait()

    async def leaves():
        await begun.wait()
        async with stage.subscriber() as weights:
            await stage.take(weights, 2)
        gone.set()

    async def late():
        async with stage.subscriber() as weights:
            await gone.wait()
            await stage.take(weights, 3)
            await one_done.wait()
        stage.done.set()

    sent, *_ = stage.play({0: stage.publish(), 1: both(), 2: leaves(), 3: late()})
    assert 2 < sent < 3.05


@pytest.mark.parametrize("sliced", [False, True])
def test_what_nobody_else_has_any_more_is_sent_again(sliced):
    """There is no other way for them to get it."""
    stage = Stage(6, sliced=sliced)

    async def one_after_the_other(rank):
        await asyncio.sleep(20 * rank)
        await stage.dying(rank)

    async def last():
        await asyncio.sleep(120)
        async with stage.subscriber() as weights:
            await stage.take(weights, 1)
        stage.done.set()

    mains = {rank: one_after_the_other(rank) for rank in range(1, 5)}
    sent, *died, _ = stage.play({0: stage.publish(), **mains, 5: last()})
    assert [isinstance(one, Killed) for one in died] == [True] * 4
    assert 3 < sent < 5.1
