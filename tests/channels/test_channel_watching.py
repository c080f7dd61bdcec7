"""What the coordinator knows of a channel: the version of each participant, and who is behind."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

import aiodist
from aiodist.channels import manifest
from aiodist.channels.store import BEAT, GONE
from aiodist.testing.simulation import Killed, Simulation

SOON = 2 * BEAT
"""Seconds after which a participant has said what is new."""

TREE = {"w": np.ones(1 << 16, np.float32)}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(manifest, "CHUNK", 1 << 16)


class Watched:
    """A channel on simulated hosts, and what its coordinator says of it."""

    def __init__(self, size, **options):
        self.sim = Simulation(size, **options)
        self.options = {"address": self.sim.address, "transports": ("tcp",), "patience": 2.0}

    def publisher(self, **more):
        return aiodist.publisher("policy", **self.options, **more)

    def subscriber(self, **more):
        return aiodist.subscriber("policy", **self.options, **more)

    def known(self):
        """The channel, and its participants by name."""
        [channel] = self.sim._served.status()["channels"]
        return channel, {one["name"]: one for one in channel["participants"]}


def test_the_version_of_each_and_how_far_it_is_behind():
    watched = Watched(3)
    release = 5 * SOON  # after that, one does not look for newer versions

    async def publish():
        async with watched.publisher(name="trainer") as out:
            await out.publish(TREE, version=3)
            await asyncio.sleep(release)
            await out.publish(TREE, version=10)
            await asyncio.sleep(4 * SOON)
            return watched.known()

    async def take(name, *, again):
        async with watched.subscriber(name=name) as weights:
            await weights.latest()
            if again:
                await weights.latest(newer_than=3)
            await asyncio.sleep(20 * SOON)

    async def look():
        takers = [asyncio.create_task(take("eager", again=True))]
        takers.append(asyncio.create_task(take("lazy", again=False)))
        await asyncio.sleep(release / 2)
        first = watched.known()
        await asyncio.gather(*takers)
        return first

    (channel, now), (_, before) = watched.sim.play({0: publish(), 1: look()})
    assert {one["said"]["version"] for one in before.values()} == {3}
    assert {one["said"]["behind"] for one in before.values()} == {0.0}
    assert (channel["newest"], channel["nbytes"]) == (10, now["trainer"]["said"]["nbytes"])
    assert channel["nbytes"] > TREE["w"].nbytes
    assert [one["publishes"] for one in channel["participants"]] == [True, False, False]
    trainer, eager, lazy = (now[name]["said"] for name in ("trainer", "eager", "lazy"))
    for one in (trainer, eager):
        assert (one["version"], one["lag"], one["behind"]) == (10, 0, 0.0)
        assert one["here"] == channel["nbytes"]
    assert (lazy["version"], lazy["lag"]) == (3, 7)
    assert 4 * SOON - 2 * BEAT < lazy["behind"] <= 4 * SOON
    assert trainer["memory"] == 2 * channel["nbytes"]  # it keeps two
    # Who takes over the network has a copy, and memory for the next one. Beside versions, a few
    # words are sent.
    assert eager["memory"] == 2 * channel["nbytes"]
    received = eager["received"] + lazy["received"]
    assert 3 * TREE["w"].nbytes < received < 3.1 * TREE["w"].nbytes
    sent = sum(one["sent"] for one in (trainer, eager, lazy))
    assert received <= sent < received + 1000


@pytest.mark.parametrize("how", ["close", "kill", "stop"])
def test_who_leaves_or_dies_or_stands_still(how):
    watched = Watched(3)
    leave = asyncio.Event()

    async def subscribe():
        async with watched.subscriber(name="server") as weights:
            await weights.latest()
            await leave.wait()

    async def publish():
        async with watched.publisher(name="trainer") as out:
            await out.publish(TREE, version=1)
            await asyncio.sleep(2 * SOON)
            assert watched.known()[1].keys() == {"trainer", "server"}
            node = watched.sim.nodes[1]
            if how == "close":
                leave.set()
            elif how == "kill":
                node.kill()
            else:
                node.stop()
            await asyncio.sleep(GONE + SOON)
            _, now = watched.known()
            if how == "stop":
                assert now["server"]["said"] is None
                node.resume()
                await asyncio.sleep(GONE)
                assert watched.known()[1]["server"]["said"]["version"] == 1
                leave.set()
                await asyncio.sleep(SOON)
            assert watched.known()[1].keys() == {"trainer"}

    server = watched.sim.play({0: publish(), 1: subscribe()})[1]
    assert isinstance(server, Killed) == (how == "kill")


@pytest.mark.parametrize("durable", [True, False])
def test_a_coordinator_that_was_restarted_hears_it_again(durable):
    watched = Watched(2, durable=durable)

    async def publish():
        async with watched.publisher(name="trainer") as out:
            await out.publish(TREE, version=4)
            await asyncio.sleep(SOON)
            watched.sim.restart_coordinator(1.0)
            await asyncio.sleep(20 * SOON)
            return watched.known()

    async def subscribe():
        async with watched.subscriber(name="server") as weights:
            await weights.latest()
            await asyncio.sleep(30 * SOON)

    channel, now = watched.sim.play({0: publish(), 1: subscribe()})[0]
    assert channel["newest"] == 4
    assert [now[name]["said"]["version"] for name in ("trainer", "server")] == [4, 4]
    assert now["trainer"]["publishes"]
