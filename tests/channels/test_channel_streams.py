"""Streams of a version whose source, coordinator or memory goes while it comes, on simulated
hosts."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from channel_stage import CHUNK, PATIENCE, ChannelStage, ServingStage, filled, tree, until_filled

import aiodist
from aiodist.channels import into as channels_into
from aiodist.channels import manifest, subscriber
from aiodist.channels.holding import in_thread
from aiodist.channels.into import VersionReading
from aiodist.channels.store import GONE


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(manifest, "CHUNK", CHUNK)


async def streamed(weights, parts):
    """Begin to stream version 1, up to so many parts. Return the task, and what it takes."""
    await weights.wait()

    async def stream():
        return [(name, array) async for name, array in weights.stream(1)]

    streaming = asyncio.ensure_future(stream())
    holding = weights._fetching.holding(weights._participant.releases[-1])
    await filled(holding, parts)
    return streaming, holding


@pytest.mark.parametrize("restarts", [False, True])
def test_a_stream_of_a_version_that_no_participant_has_ends(restarts):
    """Its publisher dies in the middle of it. A coordinator that is restarted meanwhile has to hear
    of all participants again."""
    stage = ServingStage(2)
    begun, clock = asyncio.Event(), stage.sim.loop.time

    async def publish():
        async with stage.publisher() as out:
            await out.publish(tree(1), version=1)
            await begun.wait()
            stage.sim.nodes[0].kill()
            await asyncio.sleep(0)

    async def main():
        async with stage.subscriber() as weights:
            taking = await until_filled(weights, 5)
            taking.cancel()
            begin = clock()
            begun.set()
            if restarts:
                stage.sim.network.later_by(GONE + PATIENCE, stage.sim.restart_coordinator, PATIENCE)
            with pytest.raises(ValueError, match="no living participant has version 1"):
                async for _ in weights.stream(1):
                    pass
            return clock() - begin

    took = stage.play({0: publish(), 1: main()})[1]
    assert PATIENCE < took < GONE + (4 + 2 * restarts) * PATIENCE, took


def test_a_stream_goes_on_while_the_coordinator_is_away():
    """What it was taking breaks off, and can be had again only when the coordinator is back, and
    has been told what there is."""
    stage = ServingStage(2)

    async def main():
        async with stage.subscriber() as weights:
            streaming, _ = await streamed(weights, 5)
            stage.sim.restart_coordinator(4 * PATIENCE)
            for pair in weights._participant.meetings._pairs:
                pair.abort("it breaks off")
            try:
                return [name for name, _ in await streaming]
            finally:
                stage.done.set()

    assert stage.play({0: stage.publish(), 1: main()})[1] == ["w"]


def test_a_stream_goes_on_in_other_memory():
    """The first 5 chunks of a version are forgotten while it comes, as if another publisher had
    published other bytes by its number, and the source is lost."""
    stage = ServingStage(2)

    async def main():
        async with stage.subscriber() as weights:
            participant = weights._participant
            streaming, before = await streamed(weights, 5)
            participant.stock.holdings.pop(1).retire()
            for pair in participant.meetings._pairs:
                pair.abort("it breaks off")
            found = await streaming
            assert participant.stock.holdings[1] is not before
            assert before.memory is None
            stage.done.set()
            return found

    ((name, array),) = stage.play({0: stage.publish(), 1: main()})[1]
    assert name == "w"
    assert np.array_equal(array, tree(1)["w"])


def test_a_stream_of_two_publishers_that_begins_with_an_empty_array():
    stage = ChannelStage(3)

    async def publish(at, tree):
        async with stage.publisher(part=(at, 2)) as out:
            await out.publish(tree, version=1)
            await stage.done.wait()

    async def take():
        async with stage.subscriber() as weights:
            await weights.wait()
            assert [array.shape async for _, array in weights.stream(1)] == [(0, 3), (9,), (5,)]
        stage.done.set()

    shares = [{"a": np.zeros((0, 3)), "b": np.ones(9)}, {"c": np.ones(5)}]
    stage.play({**{at: publish(at, tree) for at, tree in enumerate(shares)}, 2: take()})


@pytest.mark.parametrize("in_place", [False, True])
def test_a_stream_of_a_newer_version_ends_while_latest_reads(monkeypatch, in_place):
    """`latest` returns the number of what it has read."""
    stage = ServingStage(1)
    streamed = []

    async def main():
        async with stage.publisher() as out, stage.subscriber() as weights:

            async def reads_late(work):
                if not streamed:
                    streamed.append(2)
                    await out.publish(tree(2), version=2)
                    await weights.wait(newer_than=1)
                    streamed.extend([name async for name, _ in weights.stream(2)])
                return await in_thread(work)

            reader = channels_into if in_place else subscriber
            monkeypatch.setattr(reader, "in_thread", reads_late)
            await out.publish(tree(1), version=1)
            into = tree(0)
            version = await weights.latest(into=into, in_place=in_place)
            assert streamed == [2, "w"]
            assert version == into["w"][0]
            assert (await weights.latest())[0] == 2

    stage.play({0: main()})


def test_a_stream_begins_while_latest_gives_a_newer_version(monkeypatch):
    """Both versions are here, and the older one is forgotten when the newer one is given."""
    stage, begin, giving = ServingStage(1), VersionReading.begin, []

    async def main():
        async with stage.publisher(keep=2) as out, stage.subscriber() as weights:
            for version in (1, 2):
                await out.publish(tree(version), version=version)
                await weights.wait(newer_than=version - 1)
                await weights._fetching._whole(weights._participant.releases[-1], VersionReading())

            def begins(reading, coming):
                begin(reading, coming)
                if not giving:
                    giving.append(asyncio.ensure_future(weights.latest()))

            monkeypatch.setattr(VersionReading, "begin", begins)
            ((name, array),) = [one async for one in weights.stream(1)]
            assert name == "w"
            assert np.array_equal(array, tree(1)["w"])
            assert (await giving[0])[0] == 2
            assert [*weights._participant.stock.holdings] == [2]

    stage.play({0: main()})


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("how", ["in_place", "stream", "changed"])
def test_what_waits_for_a_version_fails_when_its_subscriber_is_closed(how, at_once):
    stage, called = ServingStage(1), asyncio.Event()

    async def silent(name):
        called.set()
        await stage.done.wait()

    async def wait(weights):
        if how == "in_place":
            await weights.latest(into=tree(0), in_place=True)
        elif how == "stream":
            _ = [name async for name, _ in weights.stream(1)]
        else:
            await weights.changed(1, since=0)

    async def main():
        async with stage.publisher() as out:
            out._participant.role.met = silent
            await out.publish(tree(1), version=1)
            async with stage.subscriber() as weights:
                await weights.wait()
                waiting = asyncio.ensure_future(wait(weights))
                if not at_once:
                    await called.wait()
            with pytest.raises(aiodist.GroupClosedError, match="'policy' was closed here"):
                await waiting
            stage.done.set()

    stage.play({0: main()})
