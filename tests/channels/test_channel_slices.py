"""Weights that are published in shares, and of which others want slices, on simulated hosts."""

from __future__ import annotations

import asyncio
import random
import re

import numpy as np
import pytest
from channel_stage import PATIENCE, ChannelStage
from seeds import seeds

import aiodist
from aiodist.channels import manifest, memory, parcels, slices, subscriber
from aiodist.channels.into import VersionReading
from aiodist.testing.simulation import Killed

CHUNK = 1 << 14
SHAPE = (96, 120)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(manifest, "CHUNK", CHUNK)


def whole(version):
    w = np.arange(SHAPE[0] * SHAPE[1], dtype=np.float64).reshape(SHAPE)
    return {"layers": [w + version], "bias": np.arange(SHAPE[1]) * version}


def part(array, *index):
    return aiodist.Shard(array[index], index, array.shape)


def cut(length, count, at):
    return slice(length * at // count, length * (at + 1) // count)


def rows(version, at, count):
    """A share of a version: some rows, and a bias that every share has."""
    tree = whole(version)
    w = tree["layers"][0]
    return {**tree, "layers": [part(w, cut(SHAPE[0], count, at))]}


def columns(at, count, *, of=np.float64):
    """Memory for some columns, and for the bias."""
    index = (slice(None), cut(SHAPE[1], count, at))
    shape = (SHAPE[0], index[1].stop - index[1].start)
    into = {"layers": [aiodist.Shard(np.zeros(shape, of), index, SHAPE)]}
    return {**into, "bias": np.zeros(SHAPE[1], np.int64)}


def is_version(into, version):
    shard = into["layers"][0]
    tree = whole(version)
    return np.array_equal(shard.array, tree["layers"][0][shard.index]) and np.array_equal(
        into["bias"], tree["bias"]
    )


class Stage(ChannelStage):
    async def publish(self, at, count, versions=(1,), pause=0.0, **more):
        """One share, until all is done: how many bytes were sent of it."""
        async with self.publisher(part=(at, count), **more) as out:
            for version in versions:
                await out.publish(rows(version, at, count), version=version)
                await asyncio.sleep(pause)
            await self.done.wait()
            await asyncio.sleep(1)  # those it has met have left
            return out.bytes_sent

    def until_all(self, count):
        """To be called by each of `count` who are done."""
        left = [count]

        def one():
            left[0] -= 1
            if not left[0]:
                self.done.set()

        return one


async def known(weights, version):
    """Wait until the subscriber knows of it."""
    while weights.newest != version:
        await weights._participant.changed.wait()


def nbytes(tree):
    return sum(array.nbytes for array in [*tree["layers"], tree["bias"]])


@pytest.mark.parametrize(("shares", "parts"), [(4, 3), (1, 2), (3, 1), (2, 5)])
def test_rows_become_columns_and_no_byte_crosses_that_need_not(shares, parts):
    stage = Stage(shares + parts)
    one_done = stage.until_all(parts)

    async def take(at):
        async with stage.subscriber() as weights:
            into = columns(at, parts)
            assert await weights.latest(into=into) == 1
            assert is_version(into, 1)
            one_done()
            await stage.done.wait()
            await asyncio.sleep(1)
            return weights._participant.meetings.bytes_moved[0]

    mains = {at: stage.publish(at, shares) for at in range(shares)}
    mains |= {shares + at: take(at) for at in range(parts)}
    outcomes = stage.play(mains)
    tree = whole(1)
    # Each column once, and the bias once for each who wants it: those hosts hand that on.
    moved = tree["layers"][0].nbytes + parts * tree["bias"].nbytes
    assert moved <= sum(outcomes) <= 1.05 * moved + 4096 * parts
    assert sum(outcomes[:shares]) <= moved - (parts - 1) * tree["bias"].nbytes + 4096 * parts


def test_those_who_want_the_same_form_a_chain():
    """However many there are, the publishers send each byte once."""
    stage = Stage(2 + 6)
    one_done = stage.until_all(6)

    async def take():
        async with stage.subscriber() as weights:
            into = columns(0, 2)
            await weights.latest(into=into)
            assert is_version(into, 1)
            one_done()
            await stage.done.wait()

    mains = {at: stage.publish(at, 2) for at in range(2)}
    outcomes = stage.play({**mains, **{2 + at: take() for at in range(6)}})
    wanted = whole(1)["layers"][0].nbytes / 2 + whole(1)["bias"].nbytes
    assert sum(outcomes[:2]) <= 1.1 * wanted + 8192


def test_all_of_a_version_of_several_shares():
    stage = Stage(4)
    one_done = stage.until_all(2)

    async def publish(at):
        async with stage.publisher(part=(at, 2)) as out:
            tree = rows(1, at, 2)
            await out.publish({**tree, f"own{at}": np.full(5, at), "step": 7}, version=1)
            await stage.done.wait()

    async def take():
        async with stage.subscriber() as weights:
            version, got = await weights.latest()
            expected = whole(1)
            assert version == 1
            assert list(got) == ["layers", "bias", "own0", "step", "own1"]
            assert np.array_equal(got["layers"][0], expected["layers"][0])
            assert not got["layers"][0].flags.writeable
            assert (got["own0"].sum(), got["own1"].sum(), got["step"]) == (0, 5, 7)
            one_done()
            await stage.done.wait()

    async def stream():
        async with stage.subscriber() as weights:
            await known(weights, 1)
            names = {name: array async for name, array in weights.stream(1)}
            assert [*names] == ["layers.0", "bias", "own0", "own1"]
            assert np.array_equal(names["layers.0"], whole(1)["layers"][0])
            into = {"layers": [np.zeros(SHAPE)], "own1": np.zeros(5, int)}  # whole arrays
            assert await weights.latest(into=into) == 1
            assert np.array_equal(into["layers"][0], whole(1)["layers"][0])
            one_done()
            await stage.done.wait()

    stage.play({0: publish(0), 1: publish(1), 2: take(), 3: stream()})


@pytest.mark.parametrize(("shares", "sliced"), [(1, True), (2, True), (1, False)])
def test_a_version_comes_after_there_was_no_memory_for_it(monkeypatch, caplog, shares, sliced):
    """Memory is free again at the third attempt, which the same call makes, after a warning."""
    stage = Stage(shares + 1)
    made, make = [], memory.MemoryBlock

    def fails(*args, **more):
        made.append(args)
        if len(made) <= 2:
            raise OSError(24, "Too many open files")
        return make(*args, **more)

    async def take():
        async with stage.subscriber() as weights:
            await known(weights, 1)
            monkeypatch.setattr(memory, "MemoryBlock", fails)
            into = columns(0, 2) if sliced else whole(0)
            assert await weights.latest(into=into) == 1
            assert is_version(into, 1) if sliced else (into["bias"] == whole(1)["bias"]).all()
            assert len(made) == 3
            assert not weights._participant.trouble
        stage.done.set()

    stage.play({**{at: stage.publish(at, shares) for at in range(shares)}, shares: take()})
    (warning,) = [one.getMessage() for one in caplog.records if "memory" in one.getMessage()]
    assert re.fullmatch(r".*trying again and again: no memory of \d+ bytes.*open files", warning)


@pytest.mark.parametrize("shares", [1, 2])
def test_a_stream_waits_longer_than_patience_for_memory(monkeypatch, shares):
    stage = Stage(shares + 1)
    clock, make = stage.sim.loop.time, memory.MemoryBlock

    async def stream():
        async with stage.subscriber() as weights:
            await known(weights, 1)
            free = clock() + 3 * PATIENCE

            def fails(*args, **more):
                if clock() < free:
                    raise OSError(24, "Too many open files")
                return make(*args, **more)

            monkeypatch.setattr(memory, "MemoryBlock", fails)
            names = [name async for name, _ in weights.stream(1)]
            assert sorted(names) == ["bias", "layers.0"]
            assert clock() > free
        stage.done.set()

    stage.play({**{at: stage.publish(at, shares) for at in range(shares)}, shares: stream()})


def test_floats_of_another_dtype():
    stage = Stage(2)

    async def take():
        async with stage.subscriber() as weights:
            into = columns(1, 2, of=np.float32)
            with pytest.raises(TypeError, match=r"into\['layers'\]\[0\]: is float32, the publ.*64"):
                await weights.latest(into=into)
            assert not into["bias"].any()
            assert await weights.latest(into=into, convert=True) == 1
            assert is_version(into, 1)  # these are numbers that float32 has
            wrong = {"bias": np.zeros(SHAPE[1])}
            with pytest.raises(TypeError, match=r"into\['bias'\]: is float64, the publ.* int64"):
                await weights.latest(into=wrong, convert=True)
            for into, text in (
                ({"more": part(np.zeros(3), slice(0, 1))}, "into['more']: the version has no"),
                ({"bias": part(np.zeros(9, int), slice(2))}, "into['bias']: is of an array of sha"),
            ):
                with pytest.raises(ValueError) as caught:
                    await weights.latest(into=into)
                assert text in str(caught.value)
            stage.done.set()

    stage.play({0: stage.publish(0, 1), 1: take()})


def test_what_nobody_publishes_and_shares_that_do_not_agree():
    stage = Stage(3)

    async def publish(at):
        async with stage.publisher(part=(at, 2)) as out:
            w = np.arange(12)
            await out.publish({"w": part(w, slice(3 * at, 3 * at + 3))}, version=1)
            await out.publish({"w": np.zeros(3, (int, float)[at])}, version=2)
            await stage.done.wait()

    async def take():
        async with stage.subscriber() as weights:
            await known(weights, 2)
            with pytest.raises(ValueError, match=r"\['w'\]: share 1 is of \('float64', \(3,\)\)"):
                await weights.latest()
            with pytest.raises(ValueError, match=r"\['w'\]: \[0:12\] is wanted, and .* \[6:12\]"):
                async for _ in weights.stream(1):
                    pass
        stage.done.set()

    stage.play({0: publish(0), 1: publish(1), 2: take()})


def test_who_may_publish_what():
    stage = Stage(3)

    async def refused(text, **more):
        with pytest.raises(aiodist.JoinError, match=text):
            async with stage.publisher(**more):
                pass

    async def others():
        await asyncio.sleep(1)
        await refused("has a publisher already, of part 1 of 2", part=(1, 2))
        await refused("has a publisher already, of part 0 of 2; this is one of 1: end it first")
        stage.done.set()

    stage.play({0: stage.publish(0, 2), 1: stage.publish(1, 2), 2: others()})


def test_a_part_that_is_not_the_whole_needs_others(run):
    async def main():
        async with (
            aiodist.Coordinator("tcp://127.0.0.1:0") as coordinator,
            aiodist.publisher("policy", address=coordinator.address) as out,
        ):
            w = np.zeros(8)
            with pytest.raises(ValueError, match=r"value\['w'\] is \[0:4\] of an array of shape"):
                await out.publish({"w": part(w, slice(4))}, version=1)
            await out.publish({"w": part(w, slice(8))}, version=1)

    run(main())
    for nonsense in ((2, 2), (0, 0), 3, (True, 2.0)):
        with pytest.raises(ValueError, match="part is"):
            aiodist.publisher("policy", address="tcp://127.0.0.1:1", part=nonsense)


@pytest.mark.parametrize("how", ["kill", "stop"])
def test_a_source_of_slices_that_goes_in_the_middle(how, monkeypatch):
    """Those who take from it go on with others, and ask for what they lack."""
    stage = Stage(5)
    has_begun = asyncio.Event()

    class Begun(VersionReading):
        def begin(self, coming):
            super().begin(coming)
            has_begun.set()

    monkeypatch.setattr(subscriber, "VersionReading", Begun)

    async def first():
        async with stage.subscriber() as weights:
            taking = asyncio.ensure_future(weights.latest(into=columns(0, 2)))
            while not weights._participant.stock.lots:
                has_begun.clear()
                await has_begun.wait()
            (lot,) = weights._participant.stock.lots.values()
            while lot._missing > lot.want["['layers'][0]"][1][1] * SHAPE[0] / 3:
                await lot.news()
            getattr(stage.sim.nodes[2], how)()
            await taking

    one_done = stage.until_all(2)

    async def take():
        await asyncio.sleep(0.02)
        async with stage.subscriber() as weights:
            into = columns(0, 2)
            begun = stage.sim.loop.time()
            assert await weights.latest(into=into) == 1
            assert is_version(into, 1)
            assert stage.sim.loop.time() - begun < 2 * PATIENCE + 2
            one_done()
            await stage.done.wait()
            stage.sim.nodes[2].resume()

    mains = {at: stage.publish(at, 2) for at in range(2)}
    outcomes = stage.play({**mains, 2: first(), 3: take(), 4: take()})
    # Half of it is wanted: twice at most, and a little around the weights.
    assert sum(outcomes[:2]) <= 1.05 * nbytes(whole(1))


def test_a_parcel_that_comes_twice_is_refused(monkeypatch):
    """The second one would be written over the first one, which was checked."""
    stage = Stage(2)
    give, work, given, checked = parcels.give, parcels.in_thread, [], asyncio.Event()

    async def gives_twice(pair, coming, source, wanted, patience, **more):
        given.append(pair)
        if len(given) > 1:
            await give(pair, coming, source, wanted, patience, **more)
            return
        data, check = slices.packed_parcel(source, wanted[0])
        for bad in (data, np.full_like(data, 9)):
            pair.send((0, check), 1, tag="parts")
            pair.send(bad, 1, tag="parts")
            await checked.wait()
        await stage.done.wait()

    async def works_long(work_of_thread):
        found = await work(work_of_thread)
        checked.set()
        await asyncio.sleep(0.5)  # so that the second one comes before the first one counts
        return found

    monkeypatch.setattr(parcels, "give", gives_twice)
    monkeypatch.setattr(parcels, "in_thread", works_long)

    async def take():
        async with stage.subscriber() as weights:
            into = {"layers": [part(np.zeros(SHAPE), slice(None))]}
            assert await weights.latest(into=into) == 1
            assert np.array_equal(into["layers"][0].array, whole(1)["layers"][0])
            assert len(given) == 2
        stage.done.set()

    stage.play({0: stage.publish(0, 1), 1: take()})


def test_the_publishers_die_when_one_has_what_is_wanted():
    stage = Stage(4)
    has = asyncio.Event()

    async def first():
        async with stage.subscriber() as weights:
            await weights.latest(into=columns(0, 1))
            for node in (0, 1):
                stage.sim.nodes[node].kill()
            has.set()
            await stage.done.wait()

    async def late():
        await has.wait()
        async with stage.subscriber() as weights:
            into = columns(1, 3)
            assert await weights.latest(into=into) == 1
            assert is_version(into, 1)
        stage.done.set()

    mains = {at: stage.publish(at, 2) for at in range(2)}
    stage.play({**mains, 2: first(), 3: late()})


@pytest.mark.parametrize("seed", seeds(2, 6))
def test_random_histories(seed):
    """Shares, slices, deaths, stops, restarts: nobody ever gets a mixed version, and whoever lives
    gets the newest one."""
    chance = random.Random(seed)
    shares, takers, last = chance.choice((1, 2, 3)), 5, 5
    stage = Stage(shares + takers, seed=seed, durable=chance.random() < 0.5)
    nodes = stage.sim.nodes
    problems = []
    stage.sim.extra_problems = lambda: problems
    one_done = stage.until_all(takers)

    async def take(at):
        await asyncio.sleep(chance.uniform(0, 1.5))
        count = chance.choice((1, 2, 3))
        newest = 0
        async with stage.subscriber() as weights:
            into = columns(chance.randrange(count), count)
            while newest < last:
                version = await weights.latest(newer_than=newest, into=into)
                if version <= newest or not is_version(into, version):
                    problems.append(f"taker {at}: {version} after {newest} is mixed")
                if len(weights._participant.stock.lots) > 2:
                    problems.append(f"taker {at} has {len(weights._participant.stock.lots)} lots")
                newest = version
            one_done()
            await stage.done.wait()
        return newest

    async def faults(at):
        following = asyncio.ensure_future(take(at))
        for _ in range(3):
            await asyncio.sleep(chance.uniform(0.1, 1.0))
            what = chance.choice(["kill", "stop", "coordinator"])
            victim = chance.choice((shares, shares + 1))
            if what == "kill" and nodes[victim].alive:
                nodes[victim].kill(chance.choice(["reset", "silent"]))
                one_done()
            elif what == "stop" and nodes[victim].alive:
                stage.sim.network.later_by(chance.uniform(1, 6), nodes[victim].stop())
            elif what == "coordinator":
                stage.sim.restart_coordinator(chance.uniform(0.1, 1.0))
        return await following

    versions, deltas = range(1, last + 1), chance.choice((None, True, True))
    mains = {
        at: stage.publish(at, shares, versions, pause=0.5, deltas=deltas) for at in range(shares)
    }
    mains |= {shares + at: take(at) for at in range(takers - 1)}
    mains[shares + takers - 1] = faults(takers - 1)
    outcomes = stage.play(mains)
    for outcome in outcomes[shares:]:
        assert outcome == last or isinstance(outcome, Killed)
