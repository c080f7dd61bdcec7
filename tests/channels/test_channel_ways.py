"""Histories in which versions are published, lent, and taken in every way there is, while
participants die, stop and come, and the coordinator restarts: on simulated hosts."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress

import numpy as np
import pytest
from channel_stage import ChannelStage
from seeds import seeds

import aiodist
from aiodist.channels import manifest
from aiodist.testing.simulation import Killed

CHUNK = 1 << 14
ROWS, COLUMNS = 16, CHUNK // 16
LAST = 6
WAYS = ("latest", "into", "in_place", "slices", "sliced in place", "stream")
KEEP = 2


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(manifest, "CHUNK", CHUNK)


def tree(version):
    return {"w": np.full((ROWS, COLUMNS), version, np.int32), "b": np.full(100, version, np.int32)}


NBYTES = sum(array.nbytes for array in tree(0).values())


class Stage(ChannelStage):
    """Ranks 0 and 1 publish, one after the other; the others take."""

    def __init__(self, size, seed, **options):
        super().__init__(size, seed=seed, **options)
        self.chance = random.Random(seed)
        self.published = 0  # what a trainer knows from its checkpoint
        self.seen = {}
        self.ways = set()

    def check_memory(self, who, versions):
        """`versions`: so many of them may be here."""
        stock = who._participant.stock
        comings = [*stock.holdings.values(), *stock.lots.values()]
        assert len(stock.holdings) <= versions
        # The slices of one version more are kept for differences.
        assert len({one.version for one in stock.lots.values()}) <= versions + 1
        # The same version may be here as a whole, and some of it as a slice.
        assert sum(one.own_bytes for one in comings) <= 2 * versions * (NBYTES + CHUNK)

    async def publish(self, last):
        async with self.publisher(keep=KEEP) as out:
            lent = {}
            while self.published < last:
                self.published = max(self.published, out.newest or 0) + 1
                version, x = self.published, tree(self.published)
                lends = self.chance.random() < 0.4
                while True:
                    try:
                        await out.publish(x, version=version, lend=lends)
                        break
                    except aiodist.CollectiveTimeoutError:  # the coordinator is away
                        self.published = version = max(version, out.newest or 0) + 1
                        x = tree(version)
                for old in [*lent]:
                    await out.take_back(old)
                    lent.pop(old)["w"].fill(-1)  # it is ours again
                if lends:
                    lent[version] = x
                else:
                    x["w"].fill(-1)
                self.check_memory(out, KEEP + 1)
                await asyncio.sleep(self.chance.uniform(0.1, 1.0))
            await self.done.wait()

    async def take(self, rank):
        """Until there is the last one."""
        given = 0
        async with self.subscriber() as weights:
            while given < LAST:
                way = self.chance.choice(WAYS)
                with suppress(ValueError):  # a version to be streamed is gone by now
                    given = await self.one(rank, weights, way, given)
                self.check_memory(weights, 2)
            await asyncio.sleep(5)
        return given

    async def one(self, rank, weights, way, given):
        if way == "stream":
            newest = await weights.wait(newer_than=given)
            arrays = {name: array async for name, array in weights.stream(newest)}
            version = newest
        else:
            arrays = tree(-1)
            into = arrays
            if "slice" in way:
                half = arrays.pop("w")[:, : COLUMNS // 2].copy()
                arrays = {"w": half}
                index = (slice(None), slice(COLUMNS // 2))
                into = {"w": aiodist.Shard(half, index, (ROWS, COLUMNS))}
            if way == "latest":
                version, arrays = await weights.latest(newer_than=given)
            else:
                in_place = "place" in way
                version = await weights.latest(newer_than=given, into=into, in_place=in_place)
                assert weights.mixed is None or not in_place
        assert version > given, f"rank {rank}: {way}: {version} came after {given}"
        for array in arrays.values():
            assert (array == version).all(), f"rank {rank}: {way}: {version} is {np.unique(array)}"
        self.ways.add(way)
        return version

    async def faults(self, victims):
        nodes = self.sim.nodes
        for _ in range(6):
            await asyncio.sleep(self.chance.uniform(0.1, 1.0))
            what = self.chance.choice(["kill", "stop", "stop", "coordinator"])
            victim = nodes[self.chance.choice(victims)]
            if what == "kill":
                victim.kill(self.chance.choice(["reset", "silent"]))
            elif what == "stop" and victim.alive:
                self.sim.network.later_by(self.chance.uniform(0.5, 6), victim.stop())
            elif what == "coordinator":
                self.sim.restart_coordinator(self.chance.uniform(0.1, 1.0))


@pytest.mark.parametrize("seed", seeds(3, 40))
def test_versions_only_grow_and_are_never_mixed_and_memory_is_bounded(seed):
    stage = Stage(7, seed, durable=bool(seed % 2))

    async def first():
        await stage.publish(LAST)

    async def second():
        """Publishes from where the first one was killed."""
        await asyncio.sleep(stage.chance.uniform(0.5, 2.0))
        stage.sim.nodes[0].kill(stage.chance.choice(["reset", "silent"]))
        # It publishes one more in any case, because the last one may have died with the first.
        await stage.publish(max(LAST, stage.published + 1))

    async def main():
        """Rank 2 never dies: it sees to the rest."""
        faults = asyncio.ensure_future(stage.faults([3, 4, 5]))
        late = stage.sim.nodes[6].spawn(stage.take(6))
        given = await stage.take(2)
        await asyncio.gather(faults, late)
        await asyncio.sleep(15)  # until then those that stood still have it, too
        stage.done.set()
        return given

    mains = {rank: stage.take(rank) for rank in (3, 4, 5)}
    outcomes = stage.play({0: first(), 1: second(), 2: main(), **mains})
    assert isinstance(outcomes[0], Killed)
    assert outcomes[2] >= LAST
    for outcome in outcomes[3:]:
        assert isinstance(outcome, Killed) or outcome is None or outcome >= LAST
    assert stage.ways
