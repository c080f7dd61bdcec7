"""Collectives that move values: broadcast, all_gather, gather, scatter, all_to_all.

First every rank's *offers* (what it has for whom: metadata, and the data itself where small) are
shared by Bruck's all-gather; so everybody knows all sizes, and has entered. What is large then
travels directly into its destination.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import msgpack
import numpy as np

from aiodist.buffers.values import Encoded, Incoming, copy_value, describe, encode, into, parse
from aiodist.errors import MismatchError, ProtocolError
from aiodist.runtime.collectives import lanes, pulls
from aiodist.runtime.collectives.base import Call, Part, Place, check_root, share
from aiodist.runtime.collectives.memories import Regions
from aiodist.runtime.operation import Phase, Program, prepared
from aiodist.schedules import chain, direct_exchange
from aiodist.schedules.teams import spans_hosts
from aiodist.wire.frames import MAX_PAYLOAD

ROOM = 64 * 1024
"""Most bytes of data that travel within the offers, over all ranks."""


MANY_RANKS = 64
"""With more ranks, what all offer to all is too much for the frames of one all-gather."""

_HEAD = struct.Struct(">QQ")


class Offer(NamedTuple):
    """What one rank has for another: `meta` (or its length, where large), and maybe the data, or
    the place where it lies in memory that all ranks see (0: elsewhere)."""

    meta: bytes | int
    nbytes: int
    data: bytes | None
    place: int = 0


def pack_offers(place: Place, values: Sequence[Encoded], room: int) -> bytes:
    """The blob of one rank. The data of a value goes in while there is room, then metadata."""

    def place_of(value: Encoded) -> int:
        return place.heap.place_of(np.frombuffer(view, np.uint8) for view in value.buffers)

    packed: list[Offer] = []
    for value in values:
        if len(value.meta) + value.nbytes <= room:
            room -= len(value.meta) + value.nbytes
            packed.append(Offer(value.meta, value.nbytes, b"".join(value.buffers)))
        elif len(value.meta) <= room:
            room -= len(value.meta)
            packed.append(Offer(value.meta, value.nbytes, None, place_of(value)))
        else:
            packed.append(Offer(len(value.meta), value.nbytes, None, place_of(value)))
    blob: bytes = msgpack.packb(packed)
    return blob


def unpack_offers(blob: bytes, count: int, src: int) -> list[Offer]:
    """The offers in the blob of `src`. Raises ProtocolError."""
    try:
        offers = [Offer(*fields) for fields in msgpack.unpackb(blob)]
    except Exception as error:
        raise ProtocolError(f"malformed offers of rank {src}: {error}") from None
    if len(offers) != count or not all(_sound(offer) for offer in offers):
        raise ProtocolError(f"malformed offers of rank {src}")
    return offers


def _sound(offer: Offer) -> bool:
    return (
        type(offer.nbytes) is int
        and offer.nbytes >= 0
        and (type(offer.meta) is bytes or (type(offer.meta) is int and offer.meta > 0))
        and (offer.data is None or (type(offer.data) is bytes and len(offer.data) == offer.nbytes))
        and type(offer.place) is int
        and offer.place >= 0
    )


Offers = list[list[Offer | None]]
"""By source and destination; None for what is not known here."""


def offers_of_all(place: Place, own: Sequence[Encoded], on_lane: bool) -> Part[Offers]:
    """What each rank offers to each other one: all of it, or what concerns this rank."""
    if place.size > MANY_RANKS:
        return (yield from _offers_apart(place, own))
    blobs = yield from share(place, pack_offers(place, own, ROOM // place.size), on_lane)
    return [[*unpack_offers(blob, place.size, src)] for src, blob in enumerate(blobs)]


def _offers_apart(place: Place, own: Sequence[Encoded]) -> Part[Offers]:
    """The same where the offers of all to all fill more than a frame: sizes alone, to each."""
    yield from share(place, b"", False)
    mine = [Offer(len(value.meta), value.nbytes, None) for value in own]
    others = [rank for rank in range(place.size) if rank != place.rank]
    heads = {rank: bytearray(_HEAD.size) for rank in others}
    yield from exchange(
        place,
        {rank: [memoryview(_HEAD.pack(mine[rank].meta, mine[rank].nbytes))] for rank in others},
        {rank: [memoryview(head)] for rank, head in heads.items()},
        0,
        on_lane=False,
    )
    offers: Offers = [[None] * place.size for _ in range(place.size)]
    offers[place.rank] = [*mine]
    for rank, head in heads.items():
        meta, nbytes = _HEAD.unpack(head)
        offers[rank][place.rank] = Offer(meta, nbytes, None)
    return offers


def exchange(
    place: Place,
    sends: Mapping[int, Sequence[memoryview]],
    receives: Mapping[int, Sequence[memoryview]],
    longest: int,
    on_lane: bool,
) -> Part[None]:
    """Bytes of known sizes directly from where they are to where they go. On a lane all have to
    know the size of the `longest` message between any two."""
    source = [view for dst in range(place.size) for view in sends.get(dst, ())]
    target = [view for src in range(place.size) for view in receives.get(src, ())]
    outgoing, incoming = _bounds(place.size, sends), _bounds(place.size, receives)
    if on_lane and not spans_hosts(place.teams):
        yield pulls.exchange(place, outgoing, incoming, longest, source, target)
        return
    yield Phase(
        prepared(
            direct_exchange.all_to_all, place.rank, place.size, outgoing, incoming, MAX_PAYLOAD
        ),
        Regions.of_bytes(source, target),
    )


def _bounds(size: int, views: Mapping[int, Sequence[memoryview]]) -> tuple[int, ...]:
    bounds = [0]
    for rank in range(size):
        bounds.append(bounds[-1] + sum(view.nbytes for view in views.get(rank, ())))
    return tuple(bounds)


def collect(
    place: Place,
    sends: Mapping[int, tuple[Encoded, Offer]],
    receives: Mapping[int, Offer],
    outs: Mapping[int, Any],
    describe_out: str,
    travelling: Sequence[Offer | None],
    on_lane: bool,
    lengths: Sequence[int] | None = None,
) -> Part[dict[int, Any]]:
    """The values offered to this rank, by source; those offered to others are sent.

    `travelling`: what any rank offers to any other. `lengths`: where everyone offers the same to
    all others, the bytes of each.
    """
    metas = yield from _metas(place, sends, receives, travelling, on_lane)
    incoming: dict[int, Incoming] = {}
    for src, offer in receives.items():
        value = parse(
            metas[src], max_bytes=place.max_message_bytes, allow_pickle=place.allow_pickle
        )
        if value.nbytes != offer.nbytes:
            raise ProtocolError(f"rank {src} offers {offer.nbytes} bytes for {value.describe()}")
        allocate(place, value, src, outs.get(src), describe_out)
        if offer.data is not None:
            fill(value, offer.data)
        incoming[src] = value
    longest = max((o.nbytes for o in travelling if o is not None and o.data is None), default=0)
    outgoing = {
        dst: encoded.buffers for dst, (encoded, offer) in sends.items() if offer.data is None
    }
    buffers = {src: incoming[src].buffers for src, offer in receives.items() if offer.data is None}
    target = [view for src in sorted(buffers) for view in buffers[src]]
    if on_lane and longest and _all_see(place, travelling):
        places = {src: receives[src].place for src in buffers if receives[src].nbytes}
        yield pulls.take(place, places, _bounds(place.size, buffers), target)
    elif not on_lane or lengths is None:
        yield from exchange(place, outgoing, buffers, longest, on_lane)
    elif longest:
        source = next(iter(outgoing.values()), ())
        yield from lanes.all_gather(place, lengths, source, target)
    return {src: value.finish() for src, value in incoming.items()}


def _all_see(place: Place, offers: Sequence[Offer | None]) -> bool:
    """Whether all that travels apart lies in memory that all ranks see. The same on all ranks."""
    return not spans_hosts(place.teams) and all(
        o is not None and (o.place or o.data is not None or not o.nbytes) for o in offers
    )


def _metas(
    place: Place,
    sends: Mapping[int, tuple[Encoded, Offer]],
    receives: Mapping[int, Offer],
    travelling: Sequence[Offer | None],
    on_lane: bool,
) -> Part[dict[int, bytes]]:
    metas: dict[int, Any] = {}
    late: dict[int, Sequence[memoryview]] = {}
    for src, offer in receives.items():
        if isinstance(offer.meta, bytes):
            metas[src] = offer.meta
            continue
        if offer.meta > place.max_message_bytes:
            raise ProtocolError(f"rank {src} offers {offer.meta} bytes of metadata")
        metas[src] = bytearray(offer.meta)
        late[src] = [memoryview(metas[src])]
    longest = max(
        (o.meta for o in travelling if o is not None and isinstance(o.meta, int)), default=0
    )
    if longest or not on_lane:
        outgoing = {
            dst: [memoryview(encoded.meta)]
            for dst, (encoded, offer) in sends.items()
            if isinstance(offer.meta, int)
        }
        yield from exchange(place, outgoing, late, longest, on_lane)
    return {src: bytes(meta) for src, meta in metas.items()}


def fill(value: Incoming, data: bytes) -> None:
    """Copy the bytes of a small value into its buffers."""
    at = 0
    for view in value.buffers:
        view[:] = data[at : at + view.nbytes]
        at += view.nbytes


def allocate(place: Place, value: Incoming, src: int, out: Any, name: str) -> None:
    """Give `value` its memory. What does not fit `out` is a mismatch between two ranks."""
    try:
        value.allocate(out)
    except (ValueError, TypeError) as error:
        if out is None:
            raise
        calls = {src: value.describe(), place.rank: f"{name}={describe(out)}"}
        raise place.error(
            MismatchError, f"rank {src} sent what does not fit {name}: {error}", calls=calls
        ) from None


def broadcast(place: Place, x: Any, src: int) -> Call:
    """`x` of rank `src`; elsewhere `x` (if not None) is where it goes."""
    check_root(place, src, "src")
    own = encode(x, allow_pickle=place.allow_pickle) if place.rank == src else None

    def program(on_lane: bool) -> Program:
        blob = b"" if own is None else pack_offers(place, [own], ROOM)
        blobs = yield from share(place, blob, on_lane)
        (offer,) = unpack_offers(blobs[src], 1, src)
        if own is not None:
            if isinstance(offer.meta, int):
                yield from _chain(place, src, [memoryview(own.meta)], [], on_lane)
            if offer.data is None:
                yield from _data(place, src, offer, own.buffers, [], on_lane)
            return x
        meta = offer.meta
        if isinstance(meta, int):
            if meta > place.max_message_bytes:
                raise ProtocolError(f"rank {src} offers {meta} bytes of metadata")
            buffer = bytearray(meta)
            yield from _chain(place, src, [], [memoryview(buffer)], on_lane)
            meta = bytes(buffer)
        value = parse(meta, max_bytes=place.max_message_bytes, allow_pickle=place.allow_pickle)
        if value.nbytes != offer.nbytes:
            raise ProtocolError(f"rank {src} offers {offer.nbytes} bytes for {value.describe()}")
        allocate(place, value, src, x, "x")
        if offer.data is not None:
            fill(value, offer.data)
        else:
            yield from _data(place, src, offer, [], value.buffers, on_lane)
        return value.finish()

    nbytes = 0 if own is None else own.nbytes
    return Call("broadcast", f"broadcast(src={src})", program, nbytes)


def _data(
    place: Place,
    src: int,
    offer: Offer,
    source: Sequence[memoryview],
    target: Sequence[memoryview],
    on_lane: bool,
) -> Part[None]:
    if on_lane and offer.nbytes and _all_see(place, [offer]):
        receives = _bounds(place.size, {src: target})
        places = {src: offer.place} if target else {}
        yield pulls.take(place, places, receives, target)
    else:
        yield from _chain(place, src, source, target, on_lane)


def _chain(
    place: Place,
    src: int,
    source: Sequence[memoryview],
    target: Sequence[memoryview],
    on_lane: bool,
) -> Part[None]:
    if on_lane:
        yield from lanes.broadcast(place, src, source, target)
        return
    length = sum(view.nbytes for view in (source or target))
    yield Phase(
        prepared(chain.broadcast, place.rank, place.size, src, length, MAX_PAYLOAD),
        Regions.of_bytes(source, target),
    )


def all_gather(place: Place, x: Any, out: Any) -> Call:
    """`x` of every rank, by rank."""
    own = encode(x, allow_pickle=place.allow_pickle)
    check_slots(out, place.size)

    def program(on_lane: bool) -> Program:
        blobs = yield from share(place, pack_offers(place, [own], ROOM // place.size), on_lane)
        offers = [unpack_offers(blob, 1, src)[0] for src, blob in enumerate(blobs)]
        outs = slots_of(out, x, [offer.nbytes for offer in offers])
        others = [rank for rank in range(place.size) if rank != place.rank]
        values = yield from collect(
            place,
            dict.fromkeys(others, (own, offers[place.rank])),
            {src: offers[src] for src in others},
            outs,
            "out",
            offers,
            on_lane,
            [offer.nbytes if offer.data is None else 0 for offer in offers],
        )
        values[place.rank] = own_slot(x, outs.get(place.rank))
        return out if out is not None else [values[rank] for rank in range(place.size)]

    return Call("all_gather", "all_gather()", program, own.nbytes)


def gather(place: Place, x: Any, dst: int, out: Any) -> Call:
    """`x` of every rank, by rank, at `dst`."""
    check_root(place, dst, "dst")
    own = encode(x, allow_pickle=place.allow_pickle)
    here = place.rank == dst
    if out is not None and not here:
        raise ValueError(f"out= is for rank dst={dst}; this is rank {place.rank}")
    check_slots(out, place.size)

    def program(on_lane: bool) -> Program:
        blobs = yield from share(place, pack_offers(place, [own], ROOM // place.size), on_lane)
        offers = [unpack_offers(blob, 1, src)[0] for src, blob in enumerate(blobs)]
        outs = slots_of(out, x, [offer.nbytes for offer in offers])
        others = [rank for rank in range(place.size) if rank != place.rank]
        values = yield from collect(
            place,
            {} if here else {dst: (own, offers[place.rank])},
            {src: offers[src] for src in others} if here else {},
            outs,
            "out",
            [offer for src, offer in enumerate(offers) if src != dst],
            on_lane,
        )
        if not here:
            return None
        values[dst] = own_slot(x, outs.get(dst))
        return out if out is not None else [values[rank] for rank in range(place.size)]

    return Call("gather", f"gather(dst={dst})", program, own.nbytes)


def scatter(place: Place, xs: Any, src: int, out: Any) -> Call:
    """``xs[rank]`` of rank `src`."""
    check_root(place, src, "src")
    here = place.rank == src
    mine: Any = xs
    if not here and xs is not None:
        raise ValueError(f"xs is for rank src={src}; this is rank {place.rank}: pass None here")
    own = _encode_slots(place, xs, "scatter") if here else []

    def program(on_lane: bool) -> Program:
        blobs = yield from share(place, pack_offers(place, own, ROOM) if here else b"", on_lane)
        offers = unpack_offers(blobs[src], place.size, src)
        others = [dst for dst in range(place.size) if dst != src]
        values = yield from collect(
            place,
            {dst: (own[dst], offers[dst]) for dst in others} if here else {},
            {} if here else {src: offers[place.rank]},
            {} if out is None else {src: out},
            "out",
            [offer for dst, offer in enumerate(offers) if dst != src],
            on_lane,
        )
        return own_slot(mine[src], out) if here else values[src]

    nbytes = sum(slot.nbytes for slot in own)
    return Call("scatter", f"scatter(src={src})", program, nbytes)


def all_to_all(place: Place, xs: Any, out: Any) -> Call:
    """``xs[rank]`` of every rank, by rank."""
    own = _encode_slots(place, xs, "all_to_all")
    check_slots(out, place.size)

    def program(on_lane: bool) -> Program:
        offers = yield from offers_of_all(place, own, on_lane)
        here = place.rank
        others = [rank for rank in range(place.size) if rank != here]
        incoming = [
            slot.nbytes if src == here else known(offers[src][here]).nbytes
            for src, slot in enumerate(own)
        ]
        outs = slots_of(out, xs[here], incoming)
        values = yield from collect(
            place,
            {dst: (own[dst], known(offers[here][dst])) for dst in others},
            {src: known(offers[src][here]) for src in others},
            outs,
            "out",
            [
                offer
                for src, row in enumerate(offers)
                for dst, offer in enumerate(row)
                if src != dst
            ],
            on_lane,
        )
        values[place.rank] = own_slot(xs[place.rank], outs.get(place.rank))
        return out if out is not None else [values[rank] for rank in range(place.size)]

    nbytes = sum(slot.nbytes for slot in own)
    return Call("all_to_all", "all_to_all()", program, nbytes)


def known(offer: Offer | None) -> Offer:
    """An offer that concerns this rank."""
    assert offer is not None
    return offer


def own_slot(x: Any, out: Any) -> Any:
    """A rank's own part of a result: never the same memory as what was given."""
    return copy_value(x) if out is None else into(x, out)


def _encode_slots(place: Place, xs: Any, op: str) -> list[Encoded]:
    if not isinstance(xs, (list, tuple)):
        raise TypeError(f"{op} takes a list of {place.size} values, one a rank, not {describe(xs)}")
    if len(xs) != place.size:
        raise ValueError(f"{op} takes {place.size} values, one a rank; got {len(xs)}")
    return [encode(x, allow_pickle=place.allow_pickle) for x in xs]


def check_slots(out: Any, size: int) -> None:
    """Whether `out` can take the values of `size` ranks at all. Raises ValueError."""
    if isinstance(out, (list, tuple)):
        if len(out) != size:
            raise ValueError(
                f"out has {len(out)} slots, one for each of the {size} ranks is needed"
            )
    elif out is not None and not getattr(out, "shape", ()):
        raise ValueError(
            f"out is {describe(out)}: a list of {size} arrays is needed, or one array with a first "
            f"dimension to put the ranks' values along"
        )


def slots_of(out: Any, x: Any, nbytes: Sequence[int]) -> dict[int, Any]:
    """Where the value of each rank goes: the elements of a list, or the parts of one array.

    An array of shape ``(size, *x.shape)`` is taken by rows; along the first dimension of any other
    the values lie one after the other. `nbytes`: of each rank's value.
    """
    if out is None:
        return {}
    if isinstance(out, (list, tuple)):
        return {rank: slot for rank, slot in enumerate(out) if slot is not None}
    size, (rows, *row) = len(nbytes), out.shape
    room = getattr(out, "nbytes", 0)
    if rows == size and tuple(row) == tuple(getattr(x, "shape", ())):
        if row:
            return {rank: out[rank] for rank in range(size)}
        return {rank: out[rank : rank + 1].reshape(()) for rank in range(size)}
    if sum(nbytes) == room > 0 and not any(n % (room // rows) for n in nbytes):
        ends = [*accumulate((n * rows // room for n in nbytes), initial=0)]
    elif rows % size == 0:  # which of the parts does not fit is seen when it is filled
        ends = [rank * rows // size for rank in range(size + 1)]
    else:
        raise ValueError(
            f"out is {describe(out)}, {room} bytes: the ranks' values are to lie in it one "
            f"after the other, and have {', '.join(map(str, nbytes))} bytes"
        )
    return {rank: out[ends[rank] : ends[rank + 1]] for rank in range(size)}
