"""What is the same in all blobs of one shape, and where their data lies."""

from __future__ import annotations

from types import SimpleNamespace

import msgpack
import numpy as np
import pytest

from aiodist.buffers.encoding import encode
from aiodist.collectives import fitting
from aiodist.collectives.device_transfer import DeviceTransfer
from aiodist.collectives.offers import Offer, pack_offers
from aiodist.collectives.templates import MovingTemplate, Reading, template_of

PLACE = SimpleNamespace(
    device_memory=None, heap=SimpleNamespace(place_of=lambda parts: 0), allow_pickle=False
)
ARRAYS = {
    "one": [np.arange(3.0)],
    "one byte": [np.array([7], np.uint8)],
    "no dimensions": [np.array(2.5)],
    "longer heads": [np.arange(n, dtype=np.uint8) for n in (31, 32, 255, 256, 300)],
    "many": [np.full((k % 3 + 1, 2), k, "f4") for k in range(20)],
    "equal bytes": [np.zeros(4), np.zeros(4)],
}


def blob_of(values, want=b"", room=10_000):
    transfer = DeviceTransfer(PLACE)
    packed = pack_offers(PLACE, transfer, [encode(value) for value in values], room)
    return fitting.joined(want, packed)


@pytest.mark.parametrize("want", [b"", b"('float64', (3,))"])
@pytest.mark.parametrize("kind", ARRAYS)
def test_where_the_data_is(kind, want):
    values = ARRAYS[kind]
    blob = blob_of(values, want)
    template = template_of(blob, len(values), 0)
    shown = len(blob).to_bytes(4, "big") + blob
    assert template.length == len(shown)
    assert template.want == want
    assert [shown[at : at + spec.nbytes] for at, spec in template.gaps] == [
        value.tobytes() for value in values
    ]
    assert sum(len(part) for _, part in template.fixed) + sum(v.nbytes for v in values) == len(
        shown
    )
    # Of other data it is the same, and says so.
    others = [np.asarray(value + 1) for value in values]
    other = blob_of(others, want)
    assert template_of(other, len(values), 0) == template
    area = memoryview(bytearray(template.length + 8))
    reading = Reading(template, area)
    assert not reading.is_there()
    area[4 : 4 + len(other)] = other
    area[:4] = len(other).to_bytes(4, "big")
    assert reading.is_there()
    for data, value in zip(reading.data, others, strict=True):
        copy = data.copy()
        assert copy.dtype == value.dtype
        assert np.array_equal(copy, value)
        data.flat[:] = 0
        assert np.array_equal(copy, value)
    # Each byte but the data counts.
    for at, part in template.fixed:
        for index in range(at, at + len(part)):
            area[index] ^= 1
            assert not reading.is_there()
            reading.write()
            assert reading.is_there()


@pytest.mark.parametrize("kind", ARRAYS)
def test_a_window_lies_anywhere(kind):
    values = ARRAYS[kind]
    blob = blob_of(values)
    template = template_of(blob, len(values), 0)
    window = MovingTemplate(template, 0)
    shown = len(blob).to_bytes(4, "big") + blob
    flats = [value.reshape(-1) for value in values]
    assert window.first + b"".join(window.rest_of(flats)) == shown
    for start in (0, 3, 64):
        area = memoryview(bytearray(start) + shown + bytes(5))
        window.lie(area, start)
        assert window.is_there()
        for data, value in zip(window.data, values, strict=True):
            copy = data.copy()
            assert copy.dtype == value.dtype
            assert np.array_equal(copy, value)
            assert np.array_equal(data.flat, value.reshape(-1))
            data.flat[:] = 0
            assert np.array_equal(copy, value)
        for at, part in template.fixed:
            for index in range(start + at, start + at + len(part)):
                area[index] ^= 1
                assert not window.is_there()
                area[index] ^= 1
        assert window.is_there()


def test_whoever_offers_nothing():
    empty = template_of(b"", 0, 0)
    assert empty.fixed == ((0, bytes(4)),)
    assert not empty.gaps
    wanting = template_of(fitting.joined(b"?", b""), 0, 0)
    assert wanting.want == b"?"
    assert template_of(blob_of([np.ones(2)]), 0, 0) is None  # more than nothing


TREES = {
    "number": 3,
    "text": "text",
    "nothing": None,
    "a number of numpy": np.float64(2),
    "list": [np.arange(2.0), 1.5, ()],
    "dict": {"a": np.arange(3.0), "b": (np.arange(2, dtype="i2"), {"c": "text"}), "d": 2**70},
}


@pytest.mark.parametrize("kind", TREES)
def test_trees(kind):
    """Their arrays are data, all else is metadata."""
    value = TREES[kind]
    blob = blob_of([np.ones(2), value, np.arange(3)])
    template = template_of(blob, 3, 0)
    shown = len(blob).to_bytes(4, "big") + blob
    reading = Reading(template, memoryview(shown))
    assert reading.is_there()
    assert repr([each.copy() for each in reading.values]) == repr([np.ones(2), value, np.arange(3)])
    assert repr(reading.values[1].copy()) == repr(value)
    assert template_of(blob_of([np.zeros(2), value, np.ones(3, int)]), 3, 0) == template
    assert template_of(blob_of([np.zeros(2), [value], np.ones(3, int)]), 3, 0) != template


def test_containers_are_made_anew():
    reading_of = template_of(blob := blob_of([{"a": [np.ones(1)]}]), 1, 0)
    (value,) = Reading(reading_of, memoryview(len(blob).to_bytes(4, "big") + blob)).values
    one, two = value.copy(), value.copy()
    assert one["a"] is not two["a"]
    assert not np.shares_memory(one["a"][0], two["a"][0])


@pytest.mark.parametrize("value", [np.ones(0), {"a": np.ones(0)}])
def test_arrays_without_data_have_none(value):
    assert template_of(blob_of([value]), 1, 0) is None
    assert template_of(blob_of([np.ones(2), value]), 2, 0) is None


def test_pickles_have_none():
    packed = encode({"a": {1, 2}}, allow_pickle=True)
    blob = pack_offers(PLACE, DeviceTransfer(PLACE), [packed], 10_000)
    assert template_of(blob, 1, 0) is None


def test_what_travels_apart_has_none():
    assert template_of(blob_of([np.ones(2000)]), 1, 0) is None
    whole = encode(np.ones(2))
    late = Offer(len(whole.meta), 16, None)
    assert template_of(msgpack.packb([late]), 1, 0) is None
    found = Offer(whole.meta, 16, b"".join(whole.buffers))
    assert template_of(msgpack.packb([found, b"words of a device"]), 1, 0) is None
    assert template_of(msgpack.packb([found]), 1, 0) is not None


def test_one_array_whose_data_travels_apart():
    """Only where that is asked for, and only one that lies nowhere else."""
    blob = blob_of([np.arange(300.0)], room=200)
    assert template_of(blob, 1, 0) is None
    template = template_of(blob, 1, 0, moves=True)
    assert template.gaps == ()
    assert template.is_apart
    assert template.is_of(blob)
    reading = Reading(template, memoryview(len(blob).to_bytes(4, "big") + blob))
    assert reading.is_there()
    assert reading.is_apart
    assert reading.meta == encode(np.arange(300.0)).meta
    assert not reading.data
    meta = encode(np.arange(300.0)).meta
    for odd in (Offer(meta, 2400, None, place=1), Offer(meta, 1200, None, 0, 1200)):
        assert template_of(msgpack.packb([odd]), 1, 0, moves=True) is None


def test_several_of_one_kind_whose_data_travels_apart():
    """One offer stands for all of them; nothing else is known by a template."""
    x = np.arange(300.0)
    blob = blob_of([x] * 3, room=200)
    assert template_of(blob, 3, 0) is None
    template = template_of(blob, 3, 0, moves=True)
    assert template.is_apart
    assert template.is_of(blob)
    assert template.metas == (encode(x).meta,) * 3
    for odd in ([x, x[1:]], [np.ones(1), x], [x, np.ones(1)], [[x, x], [x, x]]):
        assert template_of(blob_of(odd, room=200), 2, 0, moves=True) is None
