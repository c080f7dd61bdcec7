"""Histories of channels whose participants die, stop and come, on simulated hosts."""

from __future__ import annotations

import asyncio
import random

import numpy as np
import pytest
from seeds import seeds

import aiodist
from aiodist.channels import manifest
from aiodist.testing.simulation import Killed, Simulation

CHUNK = 1 << 16
PATIENCE = 2.0


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(manifest, "CHUNK", CHUNK)


def tree(version, size=4 * CHUNK):
    return {"w": np.full(size // 4, version, np.int32), "b": np.arange(100) + version}


class Stage:
    """A channel on simulated hosts: 0 publishes, the others subscribe."""

    def __init__(self, size, seed=0, **options):
        self.sim = Simulation(size, seed=seed, **options)
        self.options = {"address": self.sim.address, "transports": ("tcp",), "patience": PATIENCE}
        self.seen = {}
        self.problems = []
        self.sim.extra_problems = lambda: self.problems
        self.memory = 0

    def publisher(self, **more):
        return aiodist.publisher("policy", **self.options, **more)

    def subscriber(self):
        return aiodist.subscriber("policy", **self.options)

    def note(self, rank, version, got):
        """`rank` was given that version."""
        before = self.seen.setdefault(rank, [])
        if before and version <= before[-1]:
            self.problems.append(f"rank {rank}: {version} came after {before[-1]}")
        before.append(version)
        expected = tree(version)
        if any(not np.array_equal(got[key], expected[key]) for key in expected):
            self.problems.append(f"rank {rank}: version {version} is mixed or damaged")

    def bounded(self, who, rank, most):
        held = sum(one.own_bytes > 0 for one in who._participant.stock.holdings.values())
        if held > most:
            self.problems.append(f"rank {rank} holds {held} versions")

    async def follow(self, rank, last, stay=0.0):
        """Take the newest version until `last` is there."""
        async with self.subscriber() as weights:
            async for version, got in weights:
                self.note(rank, version, got)
                self.bounded(weights, rank, 2)
                if version >= last:
                    break
            await asyncio.sleep(stay)
        return version

    async def publish(self, versions, pause=0.0, stay=30.0, **more):
        async with self.publisher(**more) as out:
            for version in versions:
                await out.publish(tree(version), version=version)
                self.bounded(out, 0, 2)
                await asyncio.sleep(pause)
            await asyncio.sleep(stay)
            return out.bytes_sent


def test_a_chain_of_hosts_takes_one_copy_from_the_publisher():
    stage = Stage(6)
    mains = {rank: stage.follow(rank, 1, stay=5.0) for rank in range(1, 6)}
    outcomes = stage.sim.play({0: stage.publish([1]), **mains})
    assert outcomes[1:] == [1] * 5
    nbytes = sum(array.nbytes for array in tree(1).values())
    assert nbytes <= outcomes[0] <= 1.1 * nbytes


@pytest.mark.parametrize("seed", range(3))
def test_every_second_one_dies_while_it_takes(seed):
    """Those behind it take from others, and ask only for what they lack. The publisher does not
    give the version a third time before they had time to ask the others."""
    stage = Stage(7, seed)

    async def dying(rank):
        async with stage.subscriber() as weights:
            await asyncio.sleep(1)
            async for _ in weights.stream(1):
                stage.sim.nodes[rank].kill()

    mains = {rank: dying(rank) if rank % 2 else stage.follow(rank, 1) for rank in range(1, 7)}
    outcomes = stage.sim.play({0: stage.publish([1]), **mains})
    assert [isinstance(one, Killed) for one in outcomes[1:]] == [True, False] * 3
    assert outcomes[2::2] == [1, 1, 1]


def test_the_publisher_dies_when_one_has_it_all():
    stage = Stage(4)
    has = asyncio.Event()

    async def first():
        async with stage.subscriber() as weights:
            version, got = await weights.latest()
            stage.note(1, version, got)
            stage.sim.nodes[0].kill()
            has.set()
            await asyncio.sleep(60)
        return version

    async def late(rank):
        await has.wait()
        return await stage.follow(rank, 1)

    outcomes = stage.sim.play({0: stage.publish([1]), 1: first(), 2: late(2), 3: late(3)})
    assert isinstance(outcomes[0], Killed)
    assert outcomes[1:] == [1, 1, 1]


def test_a_restarted_publisher_goes_on_with_higher_versions():
    stage = Stage(3)

    async def main():
        async with stage.publisher() as out:
            await out.publish(tree(5), version=5)
            await asyncio.sleep(1)
            stage.sim.nodes[0].kill("silent")
            await asyncio.sleep(1)

    async def again():
        await asyncio.sleep(2)
        async with stage.publisher() as out:
            assert out.newest == 5
            with pytest.raises(ValueError, match="the newest is 5"):
                await out.publish(tree(4), version=5)
            await out.publish(tree(6), version=6)
            await asyncio.sleep(20)

    outcomes = stage.sim.play({0: main(), 1: stage.follow(1, 6), 2: again()})
    assert outcomes[1:] == [6, None]
    assert stage.seen[1] == [5, 6]


def test_two_publishers():
    stage = Stage(2)

    async def second():
        await asyncio.sleep(1)
        with pytest.raises(aiodist.JoinError, match="has a publisher already"):
            async with stage.publisher():
                pass

    stage.sim.play({0: stage.publish([1]), 1: second()})


@pytest.mark.parametrize("durable", [True, False])
def test_the_coordinator_restarts_in_the_middle(durable):
    stage = Stage(4, durable=durable)

    async def restart():
        await asyncio.sleep(1.05)
        stage.sim.restart_coordinator(0.5)

    async def first():
        task = asyncio.ensure_future(restart())
        await stage.publish(range(1, 6), pause=0.5, stay=20)
        await task

    stage.sim.play({0: first(), **{rank: stage.follow(rank, 5) for rank in (1, 2, 3)}})
    assert all(seen[-1] == 5 for seen in stage.seen.values())


@pytest.mark.parametrize("seed", seeds(2, 8))
def test_random_histories(seed):
    """Publishers and subscribers die, stop and come again, the coordinator restarts: whoever lives
    gets the newest version in the end."""
    chance = random.Random(seed)
    size, last = 7, 8
    stage = Stage(size, seed=seed, durable=chance.random() < 0.5)
    nodes = stage.sim.nodes
    spare = list(range(4, size))

    async def publish():
        await stage.publish(range(1, last + 1), pause=0.5, stay=60)

    async def faults(rank):
        """Rank 1 never dies: it sees to the rest."""
        following = asyncio.ensure_future(stage.follow(rank, last))
        for _ in range(4):
            await asyncio.sleep(chance.uniform(0.1, 1.0))
            what = chance.choice(["kill", "stop", "coordinator", "nothing"])
            victim = nodes[chance.choice((2, 3))]
            if what == "kill":
                victim.kill(chance.choice(["reset", "silent"]))
            elif what == "stop" and victim.alive:
                stage.sim.network.later_by(chance.uniform(1, 6), victim.stop())
            elif what == "coordinator":
                stage.sim.restart_coordinator(chance.uniform(0.1, 1.0))
        return await following

    async def late(rank):
        await asyncio.sleep(chance.uniform(0, 3))
        return await stage.follow(rank, last)

    mains = {0: publish(), 1: faults(1), 2: stage.follow(2, last), 3: stage.follow(3, last)}
    outcomes = stage.sim.play({**mains, **{rank: late(rank) for rank in spare}})
    for rank, outcome in enumerate(outcomes[1:], 1):
        assert outcome == last or isinstance(outcome, Killed), (rank, outcome)


@pytest.mark.parametrize("seed", seeds(2, 4))
def test_random_publishers(seed):
    """One publisher after the other dies, and the next one goes on with higher versions."""
    chance = random.Random(seed)
    stage = Stage(7, seed=seed)
    nodes = stage.sim.nodes
    last, done = 12, asyncio.Event()
    published = [0]  # what a trainer knows from its checkpoint

    async def trainer(rank):
        async with stage.publisher() as out:
            more = True  # what the one before had published last, nobody else may have
            while more or published[0] < last:
                more = False
                published[0] = max(published[0], out.newest or 0) + 1
                await out.publish(tree(published[0]), version=published[0])
                await asyncio.sleep(0.3)
            await done.wait()
        return rank

    async def next_one(rank, seconds):
        await asyncio.sleep(seconds)
        nodes[rank - 1].kill(chance.choice(["reset", "silent"]))
        return await trainer(rank)

    async def faults(rank):
        following = asyncio.ensure_future(stage.follow(rank, last))
        for _ in range(3):
            await asyncio.sleep(chance.uniform(0.5, 3.0))
            if chance.random() < 0.4:
                stage.sim.restart_coordinator(chance.uniform(0.1, 1.0))
            elif nodes[6].alive:
                stage.sim.network.later_by(chance.uniform(1, 25), nodes[6].stop())
        return await following

    async def main():
        await asyncio.gather(
            *(stage.sim.nodes[rank].spawn(stage.follow(rank, last)) for rank in (4, 5, 6)),
            faults(3),
        )
        done.set()

    mains = {0: trainer(0), 1: next_one(1, 1.5), 2: next_one(2, 12.0), 3: main()}
    outcomes = stage.sim.play(mains)
    assert isinstance(outcomes[0], Killed)
    assert isinstance(outcomes[1], Killed) or outcomes[1] == 1
    assert outcomes[2:] == [2, None]
    assert all(seen[-1] >= last for seen in stage.seen.values())
    assert {*stage.seen} == {3, 4, 5, 6}
