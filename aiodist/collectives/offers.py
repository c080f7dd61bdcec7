"""Offers: what ranks say about the values that they have for each other, before these travel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgpack
import numpy as np

from aiodist.buffers.encoding import Encoded
from aiodist.collectives.device_transfer import DeviceTransfer
from aiodist.errors import ProtocolError
from aiodist.phases.base import Part, Place

COPIED = 192 * 1024
"""The most bytes that are copied into an offer although all ranks can see the data in place."""


class Offer(NamedTuple):
    """What one rank has for another.

    `meta` is the metadata, or its length if it is large. `data` is the data if it travels within
    the offer. `place` is the location of the data in memory that all ranks see, or 0. `apart` is
    the number of further bytes that are on a device of the rank. `first` is the number of the first
    array there.
    """

    meta: bytes | int
    nbytes: int
    data: bytes | None
    place: int = 0
    apart: int = 0
    first: int = 0


def of_one_kind(values: Sequence[Encoded]) -> Offer | None:
    """Return one offer for all `values` if they have the same kind and size, else None.

    The slots of most exchanges do. Their data travels outside the offer.
    """
    first, *more = values
    if any((one.meta, one.nbytes) != (first.meta, first.nbytes) for one in more):
        return None
    return None if any(one.gaps for one in values) else Offer(first.meta, first.nbytes, None)


def pack_offers(
    place: Place, transfer: DeviceTransfer, values: Sequence[Encoded], room: int
) -> bytes:
    """Pack the offers of one rank.

    The data of a value goes into its offer while there is room, and so does its metadata. Words
    about arrays on devices come last. If many values are of one kind and their data does not fit,
    one offer stands for all of them.
    """

    def place_of(value: Encoded) -> int:
        return place.heap.place_of(np.frombuffer(view, np.uint8) for view in value.buffers)

    one = of_one_kind(values) if len(values) > 1 else None
    head = len(values[0].meta)
    # Without this case, some data would fit and some not. Then no rank would know that all messages
    # are alike, and each message would need a frame and a connection of its own.
    if (
        one is not None
        and head <= room < len(values) * (head + one.nbytes)
        and not any(map(place_of, values))
    ):
        alone: bytes = msgpack.packb([one])
        return alone
    packed: list[Any] = []
    for value in values:
        small = len(value.meta) <= room
        meta = value.meta if small else len(value.meta)
        room -= len(value.meta) if small else 0
        if value.gaps:
            first = transfer.first(value)
            packed.append(Offer(meta, value.nbytes, None, 0, value.elsewhere, first))
        elif small and value.nbytes <= room and (value.nbytes <= COPIED or not place_of(value)):
            room -= value.nbytes
            packed.append(Offer(meta, value.nbytes, b"".join(value.buffers)))
        else:
            packed.append(Offer(meta, value.nbytes, None, place_of(value)))
    words = transfer.words(room)
    blob: bytes = msgpack.packb([*packed, words] if words else packed)
    return blob


def agree(
    transfer: DeviceTransfer, blobs: Mapping[int, bytes | memoryview], count: int, on_lane: bool
) -> Part[dict[int, list[Offer]]]:
    """Decide how arrays on devices travel, and return the offers by source, `count` of each.

    All ranks get the same result.
    """
    offers: dict[int, list[Offer]] = {}
    words: dict[int, bytes] = {}
    for src, blob in blobs.items():
        offers[src], words[src] = unpack(blob, count, src)
    if not any(words.values()):
        return offers
    yield from transfer.agree(words, on_lane)
    if not transfer.direct:
        yield from transfer.to_host()
    return {src: [_settled(offer, transfer.direct) for offer in row] for src, row in offers.items()}


def _settled(offer: Offer, direct: bool) -> Offer:
    if not offer.apart:
        return offer
    if direct:
        return offer if offer.nbytes else offer._replace(data=b"")
    nbytes = offer.nbytes + offer.apart
    return offer._replace(nbytes=nbytes, data=None, place=0, apart=0)


def unpack(blob: bytes | memoryview, count: int, src: int) -> tuple[list[Offer], bytes]:
    """Unpack the offers of `src`, and its words about devices. Raises ProtocolError."""
    words = b""
    try:
        fields = msgpack.unpackb(blob)
        if len(fields) == count + 1:
            words = fields.pop()
        offers = [Offer(*each) for each in fields]
    # Another rank may have sent anything, so msgpack and the fields may raise anything.
    except Exception as error:
        raise ProtocolError(f"malformed offers of rank {src}: {error!r}") from None
    times = count if len(offers) == 1 else 1  # see `of_one_kind`
    if len(offers) * times != count or not all(map(_sound, offers)) or type(words) is not bytes:
        raise ProtocolError(f"malformed offers of rank {src}")
    return offers * times, words


def _sound(offer: Offer) -> bool:
    nbytes, place, apart, first = offer.nbytes, offer.place, offer.apart, offer.first
    return (
        type(nbytes) is type(place) is type(apart) is type(first) is int
        and min(nbytes, place, apart, first) >= 0
        and (type(offer.meta) is bytes or (type(offer.meta) is int and offer.meta > 0))
        and (offer.data is None or (type(offer.data) is bytes and len(offer.data) == offer.nbytes))
    )
