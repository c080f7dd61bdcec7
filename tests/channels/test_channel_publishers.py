"""Who publishes: one at a time, whoever dies, has no time, or is restarted. On simulated hosts."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from channel_stage import CHUNK, ChannelStage, tree, until_filled

import aiodist
from aiodist.channels import directory, manifest
from aiodist.channels.store import ChannelStore
from aiodist.coordinator import alarm
from aiodist.membership.books import Books

W = {"w": np.arange(100)}


class Stage(ChannelStage):
    async def dies(self):
        """A publisher on the first host, which is gone at once, without a word."""
        async with self.publisher():
            self.done.set()
            self.sim.nodes[0].kill("silent")
            await asyncio.sleep(0)


def test_a_publisher_that_is_stopped_while_it_waits_for_the_one_before(monkeypatch):
    """What it was told before that is no reason to refuse it: the other one is gone by now."""
    stage = Stage(2)
    said, stopped = ChannelStore.said, []

    async def there(participant, who):
        found = await said(participant, who)
        if found and not stopped:
            stopped.append(who)
            stage.sim.nodes[1].stop()
            stage.sim.network.later_by(10, stage.sim.nodes[1].resume)
            await asyncio.sleep(0)
        return found

    monkeypatch.setattr(ChannelStore, "said", there)

    async def second():
        await stage.done.wait()
        async with stage.publisher() as out:
            await out.publish(W, version=1)
            return out.newest

    assert stage.play({0: stage.dies(), 1: second()})[1] == 1
    assert stopped


@pytest.mark.parametrize("forgets", ["late", "when it has time"])
def test_a_coordinator_without_time_does_not_make_a_dead_publisher_live(monkeypatch, forgets):
    """It may forget signs of life late, where the machine is busy: who waits to publish does so
    when it has, and is told of nobody who is dead."""
    stage = Stage(2)
    over = 30.0
    if forgets == "late":
        monkeypatch.setattr(alarm, "LATE_SECONDS", -1.0)  # all of its timers are
    else:
        expire = Books.expire

        def expires(books, ttl):
            if books.now >= over:
                return expire(books, ttl)
            books.timers.set(ttl, over)
            return []

        monkeypatch.setattr(Books, "expire", expires)

    async def second():
        await stage.done.wait()
        async with stage.publisher(timeout=2 * over):
            return stage.sim.loop.time()

    entered = stage.play({0: stage.dies(), 1: second()})[1]
    assert entered < 10 if forgets == "late" else over <= entered < over + 5


@pytest.mark.parametrize("durable", [True, False])
@pytest.mark.parametrize("after", [-0.02, 0.0, 0.3, 1.0, 4.0])
def test_another_publisher_is_refused_after_a_restart_of_the_coordinator(durable, after):
    """Also where it comes before the one who publishes has come back."""
    stage = Stage(2, durable=durable)

    async def publish():
        async with stage.publisher() as out:
            await out.publish(W, version=1)
            await asyncio.sleep(1)
            stage.sim.restart_coordinator(0.5)
            await stage.done.wait()
            await out.publish(W, version=2)

    async def second():
        await asyncio.sleep(1.1 + after)
        with pytest.raises(aiodist.JoinError, match="has a publisher already: end it first"):
            async with stage.publisher():
                pass
        stage.done.set()

    stage.play({0: publish(), 1: second()})


@pytest.mark.parametrize(
    ("takes", "options", "says"),
    [
        ("publisher", {}, "a publisher may be alive, and it takes about 4 s to hear"),
        ("subscriber", {"restart": True}, "only after 3.5 s it is sure that they are subscribers"),
    ],
)
def test_a_publisher_that_has_no_time_says_for_what(takes, options, says):
    stage = Stage(2)

    async def first():
        async with getattr(stage, takes)():
            await stage.done.wait()

    async def second():
        await asyncio.sleep(0.5)
        with pytest.raises(aiodist.JoinTimeoutError, match=f"not entered within 2 s: .*{says}"):
            async with stage.publisher(timeout=2, **options):
                pass
        stage.done.set()

    stage.play({0: first(), 1: second()})


def test_a_publisher_that_has_no_time_after_a_restart_of_the_coordinator_says_so():
    stage = Stage(1, durable=True)

    async def main():
        async with stage.subscriber():
            stage.sim.restart_coordinator(0.5)
            await asyncio.sleep(5)
            with pytest.raises(aiodist.JoinTimeoutError, match="the coordinator was restarted, an"):
                async with stage.publisher(timeout=2):
                    pass

    stage.play({0: main()})


def test_the_place_of_a_publisher_that_was_killed_is_free_at_once():
    """The coordinator knows that the publisher's connection broke, so the next publisher does not
    wait until the last sign of life of the old one is over."""
    stage = ChannelStage(2)

    async def first():
        async with stage.publisher() as out:
            await out.publish({"w": np.arange(1000)}, version=1)
            await asyncio.sleep(10)

    async def second():
        loop = asyncio.get_running_loop()
        await asyncio.sleep(5)
        stage.sim.nodes[0].kill("reset")
        start = loop.time()
        async with stage.publisher() as out:
            assert loop.time() - start < 1.0  # in virtual time
            await out.publish({"w": np.arange(1000)}, version=2)

    stage.play({0: first(), 1: second()})


def test_a_publisher_that_is_cancelled_while_it_leaves_has_left():
    """Its last version is still being encoded, in a thread."""
    stage = Stage(2)
    left = asyncio.Event()

    async def first():
        with pytest.raises(asyncio.CancelledError):
            async with stage.publisher(deltas=True) as out:
                await out.publish(tree(1), version=1)
                await out.publish(tree(2), version=2)
                asyncio.current_task().cancel()
        left.set()
        await stage.done.wait()

    async def second():
        await left.wait()
        async with stage.publisher():
            stage.done.set()

    stage.play({0: first(), 1: second()})


@pytest.mark.parametrize("deltas", [False, True])
def test_a_publish_that_is_cancelled_after_all_does_not_take_it_from_its_readers(
    monkeypatch, deltas
):
    """The coordinator has accepted the version, and its answer has not come yet."""
    monkeypatch.setattr(manifest, "CHUNK", CHUNK)
    stage = Stage(2)
    change, answers = ChannelStore.change, asyncio.Event()
    answers.set()

    async def answered(store, key, *args):
        found = await change(store, key, *args)
        if key == directory.RELEASES:
            await answers.wait()
        return found

    monkeypatch.setattr(ChannelStore, "change", answered)
    may_cancel = asyncio.Event()

    async def publish():
        async with stage.publisher(deltas=deltas) as out:
            await out.publish(W, version=0)
            answers.clear()
            publishing = asyncio.ensure_future(out.publish(tree(1), version=1))
            await may_cancel.wait()
            publishing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await publishing
            answers.set()
            await stage.done.wait()
            await out.publish(tree(1), version=1)  # it lives, and may publish it again
            await out.publish(tree(2), version=2)

    async def take():
        async with stage.subscriber() as weights:
            await weights.wait(newer_than=0)
            taking = await until_filled(weights, 3)
            may_cancel.set()
            version, got = await taking
            assert version == 1
            assert np.array_equal(got["w"], tree(1)["w"])
        stage.done.set()

    stage.play({0: publish(), 1: take()})


@pytest.mark.parametrize("stopped", [0, 1])
def test_who_was_stopped_while_numbers_begin_anew_does_not_bring_the_old_ones_back(stopped):
    stage = Stage(3)
    has = asyncio.Event()

    async def first():
        async with stage.publisher(lease=5.0) as out:
            await out.publish(W, version=100)
            await has.wait()
            if stopped == 0:
                stage.sim.nodes[0].stop()
                await stage.done.wait()

    async def subscriber():
        async with stage.subscriber(lease=5.0) as weights:
            await weights.latest()
            has.set()
            if stopped == 1:
                stage.sim.nodes[1].stop()
                await stage.done.wait()

    async def second():
        await asyncio.sleep(60)
        async with stage.publisher(restart=True) as out:
            await out.publish(W, version=0)
            stage.sim.nodes[stopped].resume()
            await asyncio.sleep(60)  # it is back, and has given signs of life
            await out.publish(W, version=1)
            async with stage.subscriber() as late:
                assert (await late.latest())[0] == 1
        stage.done.set()

    stage.play({0: first(), 1: subscriber(), 2: second()})


def test_a_version_is_listed_again_after_its_only_participant_was_ruled_lost():
    """The coordinator has forgotten all of the channel but the number of the version."""
    stage = Stage(2)

    async def publish():
        async with stage.publisher(lease=5.0) as out:
            await out.publish(W, version=100)
            stage.sim.nodes[0].stop()
            stage.sim.network.later_by(900, stage.sim.nodes[0].resume)
            await stage.done.wait()

    async def take():
        await asyncio.sleep(900)
        async with stage.subscriber() as weights:
            assert (await weights.latest(timeout=60))[0] == 100
        stage.done.set()

    stage.play({0: publish(), 1: take()})


def test_a_publisher_that_is_closed_as_it_joins_again_leaves():
    """It was ruled lost, and its program's call joins again."""
    stage = Stage(1)

    async def main():
        joining, may = asyncio.Event(), asyncio.Event()
        async with stage.publisher(lease=5.0) as out:
            store, tasks = out._participant.store, out._participant.tasks

            async def joins(join=store._join):
                joining.set()
                await may.wait()
                await join()

            store._join = joins
            for task in tasks._tasks:  # these do not join first
                task.cancel()
            stage.sim.nodes[0].stop()
            stage.sim.network.later_by(900, stage.sim.nodes[0].resume)
            publishing = asyncio.ensure_future(out.publish(W, version=1))
            await joining.wait()
        may.set()
        with pytest.raises(aiodist.GroupClosedError, match="'policy' was closed here"):
            await publishing
        assert not stage.sim._served.status()["groups"]

    stage.play({0: main()})
