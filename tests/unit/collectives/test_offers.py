"""What ranks say of what they have: one offer may stand for all of one kind."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import msgpack
import numpy as np
import pytest

from aiodist.buffers.encoding import encode
from aiodist.collectives.device_transfer import DeviceTransfer
from aiodist.collectives.offers import Offer, of_one_kind, pack_offers, unpack
from aiodist.errors import ProtocolError
from aiodist.phases.base import Place

TRANSFER = cast(DeviceTransfer, SimpleNamespace(words=lambda room: b""))


def packed(values: list[Any], room: int, places: bool = False) -> list[Offer]:
    """The offers of rank 1, as others read them."""
    heap = SimpleNamespace(place_of=lambda parts: int(places))
    place = cast(Place, SimpleNamespace(heap=heap))
    blob = pack_offers(place, TRANSFER, [encode(value) for value in values], room)
    return unpack(blob, len(values), 1)[0]


def test_of_one_kind_all_data_goes_in_or_none() -> None:
    values = [np.full(10, number) for number in range(8)]
    one = of_one_kind([encode(value) for value in values])
    assert one is not None
    inside = packed(values, 8 * (80 + len(cast(bytes, one.meta))))
    assert [offer.data for offer in inside] == [value.tobytes() for value in values]
    assert packed(values, 8 * 80) == [one] * 8
    assert one.data is None


@pytest.mark.parametrize(
    "values",
    [
        [np.zeros(10), np.zeros(11)],
        [np.zeros(10), np.zeros(10, "f4")],
        [np.zeros((2, 5)), np.zeros(10)],
    ],
)
def test_what_differs_is_offered_one_by_one(values: list[Any]) -> None:
    assert of_one_kind([encode(value) for value in values]) is None
    offers = packed(values, 100)
    assert [offer.meta for offer in offers] == [encode(value).meta for value in values]


def test_what_others_see_where_it_lies_is_offered_one_by_one() -> None:
    assert [offer.place for offer in packed([np.zeros(100)] * 3, 100, places=True)] == [1, 1, 1]


@pytest.mark.parametrize("offers", [[], [Offer(b"m", -1, None)], [Offer(b"m", 8, b"short")]])
def test_one_that_makes_no_sense_is_refused(offers: list[Offer]) -> None:
    with pytest.raises(ProtocolError, match="malformed offers of rank 1"):
        unpack(msgpack.packb(offers), 4, 1)
