"""How long a participant looks for a version that no other participant has, or few of them, on
lines of 50 ms. All seconds are virtual ones of the simulation."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import numpy as np
import pytest
from channel_stage import ChannelStage, line

from aiodist import Shard
from aiodist.channels import directory, manifest, window
from aiodist.channels.search import NobodyError
from aiodist.channels.slicing import Slicing
from aiodist.testing.simulation import Killed

MIB = 1 << 20
DELAY = 0.05
TRIP = 2 * DELAY
LINE = line(12.5e6, DELAY)
NBYTES = MIB // 4
SHAPE = (8, NBYTES // 8)


def array(version):
    return np.full(SHAPE, version, np.uint8)


class Searching(ChannelStage):
    """A trainer is killed just after it has published version 3, and another one begins. Version 2
    is whole at each of `servers`, which want version 3, too."""

    def __init__(self, servers, *, sliced=False):
        super().__init__(servers + 2, seed=1, conditions=LINE)
        self.options["patience"] = 5.0
        self.servers = servers
        self.sliced = sliced
        self.killed = asyncio.Event()
        self.have = [0] * 4
        self.news = asyncio.Condition()

    async def latest(self, weights, number, newer_than=-1):
        if not self.sliced:
            version, got = await weights.latest(newer_than=newer_than)
        else:
            got, first = np.zeros((4, SHAPE[1]), np.uint8), 2 * (number % 2)
            into = Shard(got, (slice(first, first + 4), slice(0, SHAPE[1])), SHAPE)
            version = await weights.latest(newer_than=newer_than, into=into)
        assert (got == version).all()
        return version

    async def train(self):
        async with self.publisher() as out:
            await asyncio.sleep(2)  # all have come
            for version in (1, 2):
                await out.publish(array(version), version=version)
                async with self.news:
                    await self.news.wait_for(
                        lambda version=version: self.have[version] == self.servers
                    )
            await asyncio.sleep(1)
            await out.publish(array(3), version=3)
            self.sim.network.later_by(DELAY / 2, self.sim.nodes[self.servers].kill)
            self.sim.network.later_by(DELAY / 2, self.killed.set)
            await asyncio.sleep(10)

    async def train_again(self):
        clock = self.sim.loop.time
        await self.killed.wait()
        async with self.publisher(), self.subscriber() as weights:
            begin = clock()
            version = await self.latest(weights, 0)
            self.done.set()
            return version, clock() - begin

    async def serve(self, number):
        async with self.subscriber() as weights:
            for version in (1, 2):
                assert await self.latest(weights, number, version - 1) == version
                self.have[version] += 1
                async with self.news:
                    self.news.notify_all()
            follow = asyncio.create_task(self.latest(weights, number, 2))
            await self.done.wait()
            follow.cancel()
            await asyncio.gather(follow, return_exceptions=True)

    def seconds(self):
        mains = {number: self.serve(number) for number in range(self.servers)}
        mains |= {self.servers: self.train(), self.servers + 1: self.train_again()}
        *_, trainer, (version, seconds) = self.play(mains)
        assert isinstance(trainer, Killed)
        assert version == 2
        return seconds


@pytest.mark.parametrize(("sliced", "trips"), [(False, 20), (True, 40)])
def test_a_version_that_no_participant_has_takes_as_long_for_any_number_of_them(sliced, trips):
    few, many = (Searching(servers, sliced=sliced).seconds() for servers in (2, 5))
    # The older version comes over two or three meetings, which take most of these trips.
    assert max(few, many) < trips * TRIP
    assert abs(few - many) < 2 * TRIP


def test_a_version_that_is_published_again_is_found_at_once():
    """The new trainer had said before that it does not have the version."""
    stage = Searching(2)
    clock = stage.sim.loop.time

    async def train_again():
        await stage.killed.wait()
        async with stage.publisher() as out:
            await asyncio.sleep(4)  # all have stopped waiting for the one that died
            begin = clock()
            await out.publish(array(3), version=3)
            await stage.done.wait()
            return begin

    async def serve(number):
        async with stage.subscriber() as weights:
            for version in (1, 2):
                await stage.latest(weights, number, version - 1)
                stage.have[version] += 1
                async with stage.news:
                    stage.news.notify_all()
            assert await stage.latest(weights, number, 2) == 3
            end = clock()
            stage.have[3] += 1
            if stage.have[3] == stage.servers:
                stage.done.set()
            await stage.done.wait()
            return end

    mains = {0: serve(0), 1: serve(1), 2: stage.train(), 3: train_again()}
    *ends, _, begin = stage.play(mains)
    assert max(ends) - begin < 17 * TRIP


class Idle(ChannelStage):
    """`servers` have given up on a version, each with its first part or two. Another one comes."""

    def __init__(self, servers):
        super().__init__(servers + 2, seed=1, conditions=line(2.5e5, DELAY))
        self.options["patience"] = 5.0
        self.servers = servers
        self.idle = 0

    async def train(self):
        async with self.publisher() as out:
            await out.publish(array(1), version=1)
            await self.done.wait()

    async def give_up(self, number):
        await asyncio.sleep(2 + 3 * number)
        async with self.subscriber() as weights:
            with suppress(TimeoutError):
                await weights.latest(timeout=1.5)
            assert 0 < weights.arrived.here < weights.arrived.nbytes
            self.idle += 1
            await self.done.wait()

    async def come(self):
        clock = self.sim.loop.time
        await asyncio.sleep(4 + 3 * self.servers)
        assert self.idle == self.servers
        async with self.subscriber() as weights:
            begin = clock()
            _, got = await weights.latest()
            assert (got == 1).all()
            self.done.set()
            return clock() - begin

    def seconds(self):
        mains = {number: self.give_up(number) for number in range(self.servers)}
        mains |= {self.servers: self.train(), self.servers + 1: self.come()}
        return self.play(mains)[-1]


def test_participants_that_have_given_up_are_not_asked_in_turn(monkeypatch):
    monkeypatch.setattr(manifest, "CHUNK", 1 << 12)
    monkeypatch.setattr(window, "WINDOW", 1 << 14)
    few, many = Idle(2).seconds(), Idle(5).seconds()
    assert abs(few - many) < 2 * TRIP


@pytest.mark.parametrize("sliced", [False, True])
def test_a_version_that_one_has_just_got_is_found_without_its_publisher(sliced):
    """Its last sign of life was before it had the version, and another one has an older one."""
    stage = Searching(2, sliced=sliced)
    have = asyncio.Event()

    async def publish():
        async with stage.publisher() as out:
            await out.publish(array(1), version=1)
            await asyncio.sleep(4)
            await out.publish(array(2), version=2)
            await have.wait()

    async def first():
        async with stage.subscriber() as weights:
            await weights.wait(newer_than=1)
            await asyncio.sleep(1)  # a sign of life goes out before it has it
            assert await stage.latest(weights, 0) == 2
            have.set()
            await stage.done.wait()

    async def second():
        async with stage.subscriber() as weights:
            await have.wait()
            await asyncio.sleep(2 * TRIP)  # the publisher is gone
            version = await stage.latest(weights, 0)
            stage.done.set()
            return version

    async def old():
        async with stage.subscriber() as weights:
            assert await stage.latest(weights, 0) == 1
            await stage.done.wait()

    assert stage.play({0: publish(), 1: first(), 2: second(), 3: old()})[2] == 2


def test_a_version_that_is_replaced_during_the_search_is_given_up():
    """The source of the version before does not take new ones any more. While another participant
    waits for it, a newer version is published: it takes that, though the other one is still there.
    """
    stage = ChannelStage(3, seed=1, conditions=LINE)
    stage.options["patience"] = 5.0
    taken = asyncio.Event()

    async def train():
        async with stage.publisher(keep=4) as out:
            await out.publish(array(1), version=1)
            await taken.wait()
            for version in (2, 3):
                await out.publish(array(version), version=version)
                await asyncio.sleep(1)
            await stage.done.wait()

    async def lag():
        async with stage.subscriber() as weights:
            assert (await weights.latest())[0] == 1
            stage.first.set()
            await stage.done.wait()

    async def follow():
        await stage.first.wait()
        async with stage.subscriber() as weights:
            assert (await weights.latest())[0] == 1  # from the one that lags
            taken.set()
            version, got = await weights.latest(newer_than=1)
            stage.done.set()
            assert (got == version).all()
            return version

    stage.first = asyncio.Event()
    assert stage.play({0: lag(), 1: follow(), 2: train()})[1] == 3


@pytest.mark.parametrize("leave", [False, True])
def test_subscribers_give_up_a_version_in_parts_that_is_replaced(leave):
    """They all take the next one then, from each other, whether those that have it stay or not."""
    shares, takers, last = 2, 8, 3
    stage = ChannelStage(shares + takers, seed=1, conditions=LINE)
    stage.options["patience"] = 5.0
    clock, left = stage.sim.loop.time, {*range(takers)}

    async def publish(share):
        async with stage.publisher(part=(share, shares)) as out:
            for version in range(1, last + 1):
                await out.publish({f"w{share}": array(version)}, version=version)
                await asyncio.sleep(6 * DELAY)
            await stage.done.wait()
            return out.bytes_sent / NBYTES

    async def follow(number):
        version, begin = -1, clock()
        async with stage.subscriber() as weights:
            while version < last:
                version, got = await weights.latest(newer_than=version)
                assert all((one == version).all() for one in got.values())
            seconds = clock() - begin
            left.discard(number)
            if not left:
                stage.done.set()
            if not leave:
                await stage.done.wait()
        return seconds

    mains = {share: publish(share) for share in range(shares)}
    mains |= {shares + number: follow(number) for number in range(takers)}
    outcomes = stage.play(mains)
    assert max(outcomes[:shares]) < 2.1
    assert max(outcomes[shares:]) < 100 * TRIP


def test_manifests_of_a_version_that_is_replaced_are_not_asked_for_in_turn(monkeypatch):
    """The others have taken the newer version, and refuse one after the other."""
    stage = Searching(4, sliced=True)
    have, asked, original = asyncio.Event(), [], Slicing._manifests

    async def refused(self, version, place, search):
        if version == 2 or not have.is_set():
            return await original(self, version, place, search)
        asked.append(place.id)
        stage.killed.set()  # the time for version 2
        await until_known(self._participant)
        return []

    async def until_known(participant):
        while directory.newest(participant.releases) != 2:
            await participant.changed.wait()

    async def publish():
        async with stage.publisher() as out:
            await out.publish(array(1), version=1)
            await stage.killed.wait()
            await out.publish(array(2), version=2)
            await stage.done.wait()

    async def serve(number):
        async with stage.subscriber() as weights:
            assert await stage.latest(weights, number) == 1
            stage.have[1] += 1
            if stage.have[1] == stage.servers:
                have.set()
            await stage.done.wait()

    async def come():
        await have.wait()
        async with stage.subscriber() as weights:
            version = await stage.latest(weights, 0)
            stage.done.set()
            return version

    monkeypatch.setattr(Slicing, "_manifests", refused)
    mains = {number: serve(number) for number in range(stage.servers)}
    assert stage.play({**mains, stage.servers: publish(), stage.servers + 1: come()})[-1] == 2
    assert len(asked) == 2  # the last one in line, and the publisher


def test_a_version_that_came_during_a_search_is_looked_for_at_once():
    """Even if another call has waited for the same news meanwhile."""
    stage = ChannelStage(1)

    async def main():
        async with stage.publisher() as out, stage.subscriber() as weights:
            fetching, clock, failed = weights._fetching, stage.sim.loop.time, []
            attempt = fetching._attempt

            async def fails(releases, reading):
                if failed:
                    assert clock() == failed[0]
                    return await attempt(releases, reading)
                await asyncio.gather(weights.wait(newer_than=1), out.publish(array(2), version=2))
                failed.append(clock())
                raise NobodyError

            fetching._attempt = fails
            await out.publish(array(1), version=1)
            await weights.wait()
            assert (await weights.latest())[0] == 2

    stage.play({0: main()})
