"""Slices and shares of versions that travel as differences, on a simulation."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from channel_stage import PATIENCE, ChannelStage, line

import aiodist
from aiodist.buffers.encoding import encode
from aiodist.channels import changes, lots, manifest, parcels, slices
from aiodist.channels.transfers import KNOWN
from aiodist.errors import ProtocolError

SHAPE = (512, 512)
NBYTES = 2 * SHAPE[0] * SHAPE[1]
CHUNK = 1 << 16


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(manifest, "CHUNK", CHUNK)
    monkeypatch.setattr(changes, "SMALL", NBYTES // 4)


def steps(versions, share=0.02, dtype=np.uint16):
    """Versions of weights, each of which differs from the one before in a share of its elements."""
    rng = np.random.default_rng(1)
    found = [rng.integers(1, 1 << 10, SHAPE).astype(dtype)]
    for _ in range(versions - 1):
        found.append((found[-1] + (rng.random(SHAPE) < share)).astype(dtype))
    return found


def cut(length, count, at):
    return slice(length * at // count, length * (at + 1) // count)


class Slices:
    """Each of `shares` publishers has some rows, and each of `takers` wants `index` of the whole.

    `sent`: bytes that all publishers sent of each version. `longest`: seconds that a taker waited
    for a version after the first.
    """

    def __init__(self, arrays, shares=2, takers=2, index=None, of=None, skips=(), **options):
        self.arrays = arrays
        self.shares = shares
        self.takers = takers
        self.index = index
        self.of = of or arrays[0].dtype
        self.skips = skips
        self.lends = options.pop("lends", ())
        self.options = options
        self.stage = ChannelStage(shares + takers, seed=1, conditions=line(12.5e6, 0.025))
        self.taken = asyncio.Barrier(shares + takers)
        self.sent = [0] * len(arrays)
        self.known = {}
        self.longest = 0.0

    def run(self):
        ranks = range(self.shares)
        mains = {at: self.publish(at) for at in ranks}
        mains |= {self.shares + at: self.follow(at) for at in range(self.takers)}
        self.stage.play(mains)
        return self

    async def publish(self, at):
        async with self.stage.publisher(part=(at, self.shares), **self.options) as out:
            await asyncio.sleep(3)  # all have come
            for version, array in enumerate(self.arrays):
                before = out.bytes_sent
                rows = (cut(SHAPE[0], self.shares, at), slice(0, SHAPE[1]))
                tree = {"w": aiodist.Shard(np.ascontiguousarray(array[rows]), rows, SHAPE)}
                await out.publish(tree, version=version, lend=version in self.lends)
                await self.taken.wait()
                await asyncio.sleep(1)
                self.sent[version] += out.bytes_sent - before

    async def follow(self, at):
        async with self.stage.subscriber() as weights:
            self.known[at] = weights._participant.stock.differences
            for version, array in enumerate(self.arrays):
                if version not in self.skips:
                    await weights.wait(newer_than=version - 1)
                    begin = self.stage.sim.loop.time()
                    await self.take(weights, version, array)
                    if version:
                        self.longest = max(self.longest, self.stage.sim.loop.time() - begin)
                    assert len(weights._participant.stock.lots) <= 2
                await self.taken.wait()
            await asyncio.sleep(2)

    async def take(self, weights, version, array):
        if self.index is None:
            got, tree = await weights.latest(newer_than=version - 1)
            assert np.array_equal(tree["w"], array)
        else:
            expected = array[self.index]
            mine = np.zeros(expected.shape, self.of)
            into = {"w": aiodist.Shard(mine, self.index, SHAPE)}
            options = {"convert": True} if self.of != array.dtype else {}
            got = await weights.latest(newer_than=version - 1, into=into, **options)
            assert np.array_equal(mine, expected)
        assert got == version


COLUMNS = (slice(0, SHAPE[0]), slice(SHAPE[1] // 4, SHAPE[1]))
ROWS = (slice(SHAPE[0] // 8, SHAPE[0]), slice(0, SHAPE[1]))


@pytest.mark.parametrize(("shares", "index"), [(2, None), (1, COLUMNS), (3, COLUMNS), (1, ROWS)])
def test_slices_and_shares_travel_as_differences(shares, index):
    play = Slices(steps(4), shares, index=index).run()
    assert play.sent[0] > NBYTES / 2
    assert max(play.sent[1:]) < NBYTES / 15  # once, although two hosts want it
    for known in play.known.values():
        assert (known.chain, known.fallbacks) == (1, 0)
        assert known.saved > 3 * 0.7 * NBYTES


def test_slices_in_another_dtype_travel_as_differences():
    play = Slices(steps(3, dtype=np.float32), index=COLUMNS, of=np.float64).run()
    assert play.sent[-1] < 2 * NBYTES / 10


def test_nothing_changed():
    play = Slices(steps(3, share=0)).run()
    assert play.sent[-1] < 20_000


def test_all_changed():
    """A source stops encoding, and the rest travels whole."""
    arrays = [one * (257 * version + 3) for version, one in enumerate(steps(3))]
    play = Slices(arrays).run()
    assert max(play.sent) < 1.05 * NBYTES
    assert play.known[0].fallbacks == play.known[1].chain == 0
    # A source that has the slices waits for nothing before it gives the rest.
    whole = Slices(arrays, deltas=False).run()
    assert play.longest < whole.longest + KNOWN * PATIENCE / 2


def test_pieces_that_a_difference_does_not_bring_come_whole(monkeypatch):
    true, calls = lots.decoded_parcel, []

    def decoded(code, check, base, lot, parcel):
        calls.append(lot.version)
        if lot.version == 2 and calls.count(2) in (2, 5):
            lots.room_for(lot, parcel)[5:6] = 7
            code = b"\x07"
        true(code, check, base, lot, parcel)

    monkeypatch.setattr(lots, "decoded_parcel", decoded)
    play = Slices(steps(4)).run()
    assert sum(known.fallbacks for known in play.known.values()) == 2
    assert play.sent[3] < NBYTES / 15  # all is well again


@pytest.mark.parametrize(("keep", "is_whole"), [(2, True), (4, False)])
def test_an_older_base_helps_as_long_as_publishers_keep_it(keep, is_whole):
    play = Slices(steps(5), skips={2, 3}, keep=keep).run()
    assert (play.sent[4] > NBYTES) == is_whole


def test_publishers_that_do_not_make_differences():
    assert min(Slices(steps(3), deltas=False).run().sent) > NBYTES


def test_lent_shares_travel_whole():
    play = Slices(steps(5), lends={2}).run()
    assert [one > NBYTES for one in play.sent] == [True, False, True, True, False]


def test_a_size_that_no_difference_has_is_refused():
    class Pair:
        async def send(self, *_, **__):
            pass

        async def recv(self, **_):
            return 0, 0, 1 << 40

    writing = manifest.Writing(encode({"w": np.zeros(8)}), 1)
    place = memoryview(bytearray(writing.release.nbytes))
    release = writing.write(place)
    arrays = slices.Arrays((release,), [bytes(place[: release.manifest])])
    lot, base = (lots.Lot(arrays, arrays.all()) for _ in range(2))
    request = parcels.Parcels(1, lot.identity, "", [], maps=False, who="me", base=b"")
    taking = parcels.take_differences(
        Pair(), lot, request, [list(lot.todo)], 1.0, parcels.Base(base, b"x", None)
    )
    with lot.wanting(), pytest.raises(ProtocolError, match="a difference of 1099511627776 bytes"):
        asyncio.run(taking)


def test_slices_come_whole_after_a_sender_of_bad_differences(monkeypatch):
    monkeypatch.setattr(parcels, "OVERHEAD", -NBYTES)  # no difference is small enough
    play = Slices(steps(3), index=COLUMNS).run()
    assert min(play.sent) > NBYTES / 2
    assert all(known.chain == 0 for known in play.known.values())
