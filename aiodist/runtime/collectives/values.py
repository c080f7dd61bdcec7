"""Collectives that move values: broadcast, all_gather, gather, scatter, all_to_all.

First every rank's *offers* (what it has for whom: metadata, and the data itself where small) are
shared by Bruck's all-gather; so everybody knows all sizes, and has entered. What is large then
travels directly into its destination.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgpack

from aiodist.buffers.values import Encoded, Incoming, copy_value, describe, encode, into, parse
from aiodist.errors import MismatchError, ProtocolError
from aiodist.runtime.collectives.base import Call, Part, Place, check_root, share
from aiodist.runtime.collectives.memories import Regions
from aiodist.runtime.operation import Phase, Program, prepared
from aiodist.schedules import chain, direct_exchange
from aiodist.wire.frames import MAX_PAYLOAD

ROOM = 64 * 1024
"""Most bytes of data that travel within the offers, over all ranks."""


MANY_RANKS = 64
"""With more ranks, what all offer to all is too much for the frames of one all-gather."""

_HEAD = struct.Struct(">QQ")


class Offer(NamedTuple):
    """What one rank has for another: `meta` (or its length, where large), and maybe the data."""

    meta: bytes | int
    nbytes: int
    data: bytes | None


def pack_offers(values: Sequence[Encoded], room: int) -> bytes:
    """The blob of one rank. The data of a value goes in while there is room, then metadata."""
    packed: list[Offer] = []
    for value in values:
        if len(value.meta) + value.nbytes <= room:
            room -= len(value.meta) + value.nbytes
            packed.append(Offer(value.meta, value.nbytes, b"".join(value.buffers)))
        elif len(value.meta) <= room:
            room -= len(value.meta)
            packed.append(Offer(value.meta, value.nbytes, None))
        else:
            packed.append(Offer(len(value.meta), value.nbytes, None))
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
    )


def offers_of_all(place: Place, own: Sequence[Encoded]) -> Part[tuple[list[Offer], list[Offer]]]:
    """What this rank offers to each other one, and what each other one offers to it."""
    if place.size > MANY_RANKS:
        return (yield from _offers_apart(place, own))
    blobs = yield from share(place, pack_offers(own, ROOM // place.size))
    offers = [unpack_offers(blob, place.size, src) for src, blob in enumerate(blobs)]
    return offers[place.rank], [theirs[place.rank] for theirs in offers]


def _offers_apart(place: Place, own: Sequence[Encoded]) -> Part[tuple[list[Offer], list[Offer]]]:
    """The same where the offers of all to all fill more than a frame: sizes alone, to each."""
    yield from share(place, b"")
    mine = [Offer(len(value.meta), value.nbytes, None) for value in own]
    others = [rank for rank in range(place.size) if rank != place.rank]
    heads = {rank: bytearray(_HEAD.size) for rank in others}
    yield from exchange(
        place,
        {rank: [memoryview(_HEAD.pack(mine[rank].meta, mine[rank].nbytes))] for rank in others},
        {rank: [memoryview(head)] for rank, head in heads.items()},
    )
    theirs = list(mine)
    for rank, head in heads.items():
        meta, nbytes = _HEAD.unpack(head)
        theirs[rank] = Offer(meta, nbytes, None)
    return mine, theirs


def exchange(
    place: Place,
    sends: Mapping[int, Sequence[memoryview]],
    receives: Mapping[int, Sequence[memoryview]],
) -> Part[None]:
    """Bytes of known sizes directly from where they are to where they go."""
    memory = Regions.of_bytes(
        [view for dst in range(place.size) for view in sends.get(dst, ())],
        [view for src in range(place.size) for view in receives.get(src, ())],
    )
    yield Phase(
        prepared(
            direct_exchange.all_to_all,
            place.rank,
            place.size,
            _bounds(place.size, sends),
            _bounds(place.size, receives),
            MAX_PAYLOAD,
        ),
        memory,
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
) -> Part[dict[int, Any]]:
    """The values offered to this rank, by source; those offered to others are sent."""
    metas = yield from _metas(place, sends, receives)
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
    yield from exchange(
        place,
        {dst: encoded.buffers for dst, (encoded, offer) in sends.items() if offer.data is None},
        {src: incoming[src].buffers for src, offer in receives.items() if offer.data is None},
    )
    return {src: value.finish() for src, value in incoming.items()}


def _metas(
    place: Place, sends: Mapping[int, tuple[Encoded, Offer]], receives: Mapping[int, Offer]
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
    yield from exchange(
        place,
        {
            dst: [memoryview(encoded.meta)]
            for dst, (encoded, offer) in sends.items()
            if isinstance(offer.meta, int)
        },
        late,
    )
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

    def program() -> Program:
        blob = b"" if own is None else pack_offers([own], ROOM)
        blobs = yield from share(place, blob)
        (offer,) = unpack_offers(blobs[src], 1, src)
        if own is not None:
            if isinstance(offer.meta, int):
                yield from _chain(place, src, [memoryview(own.meta)], [])
            if offer.data is None:
                yield from _chain(place, src, own.buffers, [])
            return x
        meta = offer.meta
        if isinstance(meta, int):
            if meta > place.max_message_bytes:
                raise ProtocolError(f"rank {src} offers {meta} bytes of metadata")
            buffer = bytearray(meta)
            yield from _chain(place, src, [], [memoryview(buffer)])
            meta = bytes(buffer)
        value = parse(meta, max_bytes=place.max_message_bytes, allow_pickle=place.allow_pickle)
        if value.nbytes != offer.nbytes:
            raise ProtocolError(f"rank {src} offers {offer.nbytes} bytes for {value.describe()}")
        allocate(place, value, src, x, "x")
        if offer.data is not None:
            fill(value, offer.data)
        else:
            yield from _chain(place, src, [], value.buffers)
        return value.finish()

    nbytes = 0 if own is None else own.nbytes
    return Call("broadcast", f"broadcast(src={src})", program(), nbytes)


def _chain(
    place: Place, src: int, source: Sequence[memoryview], target: Sequence[memoryview]
) -> Part[None]:
    length = sum(view.nbytes for view in (source or target))
    yield Phase(
        prepared(chain.broadcast, place.rank, place.size, src, length, MAX_PAYLOAD),
        Regions.of_bytes(source, target),
    )


def all_gather(place: Place, x: Any, out: Any) -> Call:
    """`x` of every rank, by rank."""
    own = encode(x, allow_pickle=place.allow_pickle)
    outs = slots_of(out, place.size, x)

    def program() -> Program:
        blobs = yield from share(place, pack_offers([own], ROOM // place.size))
        offers = [unpack_offers(blob, 1, src)[0] for src, blob in enumerate(blobs)]
        others = [rank for rank in range(place.size) if rank != place.rank]
        values = yield from collect(
            place,
            dict.fromkeys(others, (own, offers[place.rank])),
            {src: offers[src] for src in others},
            outs,
            "out",
        )
        values[place.rank] = own_slot(x, outs.get(place.rank))
        return out if out is not None else [values[rank] for rank in range(place.size)]

    return Call("all_gather", "all_gather()", program(), own.nbytes)


def gather(place: Place, x: Any, dst: int, out: Any) -> Call:
    """`x` of every rank, by rank, at `dst`."""
    check_root(place, dst, "dst")
    own = encode(x, allow_pickle=place.allow_pickle)
    here = place.rank == dst
    if out is not None and not here:
        raise ValueError(f"out= is for rank dst={dst}; this is rank {place.rank}")
    outs = slots_of(out, place.size, x)

    def program() -> Program:
        blobs = yield from share(place, pack_offers([own], ROOM // place.size))
        offers = [unpack_offers(blob, 1, src)[0] for src, blob in enumerate(blobs)]
        others = [rank for rank in range(place.size) if rank != place.rank]
        values = yield from collect(
            place,
            {} if here else {dst: (own, offers[place.rank])},
            {src: offers[src] for src in others} if here else {},
            outs,
            "out",
        )
        if not here:
            return None
        values[dst] = own_slot(x, outs.get(dst))
        return out if out is not None else [values[rank] for rank in range(place.size)]

    return Call("gather", f"gather(dst={dst})", program(), own.nbytes)


def scatter(place: Place, xs: Any, src: int, out: Any) -> Call:
    """``xs[rank]`` of rank `src`."""
    check_root(place, src, "src")
    here = place.rank == src
    mine: Any = xs
    if not here and xs is not None:
        raise ValueError(f"xs is for rank src={src}; this is rank {place.rank}: pass None here")
    own = _encode_slots(place, xs, "scatter") if here else []

    def program() -> Program:
        blobs = yield from share(place, pack_offers(own, ROOM) if here else b"")
        offers = unpack_offers(blobs[src], place.size, src)
        others = [dst for dst in range(place.size) if dst != src]
        values = yield from collect(
            place,
            {dst: (own[dst], offers[dst]) for dst in others} if here else {},
            {} if here else {src: offers[place.rank]},
            {} if out is None else {src: out},
            "out",
        )
        return own_slot(mine[src], out) if here else values[src]

    nbytes = sum(slot.nbytes for slot in own)
    return Call("scatter", f"scatter(src={src})", program(), nbytes)


def all_to_all(place: Place, xs: Any, out: Any) -> Call:
    """``xs[rank]`` of every rank, by rank."""
    own = _encode_slots(place, xs, "all_to_all")
    outs = slots_of(out, place.size, None)

    def program() -> Program:
        mine, theirs = yield from offers_of_all(place, own)
        others = [rank for rank in range(place.size) if rank != place.rank]
        values = yield from collect(
            place,
            {dst: (own[dst], mine[dst]) for dst in others},
            {src: theirs[src] for src in others},
            outs,
            "out",
        )
        values[place.rank] = own_slot(xs[place.rank], outs.get(place.rank))
        return out if out is not None else [values[rank] for rank in range(place.size)]

    nbytes = sum(slot.nbytes for slot in own)
    return Call("all_to_all", "all_to_all()", program(), nbytes)


def own_slot(x: Any, out: Any) -> Any:
    """A rank's own part of a result: never the same memory as what was given."""
    return copy_value(x) if out is None else into(x, out)


def _encode_slots(place: Place, xs: Any, op: str) -> list[Encoded]:
    if not isinstance(xs, (list, tuple)):
        raise TypeError(f"{op} takes a list of {place.size} values, one a rank, not {describe(xs)}")
    if len(xs) != place.size:
        raise ValueError(f"{op} takes {place.size} values, one a rank; got {len(xs)}")
    return [encode(x, allow_pickle=place.allow_pickle) for x in xs]


def slots_of(out: Any, size: int, x: Any) -> dict[int, Any]:
    """Where the value of each rank goes: the elements of a list, or the parts of one array.

    An array of shape ``(size, *x.shape)`` is taken by rows, any other is split along its first
    dimension into `size` equal parts.
    """
    if out is None:
        return {}
    if isinstance(out, (list, tuple)):
        if len(out) != size:
            raise ValueError(
                f"out has {len(out)} slots, one for each of the {size} ranks is needed"
            )
        return {rank: slot for rank, slot in enumerate(out) if slot is not None}
    shape = tuple(getattr(out, "shape", ()))
    if not shape or shape[0] % size:
        raise ValueError(
            f"out is {describe(out)}: one array as out is split along its first dimension into "
            f"{size} equal parts"
        )
    if shape[0] == size and shape[1:] == tuple(getattr(x, "shape", ())):
        return {
            rank: out[rank] if shape[1:] else out[rank : rank + 1].reshape(())
            for rank in range(size)
        }
    part = shape[0] // size
    return {rank: out[rank * part : (rank + 1) * part] for rank in range(size)}
