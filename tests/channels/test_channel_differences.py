"""Versions that travel as differences, on a simulation."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from channel_stage import PATIENCE, ChannelStage, line

from aiodist.channels import chains, changes
from aiodist.channels.directory import MOST_RELEASES

MIB = 1 << 20
DELAY = 0.025
NBYTES = 2 * MIB
LINE = line(12.5e6, DELAY)
"""It takes longer for a version than two processors for its difference."""


def steps(versions, share=0.02, seed=1):
    """Versions of weights, each of which differs from the one before in a share of its elements."""
    rng = np.random.default_rng(seed)
    found = [rng.integers(0, 1 << 16, NBYTES // 2).astype(np.uint16)]
    for _ in range(versions - 1):
        which = rng.random(NBYTES // 2) < share
        found.append(found[-1] + which.astype(np.uint16))
    return [{"a": one[:1000], "b": one[1000:].reshape(2, -1), "n": 7} for one in found]


def same(tree, expected):
    assert tree["n"] == 7
    return all(np.array_equal(tree[key], expected[key]) for key in "ab")


class Play:
    """Subscribers take versions from a publisher, in step with it; `sent`: bytes that the publisher
    had sent before and after each version."""

    def __init__(self, trees, size=2, **options):
        self.trees = trees
        self.options = options
        self.stage = ChannelStage(size, seed=1, conditions=LINE)
        self.taken = [0] * len(trees)
        self.news = asyncio.Event()
        self.sent = []
        self.seconds = []
        self.known = {}
        self.skips = {}  # versions that a rank does not take

    def run(self):
        ranks = range(1, self.stage.sim.size)
        self.stage.play({0: self.publish(), **{rank: self.follow(rank) for rank in ranks}})
        return self

    async def publish(self):
        async with self.stage.publisher(**self.options) as out:
            self.known[0] = out._participant.stock.differences
            await asyncio.sleep(3)  # all have come
            for version, tree in enumerate(self.trees):
                before, begin = out.bytes_sent, self.stage.sim.loop.time()
                await self.publish_one(out, tree, version)
                while self.taken[version] < self.takers(version):
                    await self.news.wait()
                self.seconds.append(self.stage.sim.loop.time() - begin)
                await asyncio.sleep(1)
                self.sent.append(out.bytes_sent - before)
            self.stage.done.set()

    async def publish_one(self, out, tree, version):
        await out.publish(tree, version=version)

    def takers(self, version):
        ranks = range(1, self.stage.sim.size)
        return sum(version not in self.skips.get(rank, ()) for rank in ranks)

    async def follow(self, rank):
        async with self.stage.subscriber() as weights:
            self.known[rank] = weights._participant.stock.differences
            for version, expected in enumerate(self.trees):
                if version in self.skips.get(rank, ()):
                    continue
                got, tree = await weights.latest(newer_than=version - 1)
                assert got == version
                assert same(tree, expected)
                self.taken[version] += 1
                self.news.set()
                self.news = asyncio.Event()
            await self.stage.done.wait()


@pytest.mark.parametrize("size", [2, 4])
def test_a_version_travels_as_its_difference(size):
    play = Play(steps(5), size).run()
    # The first one is new, and after the second one it is known that a difference pays.
    assert min(play.sent[:2]) > NBYTES
    assert max(play.sent[2:]) < NBYTES / 15
    assert max(play.seconds[2:]) < min(play.seconds[:2])
    for rank in range(1, size):
        known = play.known[rank]
        assert (known.chain, known.fallbacks) == (1, 0)
        assert 2.8 * NBYTES < known.saved < 3 * NBYTES
    assert play.known[0].changed == pytest.approx(0.02, rel=0.05)


def test_decoding_takes_longer_than_the_patience(monkeypatch):
    """A receiver has all codes of a large version long before it has decoded them."""

    async def in_slow_thread(work):
        await asyncio.sleep(3 * PATIENCE)
        return work()

    monkeypatch.setattr(chains, "in_thread", in_slow_thread)
    play = Play(steps(4)).run()
    assert max(play.sent[2:]) < NBYTES / 15
    assert play.known[1].chain == 1
    assert min(play.seconds[2:]) > 3 * PATIENCE


def test_nothing_changed():
    play = Play(steps(4, share=0)).run()
    assert play.sent[-1] < 10_000
    assert play.seconds[-1] < 6 * 2 * DELAY


def test_all_changed():
    """Encoding ends when it has taken a quarter of the version, and the rest travels whole."""
    play = Play([dict(one, b=one["b"] * 257 * version) for version, one in enumerate(steps(4))])
    play.run()
    assert max(play.sent) < 1.05 * NBYTES
    assert play.known[0].nbytes == 0


@pytest.mark.parametrize("chunks", [[2], [2, 3, 5]])
def test_parts_that_have_changed_altogether(chunks):
    """Their codes are as large as they are, and go in pieces. Where these are too much, encoding
    ends in the middle, and the rest travels whole."""
    rng = np.random.default_rng(2)
    trees = steps(5)
    for tree in trees:
        for number in chunks:
            first = (number - 1) << 17
            tree["b"].reshape(-1)[first : first + 120_000] = rng.integers(0, 1 << 16, 120_000)
    play = Play(trees, size=3).run()
    assert max(play.seconds[2:]) < 1.2 * play.seconds[1]
    if len(chunks) == 1:
        assert max(play.sent[2:]) < NBYTES / 5
        assert play.known[2].chain == 1
    else:
        assert NBYTES / 4 < max(play.sent[2:]) < 1.05 * NBYTES
        assert play.known[2].chain == 0
        assert play.known[2].fallbacks == 0


def test_one_that_is_behind_takes_a_chain():
    play = Play(steps(8), size=3)
    play.skips = {1: {4, 5, 6}}
    play.run()
    assert play.sent[7] < NBYTES / 5
    assert play.known[1].chain == 4
    assert play.known[2].chain == 1


def test_one_that_is_too_far_behind_takes_the_whole():
    play = Play(steps(10, share=0.2), size=3)
    play.skips = {1: set(range(2, 9))}
    play.run()
    assert (play.known[1].chain, play.known[2].chain) == (0, 1)


def test_one_that_is_behind_by_more_versions_than_a_chain_has_takes_the_whole():
    newest = MOST_RELEASES + 6
    play = Play(steps(newest + 1, share=0.0005), deltas=True)
    play.skips = {1: set(range(1, newest))}
    play.run()
    assert play.known[1].chain == 0
    assert play.sent[newest] > NBYTES


@pytest.mark.parametrize("way", ["chain", "codes"])
def test_a_sender_of_a_bad_chain_still_gives_the_version(way, monkeypatch):
    true = changes.Differences.between
    codes = chains._messages

    def between(self, base, result, most):
        chain = true(self, base, result, most)
        return [*chain, *chain] if way == "chain" else chain

    def messages(number, found):
        yield from [(-1, [])] if way == "codes" and number == 2 else codes(number, found)

    monkeypatch.setattr(changes.Differences, "between", between)
    monkeypatch.setattr(chains, "_messages", messages)
    play = Play(steps(4)).run()  # the subscriber takes each version
    assert play.known[1].chain == 0
    assert min(play.sent) > NBYTES / 2


def test_no_more_than_a_quarter_of_a_version_is_kept():
    play = Play(steps(8, share=0.2)).run()
    for known in play.known.values():
        assert 0 < known.nbytes <= NBYTES / 4


@pytest.mark.parametrize("damaged", [{1}, {3, 4}, {9}, set(range(1, 10))])
def test_chunks_that_a_difference_does_not_bring_come_whole(damaged, monkeypatch):
    true = changes.apply

    def apply(base, holding, number, codes):
        if holding.version == 3 and number in damaged:
            holding.part(number)[5:6] = b"x"
            codes = [b"\x07"]
        true(base, holding, number, codes)

    monkeypatch.setattr(chains, "apply", apply)
    play = Play(steps(5), size=3).run()
    assert [play.known[rank].fallbacks for rank in (1, 2)] == [len(damaged)] * 2
    assert play.sent[4] < NBYTES / 15  # all is well again


@pytest.mark.parametrize("deltas", [True, False])
def test_it_can_be_said_whether_there_are_differences(deltas):
    play = Play(steps(3), deltas=deltas).run()
    if deltas:
        assert max(play.sent[1:]) < NBYTES / 15  # no subscriber has to ask first
    else:
        assert min(play.sent) > NBYTES


def test_no_arrays():
    stage = ChannelStage(2, seed=1, conditions=LINE)

    async def publish():
        async with stage.publisher(deltas=True) as out:
            for version in range(3):
                await out.publish({"n": version}, version=version)
                await asyncio.sleep(2)
            await stage.done.wait()

    async def follow():
        async with stage.subscriber() as weights:
            for version in range(3):
                assert await weights.latest(newer_than=version - 1) == (version, {"n": version})
        stage.done.set()

    stage.play({0: publish(), 1: follow()})


@pytest.mark.parametrize("shape", ["shapes", "names", "dtypes"])
def test_a_version_that_is_made_otherwise_travels_whole(shape):
    trees = steps(6)
    match shape:
        case "shapes":
            trees[4] = {**trees[4], "b": trees[4]["b"].reshape(4, -1)}
        case "names":
            trees[4] = {**trees[4], "m": trees[4]["n"]}
        case "dtypes":
            trees[4] = {**trees[4], "b": trees[4]["b"].view(np.int16)}
    play = Play(trees).run()
    assert [one > NBYTES for one in play.sent] == [True, True, False, False, True, True]


def test_lent_versions_travel_whole():
    class Lending(Play):
        async def publish_one(self, out, tree, version):
            await out.publish(tree, version=version, lend=version == 4)

    play = Lending(steps(7)).run()
    assert [one > NBYTES for one in play.sent] == [True, True, False, False, True, True, False]


def test_a_difference_comes_wherever_a_connection_breaks():
    """Half of the bytes that the publisher sends after two whole versions, and more, are codes."""
    for at in range(2 * NBYTES + 2_000, 2 * NBYTES + 80_000, 15_000):
        play = Play(steps(6))
        play.stage.sim.network.break_after(
            *play.stage.sim.nodes[:2], at, arrived=at % 10_000 > 5_000
        )
        play.run()
        assert play.stage.sim.network.broken
        assert play.known[1].fallbacks == 0


@pytest.mark.parametrize("victim", [1, 2])
def test_one_that_hands_a_difference_on_is_killed(victim):
    """Those behind it take the rest from others, and never another version's bytes."""
    stage = ChannelStage(4, seed=1, conditions=LINE)
    trees = steps(8)
    given, ends = [], set()

    async def publish():
        async with stage.publisher(deltas=True) as out:
            await asyncio.sleep(3)
            for version, tree in enumerate(trees):
                await out.publish(tree, version=version)
                await asyncio.sleep(0.4)
                if version == 4:
                    asyncio.get_running_loop().call_later(0.05, stage.sim.nodes[victim].kill)
            await stage.done.wait()

    async def follow(rank):
        async with stage.subscriber() as weights:
            version = -1
            while version < len(trees) - 1:
                version, tree = await weights.latest(newer_than=version)
                assert same(tree, trees[version])
                given.append((rank, version))
            ends.add(rank)
            if len(ends) == 2:
                stage.done.set()
            await stage.done.wait()

    stage.play({0: publish(), **{rank: follow(rank) for rank in (1, 2, 3)}})
    assert {rank for rank, version in given if version == 7} == {1, 2, 3} - {victim}
    assert max(version for rank, version in given if rank == victim) < 7


@pytest.mark.parametrize("way", ["into", "in_place", "stream"])
def test_every_way_to_take_a_version(way):
    """Where it goes has nothing to do with how it comes."""
    stage = ChannelStage(2, seed=1, conditions=LINE)
    rng = np.random.default_rng(1)
    base = rng.normal(0, 1, NBYTES // 4).astype(np.float32)
    arrays = [base + np.where(np.arange(len(base)) % 50 == at, 1, 0) for at in range(4)]
    arrays = [array.astype(np.float32) for array in arrays]
    taken = asyncio.Event()

    async def publish():
        async with stage.publisher(deltas=True) as out:
            await asyncio.sleep(3)
            for version, array in enumerate(arrays):
                taken.clear()
                await out.publish({"w": array}, version=version)
                await taken.wait()
            stage.done.set()
            return out.bytes_sent

    async def follow():
        async with stage.subscriber() as weights:
            for version, array in enumerate(arrays):
                await weights.wait(newer_than=version - 1)
                into = {"w": np.zeros_like(base)}
                if way == "stream":
                    into = dict([one async for one in weights.stream(version)])
                else:
                    options = {} if way == "into" else {way: True}
                    got = await weights.latest(newer_than=version - 1, into=into, **options)
                    assert got == version
                assert np.array_equal(into["w"], array)
                taken.set()
            await stage.done.wait()
            return weights._participant.stock.differences.chain

    sent, chain = stage.play({0: publish(), 1: follow()})
    assert sent < 1.3 * NBYTES
    assert chain == 1
