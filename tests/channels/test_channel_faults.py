"""What goes wrong in a channel, one thing at a time, on simulated hosts or on this one."""

from __future__ import annotations

import asyncio
import math
import threading
from pathlib import Path

import numpy as np
import pytest
from channel_stage import (
    CHUNK,
    CHUNKS,
    PATIENCE,
    ServingStage,
    filled,
    next_sign_of_life,
    tree,
    until_filled,
)

import aiodist
from aiodist.channels import manifest, transfers
from aiodist.channels.holding import Holding
from aiodist.channels.participant import Participant
from aiodist.channels.store import GONE, ChannelStore
from aiodist.control.store import Store

IN_VAIN = f"within {PATIENCE:g} s: the coordinator is away: no coordinator answers at "


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(manifest, "CHUNK", CHUNK)


def test_a_cancelled_call_is_gone_on_with_from_where_it_was():
    stage = ServingStage(2)

    async def main():
        async with stage.subscriber() as weights:
            taking = await until_filled(weights, 10)
            taking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await taking
            holding = weights._participant.stock.holdings[1]
            assert 10 <= holding.filled < CHUNKS
            version, got = await weights.latest()
            assert version == 1
            assert np.array_equal(got["w"], tree(1)["w"])
        stage.done.set()

    sent, _ = stage.play({0: stage.publish(), 1: main()})
    # What was on its way when it was cancelled comes again, and no more.
    assert sent <= 1.3 * tree(1)["w"].nbytes


def test_a_call_that_comes_too_late_says_why_the_last_source_failed():
    stage = ServingStage(2)

    async def unreachable(source):
        raise aiodist.PeerLostError("not reachable", ranks=[0])

    async def main():
        async with stage.subscriber() as weights:
            meetings = weights._participant.meetings
            meetings.fed_by, fed_by = unreachable, meetings.fed_by
            with pytest.raises(aiodist.CollectiveTimeoutError, match="attempt failed: not reach"):
                await weights.latest(timeout=5.0)
            meetings.fed_by = fed_by
            assert (await weights.latest())[0] == 1
            with pytest.raises(aiodist.CollectiveTimeoutError) as late:
                await weights.latest(timeout=0.0)
            assert "failed" not in str(late.value)
        stage.done.set()

    stage.play({0: stage.publish(), 1: main()})


@pytest.mark.parametrize("how", ["kill", "stop", "close"])
def test_a_source_that_goes_in_the_middle(how):
    """Who takes from it goes on with another one, within the patience, and asks for the rest."""
    stage = ServingStage(3)
    asked = asyncio.Event()

    async def first():
        async with stage.subscriber() as weights:
            asked.set()
            taking = await until_filled(weights, 12)
            if how == "close":
                taking.cancel()
                return
            getattr(stage.sim.nodes[1], how)()
            await taking
        stage.done.set()

    async def second():
        async with stage.subscriber() as weights:
            await asked.wait()
            await asyncio.sleep(0.005)
            begun = stage.sim.loop.time()
            version, got = await weights.latest()
            assert stage.sim.loop.time() - begun < PATIENCE + 2
            assert np.array_equal(got["w"], tree(1)["w"])
            stage.sim.nodes[1].resume()
            if how == "stop":  # it gets the version as well
                await stage.done.wait()
        stage.done.set()
        return version

    outcomes = stage.play({0: stage.publish(), 1: first(), 2: second()})
    assert outcomes[2] == 1
    assert outcomes[0] <= 2 * tree(1)["w"].nbytes


def test_a_chunk_that_was_damaged_comes_from_another_one():
    stage = ServingStage(3)
    has = asyncio.Event()

    async def first():
        async with stage.subscriber() as weights:
            await weights.latest()
            holding = weights._participant.stock.holdings[1]
            holding.part(7)[0] ^= 1
            has.set()
            await stage.done.wait()

    async def second():
        await has.wait()
        async with stage.subscriber() as weights:
            _, got = await weights.latest()
            assert np.array_equal(got["w"], tree(1)["w"])
        stage.done.set()

    sent, *_ = stage.play({0: stage.publish(), 1: first(), 2: second()})
    assert 1.5 * tree(1)["w"].nbytes < sent < 2 * tree(1)["w"].nbytes


def test_an_unexpected_error_ends_only_the_service_of_one(monkeypatch, caplog):
    stage = ServingStage(2)
    give, begun = transfers.give, []

    async def fails_once(*args, **more):
        begun.append(args)
        if len(begun) == 1:
            raise RuntimeError("unexpected")
        await give(*args, **more)

    monkeypatch.setattr(transfers, "give", fails_once)

    async def take():
        async with stage.subscriber() as weights:
            _, got = await weights.latest()
            assert np.array_equal(got["w"], tree(1)["w"])
        stage.done.set()

    stage.play({0: stage.publish(), 1: take()})
    assert len(begun) == 2
    assert "a subscriber could not be served" in caplog.text


def test_stopped_for_longer_than_the_lease():
    stage = ServingStage(2)

    async def publish():
        async with stage.publisher() as out:
            await out.publish(tree(1), version=1)
            await asyncio.sleep(100)
            await out.publish(tree(2), version=2)
            await stage.done.wait()

    async def main():
        async with stage.subscriber(lease=5.0) as weights:
            await weights.latest()
            stage.sim.nodes[1].stop()
            stage.sim.network.later_by(60, stage.sim.nodes[1].resume)
            assert (await weights.latest(newer_than=1))[0] == 2
        stage.done.set()

    stage.play({0: publish(), 1: main()})


def test_a_version_that_nobody_has_any_more():
    """The newest that somebody has is given, or one is waited for."""
    stage = ServingStage(3)
    first_has = asyncio.Event()

    async def publish():
        async with stage.publisher() as out:
            await out.publish(tree(1), version=1)
            await first_has.wait()
            await out.publish(tree(2), version=2)
            stage.sim.nodes[0].kill()
            await asyncio.sleep(0)

    async def first():
        async with stage.subscriber() as weights:
            assert (await weights.latest())[0] == 1
            first_has.set()
            await stage.done.wait()

    async def second():
        await first_has.wait()
        await asyncio.sleep(10)
        async with stage.subscriber() as weights:
            assert weights.newest == 2
            version, got = await weights.latest()
            assert version == 1
            assert np.array_equal(got["w"], tree(1)["w"])
            with pytest.raises(aiodist.CollectiveTimeoutError, match=r"version 2 .* was not taken"):
                await weights.latest(newer_than=1, timeout=3.0)
        stage.done.set()

    stage.play({0: publish(), 1: first(), 2: second()})


def test_a_new_subscriber_comes_before_the_one_that_has_the_version_is_listed():
    """A version that was taken from the same source as the one before is listed with the next sign
    of life. Meanwhile its publisher publishes another version, which no subscriber takes. Then it
    ends."""
    stage = ServingStage(3)
    taken, ended = asyncio.Event(), asyncio.Event()

    async def publish():
        async with stage.publisher() as out:
            await out.publish(tree(1), version=1)
            await taken.wait()
            await out.publish(tree(2), version=2)
            taken.clear()
            await taken.wait()
            await out.publish(tree(3), version=3)
        ended.set()

    async def first():
        async with stage.subscriber() as weights:
            assert (await weights.latest())[0] == 1
            await next_sign_of_life(weights._participant)
            taken.set()
            assert (await weights.latest(newer_than=1))[0] == 2
            assert [one.version for one in weights._fetching._unlisted] == [2]
            taken.set()
            await stage.done.wait()

    async def second():
        await ended.wait()
        async with stage.subscriber() as weights:
            version, got = await weights.latest(timeout=10)
            assert version == 2
            assert np.array_equal(got["w"], tree(2)["w"])
        stage.done.set()

    stage.play({0: publish(), 1: first(), 2: second()})


def test_looking_for_a_version_that_no_participant_has_gets_rare(monkeypatch):
    """The publisher dies in the middle of a version. The subscriber asks the coordinator less and
    less often, but it hears at once when there is a version again."""
    stage = ServingStage(3)
    dead, clock = asyncio.Event(), stage.sim.loop.time
    asked = []
    request = Store._call

    def count(self, *given, **more):
        asked.append(clock())
        return request(self, *given, **more)

    async def publish():
        async with stage.publisher() as out:
            await out.publish(tree(1), version=1)
            await dead.wait()
            stage.sim.nodes[0].kill()
            await asyncio.sleep(0)

    async def again():
        await dead.wait()
        await asyncio.sleep(GONE + 60)
        monkeypatch.setattr(Store, "_call", count)
        await asyncio.sleep(60)
        monkeypatch.setattr(Store, "_call", request)
        async with stage.publisher(keep=1) as out:
            await out.publish(tree(2), version=2)
            begin = clock()
            await stage.done.wait()
            assert clock() - begin < 1

    async def main():
        async with stage.subscriber() as weights:
            taking = await until_filled(weights, 5)
            dead.set()
            assert (await taking)[0] == 2
        stage.done.set()

    stage.play({0: publish(), 1: main(), 2: again()})
    # Signs of life of both are among them.
    assert 10 < len(asked) < 60 * 5, len(asked)


def test_those_that_found_a_version_nowhere_refuse_it():
    """Also if their programs have given up on it meanwhile."""
    stage = ServingStage(4)
    has, clock = asyncio.Event(), stage.sim.loop.time

    async def publish():
        async with stage.publisher() as out:
            await out.publish(tree(1), version=1)
            await has.wait()
            await out.publish(tree(2), version=2)

    async def poll():
        async with stage.subscriber() as weights:
            assert (await weights.latest())[0] == 1
            has.set()
            with pytest.raises(aiodist.CollectiveTimeoutError):
                await weights.latest(newer_than=1, timeout=8.0)
            await stage.done.wait()

    async def late():
        await asyncio.sleep(20)
        async with stage.subscriber() as weights:
            begin = clock()
            assert (await weights.latest())[0] == 1
            assert clock() - begin < PATIENCE
        stage.done.set()

    stage.play({0: publish(), 1: poll(), 2: poll(), 3: late()})


def test_one_whose_call_was_broken_off_refuses_the_version_soon():
    """It has some of it, and its program may go on with it."""
    stage = ServingStage(4)
    has, broken_off, clock = asyncio.Event(), asyncio.Event(), stage.sim.loop.time

    async def publish():
        async with stage.publisher() as out:
            await out.publish(tree(1), version=1)
            await has.wait()
            await out.publish(tree(2), version=2)
            await broken_off.wait()

    async def first():
        async with stage.subscriber() as weights:
            assert (await weights.latest())[0] == 1
            has.set()
            await stage.done.wait()

    async def second():
        await has.wait()
        async with stage.subscriber() as weights:
            await weights.wait(newer_than=1)
            taking = await until_filled(weights, 2)
            taking.cancel()
            await asyncio.gather(taking, return_exceptions=True)
            broken_off.set()
            await stage.done.wait()
            assert 2 <= comings(weights._participant)[0].filled < CHUNKS

    async def late():
        await broken_off.wait()
        await asyncio.sleep(10)
        async with stage.subscriber() as weights:
            begin = clock()
            assert (await weights.latest())[0] == 1
            assert clock() - begin < PATIENCE
        stage.done.set()

    stage.play({0: publish(), 1: first(), 2: second(), 3: late()})


def test_strangers_learn_nothing(run):
    async def main():
        async with aiodist.Coordinator("tcp://127.0.0.1:0", token="secret") as coordinator:
            for token in (None, "wrong"):
                weights = aiodist.subscriber("policy", address=coordinator.address, token=token)
                with pytest.raises(aiodist.AuthenticationError):
                    await weights.__aenter__()

    run(main())


def test_the_coordinator_is_gone_for_good(run):
    async def main():
        coordinator = aiodist.Coordinator("tcp://127.0.0.1:0", returns=False)
        async with coordinator:
            publisher = aiodist.publisher("policy", address=coordinator.address)
            subscriber = aiodist.subscriber("policy", address=coordinator.address)
            out = await publisher.__aenter__()
            weights = await subscriber.__aenter__()
            waiting = asyncio.ensure_future(weights.latest())
        with pytest.raises(aiodist.CoordinatorLostError):
            await waiting
        with pytest.raises(aiodist.CoordinatorLostError):
            await out.publish(tree(1), version=1)
        await subscriber.__aexit__(None, None, None)
        await publisher.__aexit__(None, None, None)

    run(main())


def test_many_versions_leave_nothing_behind(run):
    """Memory and files are those of what is kept, however many versions there were."""

    async def main():
        async with (
            aiodist.Coordinator("tcp://127.0.0.1:0") as coordinator,
            aiodist.publisher("policy", address=coordinator.address, keep=1) as out,
            aiodist.subscriber("policy", address=coordinator.address) as weights,
        ):
            for version in range(6):
                await out.publish(tree(version), version=version)
                assert (await weights.latest(newer_than=version - 1))[0] == version
                assert list(out._participant.stock.holdings) == [version]
                assert list(weights._participant.stock.holdings) == [version]
            store = out._participant.store._group.store
            await weights._fetching.stay()  # by which it says what it has mapped
            assert await store.get("line/4") is None
            assert await store.get("line/5") is not None

    run(main())


def test_closing_while_somebody_waits_and_takes(run):
    async def main():
        async with aiodist.Coordinator("tcp://127.0.0.1:0") as coordinator:
            async with aiodist.subscriber("policy", address=coordinator.address) as weights:
                waiting = asyncio.ensure_future(weights.latest())
                await asyncio.sleep(0)
            with pytest.raises(aiodist.GroupClosedError, match="was closed here"):
                await waiting
            with pytest.raises(aiodist.GroupClosedError, match="was closed here"):
                await weights.latest()

    run(main())


async def test_use_before_it_was_entered():
    out = aiodist.publisher("policy", address="tcp://127.0.0.1:1")
    weights = aiodist.subscriber("policy", address="tcp://127.0.0.1:1")
    calls = [
        out.publish(tree(1), version=1),
        anext(out.acknowledged(1)),
        weights.latest(),
        weights.wait(),
        anext(weights.stream(1)),
        weights.acknowledge(1),
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match="enter the channel 'policy' by `async with` first"):
            await call


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"keep": 0}, ValueError, "keep is 1 to 64 versions, not 0"),
        ({"keep": "2"}, TypeError, "keep is a number of versions, an int, not '2'"),
        ({"deltas": "yes"}, TypeError, "deltas is True, False or None, not 'yes'"),
        ({"restart": "no"}, TypeError, "restart is True or False, not 'no'"),
        ({"patience": 0}, ValueError, "patience is more than 0 seconds"),
        ({"patience": math.nan}, ValueError, "patience is more than 0 seconds"),
        ({"size": 3}, TypeError, r"publisher\(\) got an unexpected.*'size'"),
        ({"max_bytes": 3}, TypeError, r"publisher\(\) got an unexpected.*'max_bytes'"),
    ],
)
def test_options_that_make_no_sense(options, error, text):
    with pytest.raises(error, match=text):
        aiodist.publisher("policy", address="tcp://127.0.0.1:1", **options)
    with pytest.raises(TypeError, match=r"subscriber\(\) got an unexpected.*'keep'"):
        aiodist.subscriber("policy", address="tcp://127.0.0.1:1", keep=2)
    with pytest.raises(ValueError, match="a channel has a name of 1 to 128 characters, not ''"):
        aiodist.publisher("", address="tcp://127.0.0.1:1")


def test_the_coordinator_is_away_for_longer_than_the_patience():
    stage = ServingStage(3)
    away, other_has = asyncio.Event(), asyncio.Event()

    async def main():
        async with stage.subscriber() as weights:
            await weights.latest()
            stage.sim.restart_coordinator(4 * PATIENCE)
            away.set()
            with pytest.raises(aiodist.CollectiveTimeoutError, match=IN_VAIN):
                await weights.latest(newer_than=1, timeout=PATIENCE)
            version, got = await weights.latest(newer_than=1)
            assert version == 2
            assert np.array_equal(got["w"], tree(2)["w"])
            await other_has.wait()
        stage.done.set()

    async def publish():
        async with stage.publisher() as out:
            await out.publish(tree(1), version=1)
            await away.wait()
            weights = tree(2)
            with pytest.raises(aiodist.CollectiveTimeoutError, match=IN_VAIN):
                await out.publish(weights, version=2, timeout=PATIENCE)
            publishing = asyncio.ensure_future(out.publish(weights, version=2))
            await asyncio.sleep(PATIENCE)
            weights["w"][:] = -1  # what is published was copied before
            await publishing
            await stage.done.wait()

    async def other():
        async with stage.subscriber() as weights:
            await away.wait()
            await weights.latest()
            other_has.set()
            await stage.done.wait()

    stage.play({0: publish(), 1: main(), 2: other()})


@pytest.mark.parametrize(
    ("enter", "owner", "asks"),
    [
        ("subscriber", Participant, "_beat"),
        ("publisher", Participant, "_beat"),
        ("publisher", ChannelStore, "seats"),
    ],
)
def test_the_coordinator_goes_away_while_somebody_enters(monkeypatch, enter, owner, asks):
    """They are let in when it is back, and within `timeout`."""
    stage = ServingStage(1)
    asked, restarts = getattr(owner, asks), []

    async def asking(self, *args):
        if not restarts:
            restarts.append(stage.sim.restart_coordinator(4 * PATIENCE))
        return await asked(self, *args)

    monkeypatch.setattr(owner, asks, asking)

    async def main():
        async with getattr(stage, enter)() as one:
            return one.newest

    assert stage.play({0: main()}) == [None]
    assert restarts


def test_the_coordinator_stays_away_while_somebody_enters(monkeypatch):
    stage = ServingStage(1)
    beat = Participant._beat

    async def beating(participant, store):
        stage.sim.restart_coordinator(10 * PATIENCE)
        return await beat(participant, store)

    monkeypatch.setattr(Participant, "_beat", beating)

    async def main():
        with pytest.raises(aiodist.JoinTimeoutError, match="s: the coordinator is away: "):
            await stage.subscriber(timeout=2 * PATIENCE).__aenter__()
        await asyncio.sleep(20 * PATIENCE)

    assert stage.play({0: main()}) == [None]


def mapped_here():
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split()[4] for line in lines if "memfd:aiodist-weights" in line}


@pytest.fixture
def gate(monkeypatch):
    """Chunk 10 is not checked before this is set."""
    opened = threading.Event()
    check = Holding.check

    def checked(holding, number):
        if number == 10:
            opened.wait(30)
        check(holding, number)

    monkeypatch.setattr(Holding, "check", checked)
    yield opened
    opened.set()


def test_who_took_it_for_a_host_leaves_in_the_middle(run, gate):
    """One of the others goes on, from what it has mapped; meanwhile there was one copy."""

    async def main():
        async with (
            aiodist.Coordinator("tcp://127.0.0.1:0") as coordinator,
            aiodist.publisher("policy", address=coordinator.address, transports=("tcp",)) as out,
            aiodist.subscriber("policy", address=coordinator.address) as other,
        ):
            await out.publish(tree(1), version=1)
            async with aiodist.subscriber("policy", address=coordinator.address) as first:
                leader = first._fetching.holding(out._participant.releases[-1])
                taking = asyncio.ensure_future(first.latest())
                await filled(leader, 10)
                follower = other._fetching.holding(leader.release)
                following = asyncio.ensure_future(other.latest())
                await filled(follower, 10)
                assert len(mapped_here()) == 1
                assert not follower.memory.is_own
                taking.cancel()
                gate.set()
                with pytest.raises(asyncio.CancelledError):
                    await taking
            _, got = await following
            assert np.array_equal(got["w"], tree(1)["w"])
            assert follower.memory.is_own
            # A third one maps what the second one has.
            async with aiodist.subscriber("policy", address=coordinator.address) as third:
                _, got = await third.latest()
                assert np.array_equal(got["w"], tree(1)["w"])
                assert len(mapped_here()) == 1
        assert out.bytes_sent < 1.9 * tree(1)["w"].nbytes

    run(main())


def test_a_stream_that_is_broken_off_leaves_nothing(run, gate):
    async def main():
        async with (
            aiodist.Coordinator("tcp://127.0.0.1:0") as coordinator,
            aiodist.publisher("policy", address=coordinator.address, transports=("tcp",)) as out,
        ):
            big = tree(1)["w"]
            await out.publish({"a": big[:100], "b": big}, version=1)
            async with aiodist.subscriber("policy", address=coordinator.address) as weights:
                async for name, _ in weights.stream(1):
                    assert name == "a"
                    break
                gate.set()

    run(main())


@pytest.mark.parametrize("wants", [1, 2])
def test_those_who_came_later_have_what_the_first_one_lacks(wants):
    """It stands still until its source has gone, and the others have the version meanwhile."""
    stage = ServingStage(3)
    begun, has = asyncio.Event(), asyncio.Event()
    whole = tree(1)["w"]

    def into():
        half = np.zeros(len(whole) // wants, np.int32)
        return half, {"w": aiodist.Shard(half, (slice(0, len(half)),), whole.shape)}

    async def publish():
        async with stage.publisher() as out:
            await out.publish(tree(1), version=1)
            await has.wait()

    async def first():
        mine, half = into()
        async with stage.subscriber() as weights:
            await weights.wait()
            taking = asyncio.ensure_future(weights.latest(into=half if wants > 1 else {"w": mine}))
            participant = weights._participant
            while not any(one.here > CHUNK for one in comings(participant)):  # noqa: ASYNC110
                await asyncio.sleep(1e-4)
            begun.set()
            stage.sim.nodes[1].stop()
            assert await taking == 1
            assert np.array_equal(mine, whole[: len(mine)])
        stage.done.set()

    async def second():
        async with stage.subscriber() as weights:
            await begun.wait()
            await weights.latest()
            has.set()
            await asyncio.sleep(10)
            stage.sim.nodes[1].resume()
            await stage.done.wait()

    outcomes = stage.play({0: publish(), 1: first(), 2: second()}, limit=200)
    assert outcomes == [None, None, None]


def comings(participant):
    return [*participant.stock.holdings.values(), *participant.stock.lots.values()]


def test_a_run_repeats_exactly():
    """Wherever tasks and groups are in memory: participants that leave end them in order."""

    def run():
        stage = ServingStage(4, seed=3)
        taken = [asyncio.Event() for _ in range(3)]

        async def publish():
            async with stage.publisher() as out:
                await out.publish(tree(1), version=1)
                await asyncio.gather(*[event.wait() for event in taken])
                stage.done.set()

        async def take(event):
            async with stage.subscriber() as weights:
                await weights.latest()
                event.set()
                await stage.done.wait()

        async def killed():
            async with stage.subscriber() as weights:
                await until_filled(weights, 3)
                taken[2].set()
                stage.sim.nodes[3].kill()
                await asyncio.sleep(1)

        stage.play({0: publish(), 1: take(taken[0]), 2: take(taken[1]), 3: killed()})
        return stage.sim.history.digest(), stage.sim.loop.time()

    first, kept = run(), []
    for n in range(3):
        kept.append([object() for _ in range(1000 * n + 7)])
        assert run() == first
