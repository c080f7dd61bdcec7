"""How much the publisher of a channel sends, however many take it: on simulated hosts."""

from __future__ import annotations

import asyncio
import random

import numpy as np
import pytest

import aiodist
from aiodist.channels import manifest
from aiodist.testing.simulation import Killed, Simulation

CHUNK = 1 << 14
PATIENCE = 2.0
SHAPE = (64, 400)
HOSTS = 16


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(manifest, "CHUNK", CHUNK)


def into(chance, sliced):
    """Memory for all of it, or for some columns."""
    if not sliced:
        return np.zeros(SHAPE, np.int32)
    count = chance.choice((1, 2, 4))
    at = chance.randrange(count)
    index = (slice(None), slice(SHAPE[1] * at // count, SHAPE[1] * (at + 1) // count))
    shape = (SHAPE[0], index[1].stop - index[1].start)
    return aiodist.Shard(np.zeros(shape, np.int32), index, SHAPE)


@pytest.mark.long
@pytest.mark.strength(1)
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("sliced", [False, True])
def test_the_publisher_sends_at_most_two_copies_where_nobody_dies(seed, sliced):
    """Whenever they come, though some stand still for a while, and the coordinator is restarted in
    the middle."""
    chance = random.Random(seed)
    sim = Simulation(1 + HOSTS, seed=seed, durable=bool(seed % 2))
    options = {"address": sim.address, "transports": ("tcp",), "patience": PATIENCE}
    left = HOSTS
    done = asyncio.Event()
    versions = 3
    sent = []

    async def publish():
        async with aiodist.publisher("policy", **options) as out:
            for version in range(1, versions + 1):
                w = np.full(SHAPE, version, np.int32)
                await out.publish({"w": w}, version=version)
                await asyncio.sleep(2)
                if version == 2:
                    sim.restart_coordinator(chance.uniform(0.1, 1.0))
            await done.wait()
            await asyncio.sleep(1)  # those it has met have left
            sent.append(out.bytes_sent)

    async def take(rank):
        nonlocal left
        await asyncio.sleep(chance.uniform(0, 4))
        async with aiodist.subscriber("policy", **options) as weights:
            memory = into(chance, sliced)
            array = getattr(memory, "array", memory)
            newest = 0
            while newest < versions:
                newest = await weights.latest(newer_than=newest, into={"w": memory})
                assert (array == newest).all()
            left -= 1
            if not left:
                done.set()
            await done.wait()
        return newest

    async def guarded(main):
        try:
            return await main
        except Exception:
            done.set()
            raise

    for rank in chance.sample(range(1, HOSTS + 1), 2):
        begins = chance.uniform(0, 6)
        sim.network.later_by(begins, sim.nodes[rank].stop)
        sim.network.later_by(begins + chance.uniform(0.1, 1.0), sim.nodes[rank].resume)
    mains = {rank: take(rank) for rank in range(1, HOSTS + 1)}
    outcomes = sim.play({rank: guarded(main) for rank, main in {0: publish(), **mains}.items()})
    assert outcomes == [None] + [versions] * HOSTS
    nbytes = 4 * SHAPE[0] * SHAPE[1]
    around = 512  # its manifest, and the numbers of chunks
    assert 0.5 * versions * nbytes < sent[0] <= 2 * versions * (nbytes + around)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(8))
def test_who_dies_at_90_percent_has_handed_on_most_of_it(seed):
    """The one behind it is on another host, and asks for what it lacks: a sixth of it at most is
    sent again, be the links as fast as they may."""
    sim = Simulation(3, seed=seed)
    options = {"address": sim.address, "transports": ("tcp",)}
    done = asyncio.Event()
    layers = 200
    values = {f"{at}": np.full(CHUNK // 4, at, np.int32) for at in range(layers)}

    async def publish():
        async with aiodist.publisher("policy", **options) as out:
            await out.publish(values, version=1)
            await done.wait()
            await asyncio.sleep(1)  # those it has met have left
            return out.bytes_sent

    async def dying():
        async with aiodist.subscriber("policy", **options) as weights:
            await weights.wait()
            have = 0
            async for _ in weights.stream(1):
                have += 1
                if have == 1:
                    begun.set()
                if have == 0.9 * layers:
                    sim.nodes[1].kill()

    async def behind():
        async with aiodist.subscriber("policy", **options) as weights:
            await begun.wait()
            _, got = await weights.latest()
            assert all(np.array_equal(got[key], values[key]) for key in values)
        done.set()

    begun = asyncio.Event()
    sent, died, outcome = sim.play({0: publish(), 1: dying(), 2: behind()})
    assert isinstance(died, Killed)
    assert outcome is None
    assert sent <= (1 + 1 / 6) * layers * CHUNK


@pytest.mark.parametrize("sliced", [False, True])
def test_calls_that_are_cancelled_every_moment_get_on(sliced):
    """What comes meanwhile is not lost, so nothing is sent twice."""
    sim = Simulation(5, seed=1)
    options = {"address": sim.address, "transports": ("tcp",), "patience": PATIENCE}
    done, left = asyncio.Event(), {1, 2, 3, 4}
    cancelled = []
    shape = (160, CHUNK // 16)

    async def publish():
        async with aiodist.publisher("policy", **options) as out:
            await out.publish({"w": np.ones(shape, np.int32)}, version=1)
            await done.wait()
            await asyncio.sleep(1)  # those it has met have left
            return out.bytes_sent

    async def take(rank):
        memory = np.zeros((shape[0], shape[1] // 2), np.int32)
        into = {"w": aiodist.Shard(memory, (slice(None), slice(shape[1] // 2)), shape)}
        async with aiodist.subscriber("policy", **options) as weights:
            await weights.wait()
            while rank in left:
                try:
                    await weights.latest(into=into if sliced else None, timeout=0.01)
                    left.discard(rank)
                except TimeoutError:
                    cancelled.append(rank)
            if not left:
                done.set()
            await done.wait()

    mains = {0: publish(), **{rank: take(rank) for rank in range(1, 5)}}
    sent, *outcomes = sim.play(mains, limit=100)
    assert outcomes == [None] * 4
    assert {*cancelled} == {1, 2, 3, 4}
    assert sent <= 1.1 * 4 * shape[0] * shape[1] / (2 if sliced else 1)
