"""A participant of a channel that goes as another one calls it, on simulated hosts."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from channel_stage import CHUNK, PATIENCE, ServingStage, next_sign_of_life, tree

from aiodist import Shard
from aiodist.channels import manifest
from aiodist.errors import JoinError


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(manifest, "CHUNK", CHUNK)


@pytest.mark.parametrize("sliced", [False, True])
@pytest.mark.parametrize("how", ["close", "kill"])
def test_a_source_that_goes_as_it_is_called(how, sliced):
    """The one that calls it hears from the coordinator that it is gone, and calls another one."""
    stage = ServingStage(3)
    has, called = asyncio.Event(), asyncio.Event()

    async def first():
        async with stage.subscriber() as weights:

            async def goes(name):
                called.set()
                if how == "kill":
                    stage.sim.nodes[1].kill()

            weights._participant.role.met = goes
            await weights.latest()
            has.set()
            await called.wait()

    async def second():
        await has.wait()
        async with stage.subscriber() as weights:
            begun = stage.sim.loop.time()
            if sliced:
                whole = tree(1)["w"]
                shard = Shard(np.empty(4, np.int32), (slice(4),), whole.shape)
                assert await weights.latest(into={"w": shard}) == 1
            else:
                assert (await weights.latest())[0] == 1
            assert stage.sim.loop.time() - begun < PATIENCE / 2
            assert called.is_set()
        stage.done.set()

    stage.play({0: stage.publish(), 1: first(), 2: second()})


def test_calling_one_that_has_left_leaves_nothing_behind():
    stage = ServingStage(3)
    there, left = asyncio.Event(), asyncio.Event()
    place = None

    async def first():
        nonlocal place
        async with stage.subscriber() as weights:
            place = weights._participant.store.place
            await there.wait()
        left.set()

    async def second():
        async with stage.subscriber() as weights:
            participant = weights._participant
            there.set()
            await left.wait()

            def known():
                groups = stage.sim._served.status()["groups"]
                tasks = [task.get_name() for task in participant.tasks._tasks]
                return [one["name"] for one in groups], tasks

            before = known()
            with pytest.raises(JoinError, match="is gone"):
                await participant.meetings.fed_by(place)
            await next_sign_of_life(participant)
            assert known() == before
            assert participant.meetings.feed is None
        stage.done.set()

    stage.play({0: stage.publish(), 1: first(), 2: second()})


def test_a_source_that_answers_only_after_the_next_version_came_from_another_one():
    """The call that wanted it has timed out, and its task still waits for the source."""
    stage = ServingStage(3)
    has, called, answers = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def publish():
        async with stage.publisher() as out:
            await out.publish(tree(1), version=1)
            await called.wait()
            await out.publish(tree(2), version=2)
            await stage.done.wait()

    async def first():
        async with stage.subscriber() as weights:
            role = weights._participant.role
            met = role.met

            async def answers_late(name):
                called.set()
                await answers.wait()
                await met(name)

            role.met = answers_late
            await weights.latest()
            has.set()
            await stage.done.wait()

    async def second():
        await has.wait()
        async with stage.subscriber() as weights:
            meetings, joined = weights._participant.meetings, asyncio.Event()
            with pytest.raises(TimeoutError):
                await weights.latest(timeout=PATIENCE / 10)
            assert (await weights.latest(newer_than=1))[0] == 2
            before = [*meetings._pairs]
            assert len(before) == 1
            met_in = meetings.met_in
            meetings.met_in = lambda pair: joined.set() or met_in(pair)
            answers.set()
            await joined.wait()
            await next_sign_of_life(weights._participant)
            assert [*meetings._pairs] == before
        stage.done.set()

    stage.play({0: publish(), 1: first(), 2: second()})
