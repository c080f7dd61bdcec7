"""Collectives that move values: broadcast, all_gather, gather, scatter, all_to_all.

First every rank's *offers* (what it has for whom: metadata, and the data itself where small) are
shared by Bruck's all-gather; so everybody knows all sizes, and has entered. What is large then
travels directly into its destination.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from aiodist.buffers.foreign import Taker
from aiodist.buffers.values import Encoded, Incoming, describe, parse
from aiodist.collectives import fitting
from aiodist.collectives.device_transfer import DeviceTransfer, Offer
from aiodist.devices.values import device_among
from aiodist.engine.operation import Phase, Program, prepared
from aiodist.errors import MismatchError, ProtocolError
from aiodist.phases import lanes, pulls
from aiodist.phases.base import MAX_RANKS_IN_SMALL_AREA, Call, Part, Place, check_root, share
from aiodist.phases.memories import Regions
from aiodist.schedules import direct_exchange
from aiodist.schedules.choose_values import (
    choose_all_gather,
    choose_all_to_all,
    choose_broadcast,
    choose_gather,
    choose_scatter,
)
from aiodist.schedules.selection import Choice
from aiodist.schedules.teams import spans_hosts
from aiodist.wire.frames import MAX_PAYLOAD

ROOM = 64 * 1024
"""Most bytes of data that travel within the offers, over all ranks."""


_HEAD = struct.Struct(">QQ")


def pack_offers(
    place: Place, transfer: DeviceTransfer, values: Sequence[Encoded], room: int
) -> bytes:
    """The blob of one rank. The data of a value goes in while there is room, then metadata."""

    def place_of(value: Encoded) -> int:
        return place.heap.place_of(np.frombuffer(view, np.uint8) for view in value.buffers)

    packed: list[Offer] = []
    for value in values:
        small = len(value.meta) <= room
        meta = value.meta if small else len(value.meta)
        room -= len(value.meta) if small else 0
        if value.gaps:
            first = transfer.first(value)
            packed.append(Offer(meta, value.nbytes, None, 0, value.elsewhere, first))
        elif small and value.nbytes <= room:
            room -= value.nbytes
            packed.append(Offer(meta, value.nbytes, b"".join(value.buffers)))
        else:
            packed.append(Offer(meta, value.nbytes, None, place_of(value)))
    return transfer.pack(packed, room)


Offers = list[list[Offer | None]]
"""By source and destination; None for what is not known here."""


def offers_of_all(
    place: Place, transfer: DeviceTransfer, own: Sequence[Encoded], want: bytes, on_lane: bool
) -> Part[tuple[Offers, bool]]:
    """What each rank offers to each other one: all of it, or what concerns this rank. And whether
    all that fits where it goes."""
    if place.size > MAX_RANKS_IN_SMALL_AREA:
        yield from transfer.to_host()
        return (yield from _offers_apart(place, own, want))
    words = pack_offers(place, transfer, own, ROOM // place.size)
    blobs = yield from share(place, fitting.joined(want, words), on_lane)
    wants, parts = fitting.parted(blobs)
    agreed = yield from transfer.agree(dict(enumerate(parts)), place.size, on_lane)
    offers: Offers = [[*agreed[src]] for src in range(place.size)]
    if not any(wants):
        return offers, True
    metas = [offer.meta for row in agreed.values() for offer in row]
    return offers, {*wants} <= {fitting.NOTHING, fitting.given(metas)} - {fitting.LOOK}


def _offers_apart(place: Place, own: Sequence[Encoded], want: bytes) -> Part[tuple[Offers, bool]]:
    """`offers_of_all` for so many ranks that the offers of all would fill more than a frame: each
    rank tells each other one the sizes of what it has for it, and nothing else."""
    wants, _ = fitting.parted((yield from share(place, fitting.joined(want, b""), False)))
    mine = [Offer(len(value.meta), value.nbytes, None) for value in own]
    others = [rank for rank in range(place.size) if rank != place.rank]
    heads = {rank: bytearray(_HEAD.size) for rank in others}
    yield _chosen(
        place,
        choose_all_to_all(_HEAD.size, place.size),
        [memoryview(_HEAD.pack(mine[rank].meta, mine[rank].nbytes)) for rank in others],
        [memoryview(head) for head in heads.values()],
    )
    offers: Offers = [[None] * place.size for _ in range(place.size)]
    offers[place.rank] = [*mine]
    for rank, head in heads.items():
        meta, nbytes = _HEAD.unpack(head)
        offers[rank][place.rank] = Offer(meta, nbytes, None)
    return offers, not any(wants)


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
    transfer: DeviceTransfer,
    own: tuple[Encoded, Any] | None,
    sends: Mapping[int, tuple[Encoded, Offer]],
    receives: Mapping[int, Offer],
    outs: Mapping[int, Any] | MismatchError,
    travelling: Sequence[Offer | None],
    on_lane: bool,
    fits: bool,
    lengths: Sequence[int] | None = None,
    chosen: Choice | None = None,
) -> Part[dict[int, Any]]:
    """The values offered to this rank, by source; those offered to others are sent. `own`: what
    this rank has for itself, and where it goes.

    `travelling`: what any rank offers to any other. `fits`: whether all know that it fits where it
    goes. `lengths`: where everyone offers the same to all others, the bytes of each. `chosen`: how
    it travels over links; None: directly. `outs` may be what is wrong with them. Raises
    MismatchError.
    """
    problem: MismatchError | None = None
    if isinstance(outs, MismatchError):
        problem, outs = outs, {}
    metas = yield from _metas(place, sends, receives, travelling, on_lane)
    incoming: dict[int, Incoming] = {}
    for src, offer in receives.items():
        value = parse(
            metas[src], max_bytes=place.max_message_bytes, allow_pickle=place.allow_pickle
        )
        if value.nbytes != offer.nbytes + offer.apart:
            raise ProtocolError(f"rank {src} offers {offer.nbytes} bytes for {value.describe()}")
        foreign = transfer.places(src, offer.first, value)
        wrong = allocate(place, value, src, outs.get(src), "out", foreign)
        problem = problem or wrong
        incoming[src] = value
    if own is not None and not fits:
        problem = problem or _try_own(place, *own)
    yield from fitting.settle(place, problem, fits, on_lane)
    for src, value in incoming.items():
        data = receives[src].data
        if data is not None:
            fill(value, data)
    transfer.read()
    longest = max((o.nbytes for o in travelling if o is not None and o.data is None), default=0)
    outgoing = {
        dst: encoded.buffers for dst, (encoded, offer) in sends.items() if offer.data is None
    }
    buffers = {src: incoming[src].buffers for src, offer in receives.items() if offer.data is None}
    target = [view for src in sorted(buffers) for view in buffers[src]]
    if on_lane and longest and _all_see(place, travelling):
        places = {src: receives[src].place for src in buffers if receives[src].nbytes}
        yield pulls.take(place, places, _bounds(place.size, buffers), target)
    elif not on_lane and chosen is not None:
        # What is the same for all is there once.
        for_whom = sorted(outgoing)[: None if lengths is None else 1]
        views = [view for dst in for_whom for view in outgoing[dst]]
        yield _chosen(place, chosen, views, target)
    elif not on_lane or lengths is None:
        yield from exchange(place, outgoing, buffers, longest, on_lane)
    elif longest:
        source = next(iter(outgoing.values()), ())
        yield from lanes.all_gather(place, lengths, source, target)
    if own is not None:
        incoming[place.rank] = transfer.own(*own)
        transfer.read()
    yield from transfer.land(on_lane)
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


def _apart(offers: Sequence[Offer], root: int | None = None) -> tuple[int, ...]:
    """The bytes of each rank's data that do not travel within the offers, but for those of `root`,
    which stay there."""
    return tuple(
        offer.nbytes if offer.data is None and rank != root else 0
        for rank, offer in enumerate(offers)
    )


def fill(value: Incoming, data: bytes) -> None:
    """Copy the bytes of a small value into its buffers."""
    at = 0
    for view in value.buffers:
        view[:] = data[at : at + view.nbytes]
        at += view.nbytes


def allocate(
    place: Place, value: Incoming, src: int, out: Any, name: str, foreign: Taker | None
) -> MismatchError | None:
    """Give `value` its memory. What does not fit `out` is a mismatch between two ranks, returned;
    then it has none."""
    try:
        value.allocate(out, foreign=foreign)
    except (ValueError, TypeError) as error:
        if out is None:
            raise
        text = f"rank {src} sent what does not fit {name} of rank {place.rank}: {error}"
        calls = {src: value.describe(), place.rank: f"{name}={describe(out)}"}
        return MismatchError(text, calls=calls)
    return None


def _try_own(place: Place, own: Encoded, out: Any) -> MismatchError | None:
    """Whether this rank's own value fits its place, where both are on the host."""
    if out is None or own.gaps or device_among(out) is not None:
        return None
    value = parse(own.meta, allow_pickle=place.allow_pickle)
    return allocate(place, value, place.rank, out, "out", None)


def broadcast(place: Place, x: Any, src: int) -> Call:
    """`x` of rank `src`; elsewhere `x` (if not None) is where it goes."""
    check_root(place, src, "src")
    transfer = DeviceTransfer(place)
    own = transfer.encode(x) if place.rank == src else None
    want = fitting.NOTHING
    if own is None:
        transfer.aim(x)
        want = fitting.wanted(x)

    def program(on_lane: bool) -> Program:
        blob = pack_offers(place, transfer, [own], ROOM) if own is not None else b""
        wants, blobs = fitting.parted(
            (yield from share(place, fitting.joined(want, blob), on_lane))
        )
        offers = yield from transfer.agree({src: blobs[src]}, 1, on_lane)
        (offer,) = offers[src]
        meta = yield from metadata(place, src, offer, own, on_lane)
        fits = not any(wants) or _all_take(wants, offer)
        if own is not None:
            yield from fitting.settle(place, None, fits, on_lane)
            if offer.data is None:
                yield from _data(place, src, offer, own.buffers, [], on_lane)
            yield from transfer.land(on_lane)
            return x
        value = parse(meta, max_bytes=place.max_message_bytes, allow_pickle=place.allow_pickle)
        if value.nbytes != offer.nbytes + offer.apart:
            raise ProtocolError(f"rank {src} offers {offer.nbytes} bytes for {value.describe()}")
        foreign = transfer.places(src, offer.first, value)
        problem = allocate(place, value, src, x, "x", foreign)
        yield from fitting.settle(place, problem, fits, on_lane)
        transfer.read()
        if offer.data is not None:
            fill(value, offer.data)
        else:
            yield from _data(place, src, offer, [], value.buffers, on_lane)
        yield from transfer.land(on_lane)
        return value.finish()

    nbytes = 0 if own is None else own.nbytes + own.elsewhere
    return Call("broadcast", f"broadcast(src={src})", transfer.guard(program), nbytes)


def _all_take(wants: Sequence[bytes], offer: Offer) -> bool:
    """Whether what is offered to all is known to be what each one wants."""
    return {*wants} <= {fitting.NOTHING, fitting.given([offer.meta])} - {fitting.LOOK}


def metadata(
    place: Place, src: int, offer: Offer, own: Encoded | None, on_lane: bool
) -> Part[bytes]:
    """The metadata of what `src` offers to all; `own` is that value, there."""
    if isinstance(offer.meta, bytes):
        return offer.meta
    if own is not None:
        yield from _chain(place, src, [memoryview(own.meta)], [], on_lane)
        return own.meta
    if offer.meta > place.max_message_bytes:
        raise ProtocolError(f"rank {src} offers {offer.meta} bytes of metadata")
    buffer = bytearray(offer.meta)
    yield from _chain(place, src, [], [memoryview(buffer)], on_lane)
    return bytes(buffer)


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
    yield _chosen(place, choose_broadcast(length, place.size, src), source, target)


def _chosen(
    place: Place,
    chosen: Choice,
    source: Sequence[memoryview],
    target: Sequence[memoryview],
) -> Phase:
    plan = prepared(chosen.algorithm, place.rank, place.size, *chosen.args)
    return Phase(plan, Regions.of_bytes(source, target, scratch=plan.plan.scratch))


def all_gather(place: Place, x: Any, out: Any) -> Call:
    """`x` of every rank, by rank."""
    transfer = DeviceTransfer(place)
    own = transfer.encode(x)
    check_slots(out, place.size)
    transfer.aim(out)
    want = fitting.wanted_of_each(out, x, place.size)

    def program(on_lane: bool) -> Program:
        offers, fits = yield from _one_of_all(place, transfer, own, want, on_lane)
        outs = _slots(place, out, x, offers)
        others = [rank for rank in range(place.size) if rank != place.rank]
        lengths = _apart(offers)
        values = yield from collect(
            place,
            transfer,
            (own, _slot(outs, place.rank)),
            dict.fromkeys(others, (own, offers[place.rank])),
            {src: offers[src] for src in others},
            outs,
            offers,
            on_lane,
            fits,
            lengths,
            choose_all_gather(lengths),
        )
        return out if out is not None else [values[rank] for rank in range(place.size)]

    nbytes = own.nbytes + own.elsewhere
    return Call("all_gather", "all_gather()", transfer.guard(program), nbytes)


def _one_of_all(
    place: Place, transfer: DeviceTransfer, own: Encoded, want: bytes, on_lane: bool
) -> Part[tuple[list[Offer], bool]]:
    """What each rank offers to all who want it, and whether all that fits where it goes."""
    blob = pack_offers(place, transfer, [own], ROOM // place.size)
    wants, blobs = fitting.parted((yield from share(place, fitting.joined(want, blob), on_lane)))
    agreed = yield from transfer.agree(dict(enumerate(blobs)), 1, on_lane)
    offers = [agreed[src][0] for src in range(place.size)]
    if not any(wants):
        return offers, True
    found = fitting.given([offer.meta for offer in offers])
    return offers, {*wants} <= {fitting.NOTHING, found} - {fitting.LOOK}


def _slots(
    place: Place, out: Any, x: Any, offers: Sequence[Offer]
) -> dict[int, Any] | MismatchError:
    """Where the value of each rank goes; or what is wrong with that."""
    try:
        return slots_of(out, x, [offer.nbytes + offer.apart for offer in offers])
    except ValueError as error:
        return MismatchError(
            f"what the ranks sent does not fit out of rank {place.rank}: {error}",
            calls={place.rank: f"out={describe(out)}"},
        )


def _slot(outs: dict[int, Any] | MismatchError, rank: int) -> Any:
    return None if isinstance(outs, MismatchError) else outs.get(rank)


def gather(place: Place, x: Any, dst: int, out: Any) -> Call:
    """`x` of every rank, by rank, at `dst`."""
    check_root(place, dst, "dst")
    here = place.rank == dst
    if out is not None and not here:
        raise ValueError(f"out= is for rank dst={dst}; this is rank {place.rank}")
    transfer = DeviceTransfer(place)
    own = transfer.encode(x)
    check_slots(out, place.size)
    transfer.aim(out)
    want = fitting.wanted_of_each(out, x, place.size)

    def program(on_lane: bool) -> Program:
        offers, fits = yield from _one_of_all(place, transfer, own, want, on_lane)
        outs = _slots(place, out, x, offers)
        others = [rank for rank in range(place.size) if rank != place.rank]
        values = yield from collect(
            place,
            transfer,
            (own, _slot(outs, dst)) if here else None,
            {} if here else {dst: (own, offers[place.rank])},
            {src: offers[src] for src in others} if here else {},
            outs,
            [offer for src, offer in enumerate(offers) if src != dst],
            on_lane,
            fits,
            chosen=choose_gather(_apart(offers, dst), dst),
        )
        if not here:
            return None
        return out if out is not None else [values[rank] for rank in range(place.size)]

    nbytes = own.nbytes + own.elsewhere
    return Call("gather", f"gather(dst={dst})", transfer.guard(program), nbytes)


def scatter(place: Place, xs: Any, src: int, out: Any) -> Call:
    """``xs[rank]`` of rank `src`."""
    check_root(place, src, "src")
    here = place.rank == src
    if not here and xs is not None:
        raise ValueError(f"xs is for rank src={src}; this is rank {place.rank}: pass None here")
    transfer = DeviceTransfer(place)
    own = _encode_slots(place, transfer, xs, "scatter") if here else []
    transfer.aim(out)
    want = fitting.wanted(out)

    def program(on_lane: bool) -> Program:
        blob = pack_offers(place, transfer, own, ROOM) if here else b""
        wants, blobs = fitting.parted(
            (yield from share(place, fitting.joined(want, blob), on_lane))
        )
        agreed = yield from transfer.agree({src: blobs[src]}, place.size, on_lane)
        offers = agreed[src]
        fits = not any(wants) or all(
            _all_take([want], offer) for want, offer in zip(wants, offers, strict=True)
        )
        others = [dst for dst in range(place.size) if dst != src]
        values = yield from collect(
            place,
            transfer,
            (own[src], out) if here else None,
            {dst: (own[dst], offers[dst]) for dst in others} if here else {},
            {} if here else {src: offers[place.rank]},
            {} if out is None else {src: out},
            [offer for dst, offer in enumerate(offers) if dst != src],
            on_lane,
            fits,
            chosen=choose_scatter(_apart(offers, src), src),
        )
        return values[src]

    nbytes = sum(slot.nbytes + slot.elsewhere for slot in own)
    return Call("scatter", f"scatter(src={src})", transfer.guard(program), nbytes)


def all_to_all(place: Place, xs: Any, out: Any) -> Call:
    """``xs[rank]`` of every rank, by rank."""
    transfer = DeviceTransfer(place)
    own = _encode_slots(place, transfer, xs, "all_to_all")
    check_slots(out, place.size)
    transfer.aim(out)
    want = fitting.wanted_of_each(out, xs[place.rank], place.size)

    def program(on_lane: bool) -> Program:
        offers, fits = yield from offers_of_all(place, transfer, own, want, on_lane)
        here = place.rank
        others = [rank for rank in range(place.size) if rank != here]
        mine = [known(row[here]) for row in offers]
        outs = _slots(place, out, xs[here], mine)
        values = yield from collect(
            place,
            transfer,
            (own[here], _slot(outs, here)),
            {dst: (own[dst], known(offers[here][dst])) for dst in others},
            {src: known(offers[src][here]) for src in others},
            outs,
            [
                offer
                for src, row in enumerate(offers)
                for dst, offer in enumerate(row)
                if src != dst
            ],
            on_lane,
            fits,
            chosen=_alike(offers),
        )
        return out if out is not None else [values[rank] for rank in range(place.size)]

    nbytes = sum(slot.nbytes + slot.elsewhere for slot in own)
    return Call("all_to_all", "all_to_all()", transfer.guard(program), nbytes)


def _alike(offers: Sequence[Sequence[Offer | None]]) -> Choice | None:
    """What to do where all messages of an all_to_all have one length, and travel apart."""
    size = len(offers)
    others = (
        offer for src, row in enumerate(offers) for dst, offer in enumerate(row) if src != dst
    )
    sizes = {None if o is None or o.data is not None else o.nbytes for o in others}
    nbytes = sizes.pop() if len(sizes) == 1 else None
    return None if not nbytes else choose_all_to_all(nbytes, size)


def known(offer: Offer | None) -> Offer:
    """An offer that concerns this rank."""
    assert offer is not None
    return offer


def _encode_slots(place: Place, transfer: DeviceTransfer, xs: Any, op: str) -> list[Encoded]:
    if not isinstance(xs, (list, tuple)):
        raise TypeError(f"{op} takes a list of {place.size} values, one a rank, not {describe(xs)}")
    if len(xs) != place.size:
        raise ValueError(f"{op} takes {place.size} values, one a rank; got {len(xs)}")
    return [transfer.encode(x) for x in xs]


def check_slots(out: Any, size: int) -> None:
    """Whether `out` can take the values of `size` ranks at all. Raises ValueError."""
    if isinstance(out, (list, tuple)):
        if len(out) != size:
            raise ValueError(
                f"out has {len(out)} slots, one for each of the {size} ranks is needed"
            )
    elif out is not None and not _shape_of(out):
        raise ValueError(
            f"out is {describe(out)}: a list of {size} arrays is needed, or one array with a first "
            f"dimension to put the ranks' values along"
        )


def _shape_of(out: Any) -> Sequence[int]:
    """The shape of `out`; () for what has none, as a nested tensor, or none that is made of numbers
    alone, as a jagged one."""
    try:
        shape: Sequence[int] = getattr(out, "shape", ())
    except RuntimeError:
        return ()
    return shape if all(isinstance(n, int) for n in shape) else ()


def slots_of(out: Any, x: Any, nbytes: Sequence[int]) -> dict[int, Any]:
    """Where the value of each rank goes: the elements of a list, or the parts of one array.

    An array of shape ``(size, *x.shape)`` is taken by rows; along the first dimension of any other
    the values lie one after the other. `nbytes`: of each rank's value.
    """
    if out is None:
        return {}
    if isinstance(out, (list, tuple)):
        return {rank: slot for rank, slot in enumerate(out) if slot is not None}
    if isinstance(out, np.ndarray):
        out = np.asarray(out)  # a row of np.matrix has two dimensions
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
