"""Versions that are written to arrays of the subscriber as they come, on simulated hosts."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from channel_stage import ChannelStage

import aiodist
from aiodist.channels import into as channels_into
from aiodist.channels import manifest
from aiodist.channels.fetching import Fetching
from aiodist.channels.into import VersionReading

CHUNK = 1 << 14
LAYERS = 24


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(manifest, "CHUNK", CHUNK)


def tree(version, dtype=np.float32):
    return {"layers": [np.full(CHUNK // 4, version + at, dtype) for at in range(LAYERS)], "n": 1}


def is_version(into, version):
    layers = zip(into["layers"], tree(version)["layers"], strict=True)
    return all(np.array_equal(one, expected) for one, expected in layers)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("shares", [1, 2])
def test_the_arrays_are_written_and_are_whole_in_the_end(dtype, shares):
    stage = ChannelStage(1 + shares)

    async def publish(at):
        async with stage.publisher(part=(at, shares)) as out:
            await out.publish(tree(1), version=1)
            await stage.done.wait()

    async def take():
        async with stage.subscriber() as weights:
            into = tree(0, dtype)
            kept = into["layers"][0]
            convert = dtype is not np.float32
            assert await weights.latest(into=into, in_place=True, convert=convert) == 1
            assert is_version(into, 1)
            assert into["layers"][0] is kept
            assert weights.mixed is None
            wrong = {"layers": [np.zeros(7, dtype)] * LAYERS, "n": 0}
            with pytest.raises(ValueError, match=r"into\['layers'\]\[0\]"):
                await weights.latest(into=wrong, in_place=True, convert=convert)
            assert weights.mixed is None  # nothing was written
        stage.done.set()

    stage.play({**{at: publish(at) for at in range(shares)}, shares: take()})


@pytest.mark.parametrize("convert", [False, True])
def test_what_fails_in_the_middle_is_said_to_be_mixed(monkeypatch, convert):
    """Arrays are there before the version is; its publisher dies then, and another one follows."""
    stage = ChannelStage(3)
    died = asyncio.Event()
    write = channels_into.IntoParts.write

    def dies(parts, found, leaf):
        write(parts, found, leaf)
        if not died.is_set() and leaf.name == "layers.1":
            assert not found.is_whole
            stage.sim.nodes[0].kill()
            died.set()

    monkeypatch.setattr(channels_into.IntoParts, "write", dies)

    async def first():
        async with stage.publisher() as out:
            await out.publish(tree(1), version=1)
            await stage.done.wait()

    async def take():
        async with stage.subscriber() as weights:
            into = tree(0)
            stage.sim.loop.call_later(100, publishing.set)
            options = {"into": into, "in_place": True, "convert": convert}
            with pytest.raises(aiodist.CollectiveTimeoutError) as caught:
                await weights.latest(timeout=20, **options)
            assert caught.value.__notes__ == ["`into` has some arrays of version 1: it is mixed"]
            assert weights.mixed == 1
            assert into["layers"][0][0] == 1
            assert into["layers"][-1][0] == tree(0)["layers"][-1][0]
            publishing.set()
            assert await weights.latest(newer_than=1, **options) == 2
            assert is_version(into, 2)
            assert weights.mixed is None
        stage.done.set()

    publishing = asyncio.Event()

    async def second():
        await publishing.wait()
        async with stage.publisher() as out:
            await out.publish(tree(2), version=2)
            await stage.done.wait()

    stage.play({0: first(), 1: take(), 2: second()})


@pytest.mark.parametrize("in_place", [False, True])
def test_an_empty_slice_comes_with_the_others(in_place):
    stage = ChannelStage(2)
    whole = {"bias": np.ones(2), "w": np.ones((8, 8))}

    async def publish():
        async with stage.publisher() as out:
            await out.publish(whole, version=1)
            await stage.done.wait()

    async def take():
        async with stage.subscriber() as weights:
            bias = aiodist.Shard(np.zeros(0), (slice(2, 2),), (2,))
            w = aiodist.Shard(np.zeros((2, 8)), (slice(6, 8), slice(None)), (8, 8))
            assert await weights.latest(into={"bias": bias, "w": w}, in_place=in_place) == 1
            assert (w.array == 1).all()
            assert weights.mixed is None
        stage.done.set()

    stage.play({0: publish(), 1: take()})


@pytest.mark.parametrize("in_place", [False, True])
def test_no_call_returns_an_older_version_than_another_one_before(in_place, monkeypatch):
    """The first call has version 1 and has not returned. Then the second one is given version 2."""
    stage = ChannelStage(2)
    has, other_has = asyncio.Event(), asyncio.Event()
    of, name = (VersionReading, "in_place") if in_place else (Fetching, "newest")
    original = getattr(of, name)

    async def late(*args):
        result = await original(*args)
        if not has.is_set():
            has.set()
            await other_has.wait()
        return result

    monkeypatch.setattr(of, name, late)

    async def publish():
        async with stage.publisher() as out:
            await out.publish(tree(1), version=1)
            await has.wait()
            await out.publish(tree(2), version=2)
            await stage.done.wait()

    async def take():
        async with stage.subscriber() as weights:
            into = tree(0)
            first = asyncio.ensure_future(weights.latest(into=into, in_place=in_place))
            await has.wait()
            assert (await weights.latest(newer_than=1))[0] == 2
            other_has.set()
            assert await first == 2
            assert is_version(into, 2)
        stage.done.set()

    stage.play({0: publish(), 1: take()})
