"""Numbers of versions only grow, whoever is there. On simulated hosts."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import numpy as np
import pytest
from channel_stage import ChannelStage

import aiodist


def tree(version):
    return {"w": np.full(1000, version)}


@pytest.mark.parametrize("restarts", [False, True])
def test_they_grow_while_nobody_is_in_the_channel(restarts):
    stage = ChannelStage(2, durable=restarts)

    async def main():
        async with stage.publisher() as out:
            assert out.newest is None
            for version in (49, 50):
                await out.publish(tree(version), version=version)
        if restarts:
            stage.sim.restart_coordinator(0.5)
        async with stage.publisher(keep=1) as out:
            assert out.newest == 50
            with pytest.raises(ValueError, match="the newest is 50"):
                await out.publish(tree(7), version=7)
            with pytest.raises(ValueError, match="its bytes are others"):
                await out.publish(tree(7), version=50)
            await out.publish(tree(50), version=50)
        async with stage.publisher() as out:
            await out.publish(tree(51), version=51)
            assert out.newest == 51

    stage.play({0: main()})


def test_a_version_that_is_there_is_published_again():
    """By the same publisher, and by the next one. Who has it already is given nothing new."""
    stage = ChannelStage(3)
    given = []

    async def follow():
        async with stage.subscriber() as weights:
            async for version, got in weights:
                given.append(version)
                assert np.array_equal(got["w"], tree(version)["w"])
                if version == 6:
                    break

    async def main():
        for _ in range(2):
            async with stage.publisher() as out:
                for _ in range(2):
                    await out.publish(tree(5), version=5)
                    await asyncio.sleep(1)
                with pytest.raises(ValueError, match="its bytes are others"):
                    await out.publish(tree(4), version=5)
        async with stage.publisher() as out:
            # One that comes now gets the bytes of before.
            await out.publish(tree(5), version=5)
            async with stage.subscriber() as late:
                assert (await late.latest())[0] == 5
            await out.publish(tree(6), version=6)
            await asyncio.sleep(5)

    stage.play({0: main(), 1: follow()})
    assert given == [5, 6]


def test_what_is_published_again_in_shares():
    stage = ChannelStage(2)

    async def publish(share):
        async with stage.publisher(part=(share, 2)) as out:
            assert out.newest is None
            await out.publish({str(share): tree(3)}, version=3)
            await asyncio.sleep(1)
        await asyncio.sleep(share)
        async with stage.publisher(part=(share, 2)) as out:
            assert out.newest == 3
            await out.publish({str(share): tree(3)}, version=3)
            with pytest.raises(ValueError, match="the newest is 3"):
                await out.publish({str(share): tree(2)}, version=2)
            await out.publish({str(share): tree(4)}, version=4)
            await asyncio.sleep(3)
            assert out.newest == 4

    stage.play({0: publish(0), 1: publish(1)})


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("after", [2, 3])
def test_a_job_that_ends_in_the_middle_of_a_version_publishes_it_anew(after, restarts):
    """With other bytes, and maybe in another number of parts. Only one of two parts of version 2
    was published, so no subscriber has any of it."""
    stage = ChannelStage(2, durable=restarts)
    has = asyncio.Event()

    async def publish(outs, version, x):
        for at, out in enumerate(outs):
            await out.publish({str(at): tree(x)}, version=version)

    async def train():
        async with stage.publisher(part=(0, 2)) as first, stage.publisher(part=(1, 2)) as second:
            await publish([first, second], 1, 1)
            await has.wait()
            await publish([first], 2, 2)
        if restarts:
            stage.sim.restart_coordinator(0.5)
        async with AsyncExitStack() as job:
            parts = [stage.publisher(part=(at, after)) for at in range(after)]
            outs = [await job.enter_async_context(part) for part in parts]
            assert [out.newest for out in outs] == [1] * after
            await publish(outs, 2, 7)
            await stage.done.wait()
            assert [out.newest for out in outs] == [2] * after

    async def follow():
        async with stage.subscriber() as weights:
            assert (await weights.latest())[0] == 1
            has.set()
            version, got = await weights.latest(newer_than=1)
            assert version == 2
            assert all(np.array_equal(got[str(at)]["w"], tree(7)["w"]) for at in range(after))
        stage.done.set()

    stage.play({0: train(), 1: follow()})


@pytest.mark.parametrize("shares", [1, 2])
def test_they_begin_anew_when_no_subscriber_lives(shares):
    stage = ChannelStage(2 + shares)
    may_go, gone = asyncio.Event(), asyncio.Event()

    async def follow():
        async with stage.subscriber() as weights:
            assert (await weights.latest())[0] == 50
            may_go.set()
            await asyncio.sleep(12)
        gone.set()
        await asyncio.sleep(10)
        async with stage.subscriber() as weights:
            version, got = await weights.latest()
            assert np.array_equal(got["0"]["w"], tree(0)["w"])
            return version

    async def publish(share):
        part = (share, shares)
        async with stage.publisher(part=part) as out:
            await out.publish({str(share): tree(50)}, version=50)
            await may_go.wait()
        with pytest.raises(aiodist.JoinError, match=r"there are subscribers \(1\)"):
            async with stage.publisher(part=part, restart=True):
                pass
        await gone.wait()
        async with stage.publisher(part=part, restart=True) as out:
            assert out.newest is None
            await out.publish({str(share): tree(0)}, version=0)
            await asyncio.sleep(5)
            assert out.newest == 0
            await asyncio.sleep(20)

    outcomes = stage.play({0: follow(), **{1 + share: publish(share) for share in range(shares)}})
    assert outcomes[0] == 0


@pytest.mark.parametrize("is_whole", [False, True])
def test_slices_never_mix_versions_of_one_number(is_whole):
    """A subscriber was stopped while the numbers began anew. It still has the old version when
    another one wants slices of the new one."""
    stage = ChannelStage(3)
    has, has_anew, is_back = (asyncio.Event() for _ in range(3))
    places = []

    def half():
        return {"w": aiodist.Shard(np.zeros(500, int), (slice(500),), (1000,))}

    def comings(weights):
        stock = weights._participant.stock
        return [*stock.holdings.values(), *stock.lots.values()]

    async def first():
        async with stage.subscriber(lease=5.0) as weights:
            await weights.latest(into=None if is_whole else half())
            await weights._fetching.stay()  # it is in the line of the version
            has.set()
            stage.sim.nodes[0].stop()
            await has_anew.wait()
            (old,) = [one.identity for one in comings(weights)]
            await weights._participant.store.stand_in_line(7, places[0])
            is_back.set()
            await stage.done.wait()
            assert [one.identity for one in comings(weights)] == [old]

    async def train():
        async with stage.publisher() as out:
            await out.publish(tree(1), version=7)
            await has.wait()
            places.extend(await out._participant.store.line(7))
            assert len(places) == 1
        await asyncio.sleep(10)  # its lease is over
        async with stage.publisher(restart=True) as out:
            left = await out._participant.store.line(7)
            await out.publish(tree(2), version=7)
            has_anew.set()
            stage.sim.nodes[0].resume()
            await stage.done.wait()
        assert not left

    async def late():
        await is_back.wait()
        async with stage.subscriber() as weights:
            into = half()
            await weights.latest(into=into)
            assert (into["w"].array == 2).all()
        stage.done.set()

    stage.play({0: first(), 1: train(), 2: late()})


def test_a_subscriber_that_was_killed_is_no_hindrance():
    stage = ChannelStage(2)
    has = asyncio.Event()

    async def follow():
        async with stage.subscriber() as weights:
            await weights.latest()
            has.set()
            stage.sim.nodes[0].kill()
            await asyncio.sleep(60)

    async def publish():
        async with stage.publisher() as out:
            await out.publish(tree(50), version=50)
            await has.wait()
        await asyncio.sleep(0.5)
        async with stage.publisher(restart=True) as out:
            await out.publish(tree(0), version=0)

    stage.play({0: follow(), 1: publish()})


def test_a_publisher_that_another_one_stood_in_for():
    """It was stopped for long, and has its place again after a restart of the coordinator. Then it
    knows what the other one has published."""
    stage = ChannelStage(2, durable=True)
    sim = stage.sim

    async def first():
        async with stage.publisher() as out:
            await out.publish(tree(1), version=1)
            await asyncio.sleep(0.1)
            sim.nodes[0].stop()
            sim.network.later_by(12.0, sim.nodes[0].resume)
            await asyncio.sleep(30.0)
            with pytest.raises(ValueError, match="the newest is 2"):
                await out.publish(tree(7), version=2)
            await out.publish(tree(3), version=3)

    async def second():
        await asyncio.sleep(6.0)
        async with stage.publisher() as out:
            await out.publish(tree(2), version=2)
        sim.restart_coordinator(0.5)

    stage.play({0: first(), 1: second()})


def test_they_may_be_numbers_of_numpy():
    stage = ChannelStage(2)
    seven = np.int64(7)

    async def give():
        async with stage.publisher() as out:
            await out.publish(tree(7), version=seven, lend=True)
            assert type(out.newest) is int
            async for hosts in out.acknowledged(seven):
                if hosts:
                    break
            await out.take_back(seven)
            assert not out._lent

    async def take():
        async with stage.subscriber() as weights:
            assert await weights.wait(newer_than=seven - 1) == 7
            version, got = await weights.latest(newer_than=seven - 1)
            assert type(version) is int and np.array_equal(got["w"], tree(7)["w"])
            assert not await weights.changed(seven, since=seven)
            assert [name async for name, _ in weights.stream(seven)] == ["w"]
            await weights.acknowledge(seven)

    stage.play({0: give(), 1: take()})
