"""What ranks say of the values that they have for each other, before these travel."""

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
"""Most bytes that are copied among the offers though all ranks see where they lie."""


class Offer(NamedTuple):
    """What one rank has for another: `meta` (or its length, where large), and maybe the data, or
    the place where it lies in memory that all ranks see (0: elsewhere).

    `apart`: so many bytes more are on the rank's device: its arrays there from number `first` on.
    """

    meta: bytes | int
    nbytes: int
    data: bytes | None
    place: int = 0
    apart: int = 0
    first: int = 0


def of_one_kind(values: Sequence[Encoded]) -> Offer | None:
    """The one offer that stands for those of all `values`, where these are of one kind and size, as
    the slots of most exchanges are, and travel apart; else None."""
    first, *more = values
    if any((one.meta, one.nbytes) != (first.meta, first.nbytes) for one in more):
        return None
    return None if any(one.gaps for one in values) else Offer(first.meta, first.nbytes, None)


def pack_offers(
    place: Place, transfer: DeviceTransfer, values: Sequence[Encoded], room: int
) -> bytes:
    """The blob of one rank. The data of a value goes in while there is room, then metadata; and in
    the end, where there are arrays on its device, how the others read these. Of many values of one
    kind, whose data has no room there, one offer stands for all."""

    def place_of(value: Encoded) -> int:
        return place.heap.place_of(np.frombuffer(view, np.uint8) for view in value.buffers)

    one = of_one_kind(values) if len(values) > 1 else None
    head = len(values[0].meta)
    # Otherwise some data would go in, and some not: then nobody would know that all messages are
    # alike, and there would be a frame, and a connection, for each of them.
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
    """What is offered by whom: `count` offers each, now that it is known how arrays travel that are
    on devices. The same on all ranks."""
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
    """The offers in the blob of `src`, and its words about devices. Raises ProtocolError."""
    words = b""
    try:
        fields = msgpack.unpackb(blob)
        if len(fields) == count + 1:
            words = fields.pop()
        offers = [Offer(*each) for each in fields]
    # What another rank sent may be anything, and so may be what msgpack and the fields raise.
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
