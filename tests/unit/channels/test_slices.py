"""Slices of the arrays of a version: what is cut out, what comes, and of whom it is asked."""

from __future__ import annotations

import asyncio
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiodist import Shard
from aiodist.buffers.encoding import encode
from aiodist.channels import lots, manifest, slices
from aiodist.channels.holding import Holding
from aiodist.channels.lots import Lot
from aiodist.channels.manifest import Writing
from aiodist.channels.memory import VersionMemory
from aiodist.channels.slices import Arrays, Piece, WholeVersion
from aiodist.channels.trees import unwrapped
from aiodist.errors import ProtocolError
from aiodist.schedules.resharding import remainder


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(manifest, "CHUNK", 128)


def held(tree, share=0, shares=1, version=1):
    """A share of a version, whole."""
    plain, extents = unwrapped(tree, shares=shares)
    writing = Writing(encode(plain), version, extents, (share, shares))
    memory = VersionMemory(writing.release.nbytes, shared=False)
    holding = Holding(writing.write(memory.view))
    holding.take(memory, holding.release.parts)
    return holding


def arrays_of(*holdings):
    return Arrays(tuple(one.release for one in holdings), [bytes(one.part(0)) for one in holdings])


def bring(lot, sources, asks):
    """What was asked of each source comes."""
    if lot.memory is None:
        lot.take(VersionMemory(lot.nbytes, shared=False))
    for source, asked in zip(sources, asks, strict=True):
        for parcel in slices.parcels(asked, lot.arrays):
            data, check = slices.packed_parcel(source, parcel)
            room = lots.room_for(lot, parcel)
            room[:] = data
            lots.unpacked_parcel(room, check, lot, parcel)
            for piece in parcel:
                lot.fill(piece)


def shard(array, box):
    index = tuple(slice(*interval) for interval in box)
    return Shard(np.array(array[index], order="C"), index, array.shape)


@st.composite
def problems(draw):
    """An array, who holds which boxes of it (all of it together), and who wants which."""
    shape = tuple(draw(st.lists(st.integers(0, 6), max_size=3)))
    boxes = st.tuples(
        *[st.lists(st.integers(0, n), min_size=2, max_size=2).map(sorted).map(tuple) for n in shape]
    )
    first = draw(boxes)
    rest = remainder(tuple((0, n) for n in shape), first) if all(b > a for a, b in first) else []
    holds = [first, *rest, *draw(st.lists(boxes, max_size=2))]
    if not rest and any(a == b for a, b in first):
        holds.append(tuple((0, n) for n in shape))
    return shape, holds, draw(st.lists(boxes, min_size=1, max_size=4))


@settings(deadline=None)
@given(problems(), st.data())
def test_what_comes_is_what_numpy_would_cut(problem, data):
    """Each takes what it wants from those before it and from the shares, as they have it."""
    shape, holds, wanted = problem
    dtype = data.draw(st.sampled_from([np.uint8, np.float64]))
    whole = np.arange(int(np.prod(shape))).reshape(shape).astype(dtype)
    order = data.draw(st.permutations(range(len(holds))))
    shares = [
        held({"w": shard(whole, holds[at]), "n": 3}, share, len(holds))
        for share, at in enumerate(order)
    ]
    arrays = arrays_of(*shares)
    sources, has = [WholeVersion(one) for one in shares], [{"['w']": holds[at]} for at in order]
    for box in wanted:
        want = {"['w']": box}
        arrays.check(want)
        lot = Lot(arrays, want)
        far = data.draw(st.lists(st.integers(0, 3), min_size=len(has), max_size=len(has)))
        asks, lacking = lots.asked_of(lot, has, far, 0)
        assert not lacking
        bring(lot, sources, asks)
        assert lot.is_whole
        (leaf,) = lot.leaves()
        assert lot.has_leaf(leaf)
        expected = whole[tuple(slice(*interval) for interval in box)]
        assert np.array_equal(lot.read(leaf), expected)
        sources.append(lot)
        has.append(want)


@settings(deadline=None)
@given(problems(), st.data())
def test_a_difference_of_a_parcel_makes_the_newer_one(problem, data):
    """It comes from any share, in any mixture of dtypes, and from slices that are passed on."""
    shape, holds, wanted = problem
    dtypes = st.sampled_from([np.uint8, np.uint16, np.float32, np.complex128])
    changes = np.random.default_rng(data.draw(st.integers(0, 99)))
    old = {"w": np.zeros(shape, data.draw(dtypes)), "n": np.arange(9, dtype=data.draw(dtypes))}
    new = {key: array + (changes.random(array.shape) < 0.2) for key, array in old.items()}
    new = {key: array.astype(old[key].dtype) for key, array in new.items()}
    lots_of, sources = [], []
    for version, tree in enumerate([old, new]):
        shares = [
            held({**tree, "w": shard(tree["w"], box)}, share, len(holds), version)
            for share, box in enumerate(holds)
        ]
        sources.append([WholeVersion(one) for one in shares])
        want = {"['w']": wanted[0], "['n']": ((2, 7),)}
        lots_of.append(Lot(arrays_of(*shares), want))
    has = [{"['w']": box, "['n']": ((0, 9),)} for box in holds]
    base, newer = lots_of
    bring(base, sources[0], lots.asked_of(base, has, [0] * len(has), 0)[0])
    newer.take(VersionMemory(newer.nbytes, shared=False))
    asks, _ = lots.asked_of(newer, has, [0] * len(has), 0)
    for before, source, asked in zip(*sources, asks, strict=True):
        for parcel in slices.parcels(asked, newer.arrays):
            coded = slices.coded_parcel(source, before, parcel)
            assert coded.nbytes == newer.nbytes_of(parcel)
            lots.decoded_parcel(coded.code, coded.check, base, newer, parcel)
            with pytest.raises(ProtocolError):
                lots.decoded_parcel(coded.code, coded.check ^ 1, base, newer, parcel)
            lots.decoded_parcel(coded.code, coded.check, base, newer, parcel)
            for piece in parcel:
                newer.fill(piece)
    assert newer.is_whole
    for leaf in newer.leaves():
        index = tuple(slice(*interval) for interval in newer.want[leaf.key])
        assert np.array_equal(newer.read(leaf), new[leaf.name][index])


def test_an_older_version_with_other_arrays_is_no_base():
    holdings = [held({"w": np.zeros(8), "v": np.zeros(9)}), held({"w": np.zeros(9)})]
    source, other = map(WholeVersion, holdings)
    assert slices.coded_parcel(source, other, [slices.Piece("['v']", ((0, 9),))]) is None
    assert slices.coded_parcel(other, source, [slices.Piece("['w']", ((0, 9),))]) is None


def test_a_part_is_handed_on_as_soon_as_it_is_there():
    w = np.arange(64.0).reshape(16, 4)
    share = held({"w": w})
    lot = Lot(arrays_of(share), {"['w']": ((0, 16), (0, 2))})
    first, second = Piece("['w']", ((0, 8), (0, 2))), Piece("['w']", ((8, 16), (0, 1)))
    bring(lot, [WholeVersion(share)], [[first]])
    assert lot.has(lot.needed(first))
    assert not lot.has(lot.needed(second))
    assert not lot.has(lot.needed(Piece("['w']", ((7, 9), (0, 2)))))
    assert not lot.is_whole
    assert not lot.has_leaf(lot.leaves()[0])


def test_only_what_is_there_has_to_be():
    """Of a version that comes chunk by chunk, those are needed in which the piece lies."""
    w = np.arange(16 * 16, dtype=np.float64).reshape(16, 16)  # each row is a chunk
    share = held({"a": np.zeros(16), "w": w})
    whole = WholeVersion(share)
    assert whole.needed(Piece("['w']", ((3, 5), (0, 2)))) == {5, 6}
    assert whole.needed(Piece("['a']", ((0, 1),))) == {1}
    share.filled = 6
    assert not whole.has({5, 6})
    assert whole.has({5})


@pytest.mark.parametrize(
    "piece", [Piece("['x']", ()), Piece("['w']", ((0, 9),)), Piece("['w']", ())]
)
def test_what_is_not_held_cannot_be_asked_for(piece):
    share = held({"w": np.zeros(8)})
    lot = Lot(arrays_of(share), {"['w']": ((0, 4),)})
    for source in (WholeVersion(share), lot):
        with pytest.raises(ProtocolError, match=r"is not (held|wanted) here"):
            source.needed(piece)


def test_what_nobody_has_stays_to_be_done():
    share = held({"w": np.arange(8)})
    lot = Lot(arrays_of(share), {"['w']": ((0, 8),)})
    asks, lot.todo = lots.asked_of(lot, [{"['w']": ((2, 4),)}], [0], 0)
    assert asks == [[Piece("['w']", ((2, 4),))]]
    lot.lack([asks[0]])
    asks, lacking = lots.asked_of(lot, [{"['w']": ((0, 8),)}], [0], 0)
    bring(lot, [WholeVersion(share)], asks)
    assert not lacking
    assert np.array_equal(lot.tree()["w"], np.arange(8))


def test_a_damaged_parcel_is_noticed():
    share = held({"w": np.arange(8)})
    lot = Lot(arrays_of(share), lot_all := {"['w']": ((0, 8),)})
    parcel = [Piece("['w']", lot_all["['w']"])]
    data, check = slices.packed_parcel(WholeVersion(share), parcel)
    lot.take(VersionMemory(lot.nbytes, shared=False))
    with pytest.raises(ProtocolError, match="a parcel of version 1 came damaged"):
        lots.unpacked_parcel(data, check ^ 1, lot, parcel)


def test_what_is_asked_for_lies_in_a_box_of_each_array():
    whole = WholeVersion(held({"w": np.zeros((8, 8)), "b": np.zeros(9, np.int16)}))
    asked = [
        Piece("['w']", ((1, 2), (0, 3))),
        Piece("['w']", ((4, 6), (2, 4))),
        Piece("['b']", ((3, 9),)),
    ]
    boxes, nbytes = whole.around(asked)
    assert boxes == [("['w']", ((1, 6), (0, 4)), 8), ("['b']", ((3, 9),), 2)]
    assert nbytes == 8 * (3 + 4) + 2 * 6
    for nonsense in (Piece("['x']", ()), Piece("['w']", ((0, 1),))):
        with pytest.raises(ProtocolError, match="is not held here"):
            whole.around([*asked, nonsense])


def test_what_lies_in_the_memory_of_another_one_is_copied():
    """Of a version as a whole, and of slices of it."""
    w = np.arange(64.0).reshape(8, 8)
    share = held({"a": np.arange(5), "w": w})
    arrays = arrays_of(share)
    theirs = Lot(arrays, {"['a']": ((0, 5),), "['w']": ((0, 6), (1, 8))})
    theirs.take(VersionMemory(theirs.nbytes, shared=False))
    lots.copy(WholeVersion(share), theirs, [Piece(key, box) for key, box in theirs.want.items()])
    mirror = Lot(arrays, theirs.want)
    mirror.take(theirs.memory)
    other = Holding.over(share.release, share.memory)
    for source in (mirror, WholeVersion(other)):
        lot = Lot(arrays, {"['w']": ((2, 5), (3, 7))})
        lot.take(VersionMemory(lot.nbytes, shared=False))
        lots.copy(source, lot, lot.todo)
        assert np.array_equal(lot.lying(lot.leaves()[0]), w[2:5, 3:7])


def test_wants_are_told_by_name():
    want = {"b": ((0, 3),), "a": ()}
    packed = slices.packed_want(want)
    assert slices.unpacked_want(packed) == want
    assert slices.name_of(packed) == slices.name_of(slices.packed_want({"a": (), "b": ((0, 3),)}))
    for nonsense in (b"", b"\x07", b"\x91\x01"):
        with pytest.raises(ProtocolError, match="holds no slices"):
            slices.unpacked_want(nonsense)
    for nonsense in (5, [("a",)], [("a", [(1, None)])]):
        with pytest.raises(ProtocolError, match="asked for"):
            slices.pieces_in(nonsense)


def test_news_are_of_all_that_comes():
    """A retired lot is at an end for those who wait for more of it."""

    async def main():
        share = held({"w": np.arange(8)})
        lot = Lot(arrays_of(share), {"['w']": ((0, 8),)})
        waiting = asyncio.ensure_future(lot.news())
        await asyncio.sleep(0)
        lot.retire()
        await waiting
        assert lot.is_abandoned

    asyncio.run(main())


def test_what_changes_before_a_task_that_waits_has_begun_is_news():
    """One who gave a version slept for half of `patience` over the last part that came."""

    async def main():
        coming = held({"w": np.arange(8)})
        waiting = asyncio.ensure_future(coming.news())
        coming.tell()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert waiting.done()

    asyncio.run(main())


@pytest.mark.parametrize(
    "said", [[], 5, [5], [("['w']", 5)], [("['w']", ((0, "x"),))], [("['w']", ((0, math.inf),))]]
)
def test_a_request_for_nonsense_is_refused(said):
    with pytest.raises(ProtocolError, match="a participant asked for"):
        slices.pieces_in(said)
