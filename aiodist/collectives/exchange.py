"""Ranks first share offers of the values that they have for each other, and then move the data.

An offer has metadata, and also the data if it is small. The offers of all ranks are shared by
Bruck's all-gather. After that all ranks know all sizes, and all have entered. Large data then
travels directly to its destination.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgpack

from aiodist.buffers.encoding import Encoded
from aiodist.buffers.foreign import Taker
from aiodist.buffers.values import Incoming, describe, fill, parse
from aiodist.collectives import fitting
from aiodist.collectives.device_transfer import DeviceTransfer
from aiodist.collectives.offers import Offer, agree, of_one_kind, pack_offers
from aiodist.devices.values import device_among
from aiodist.engine.phase import Phase, prepared
from aiodist.errors import MismatchError, ProtocolError
from aiodist.phases import berths, lanes, pulls
from aiodist.phases.base import MAX_RANKS_IN_SMALL_AREA, Part, Place, share
from aiodist.phases.memories import Regions
from aiodist.schedules import direct_exchange
from aiodist.schedules.choose_values import choose_all_to_all, choose_broadcast
from aiodist.schedules.selection import EAGER_LIMIT, Choice, ahead_for
from aiodist.schedules.teams import spans_hosts
from aiodist.wire.frames import MAX_PAYLOAD

ROOM = 64 * 1024
"""The most bytes of data within the offers of all ranks together."""
ROOM_IN_MEMORY = 3136 * 1024
"""The most bytes of one rank within offers if all ranks share memory. Three of these fit into the
ring of a rank. More data needs a second agreement and travels in several pieces. That takes longer,
above all if a rank that waits has to be woken."""
ALL_IN_MEMORY = 2 * ROOM_IN_MEMORY
"""The most bytes of all ranks together if they share memory."""

ROOM_OF_HOSTS = 1088 * 1024
"""The most bytes of all ranks together for data that all get, in groups that span hosts. With their
metadata they fit into one frame between two hosts, and into a small area."""

EAGER = 66 * 1024
"""The most bytes of one value that all ranks get over links. It costs a few copies, but saves the
frames by which receivers say that they have memory for it."""
EAGER_RANKS = 8
"""The number of ranks that may each have such a value for all."""

_HEAD = struct.Struct(">QQ")

_SHORT = 48
"""The most bytes of metadata that all ranks of a large group are told. The metadata of all ranks
then fits into one frame."""

Offers = list[list[Offer | None]]
"""By source and destination. None if this rank does not know the offer."""

# -- who has what --------------------------------------------------------------------------------


def share_offers(
    place: Place,
    transfer: DeviceTransfer,
    own: Sequence[Encoded],
    want: bytes,
    sources: Iterable[int],
    on_lane: bool,
    *,
    each: int = 1,
    senders: int = 1,
    for_all: bool = False,
) -> Part[tuple[list[bytes], Mapping[int, Sequence[Offer]], bool]]:
    """Share what each rank wants and offers, and find berths for large data.

    Args:
        place: The group, as this rank sees it.
        transfer: The arrays on devices.
        own: The values that this rank offers. Small ones travel within the offers, see `_room_for`.
        want: What this rank wants.
        sources: The ranks that offer something.
        on_lane: Whether the call has a lane.
        each: How many offers each source has.
        senders: How many ranks send.
        for_all: Whether all ranks want what is offered.

    Returns the wants by rank, the offers by source, and whether the call has a lane now. A call
    with large data gets berths if it has no lane.
    """
    room = _room_for(place, senders, on_lane, for_all)
    words = pack_offers(place, transfer, own, room) if own else b""
    berth = None
    may_meet = not on_lane and place.may_post
    if may_meet and place.berths is not None and sum([value.nbytes for value in own]) > room:
        # A rank without large data need not know yet that others have some.
        berth = place.berths.offer()
    first_words = fitting.joined(want, berths.joined(berth, words))
    of_one, (root, *_) = senders == 1, sources
    shared = yield from share(place, first_words, on_lane, first=True, of_one=of_one, root=root)
    wants, blobs = fitting.parted(shared)
    told, blobs = berths.parted(blobs)
    offers = yield from agree(transfer, {src: blobs[src] for src in sources}, each, on_lane)
    if not may_meet or not _is_large(offers.values()):
        return wants, offers, on_lane
    on_lane = yield from berths.met(berth, told)
    del berth  # if it was not used, it is free now
    if not on_lane:
        on_lane = yield from berths.meet(place)
    return wants, offers, on_lane


def _is_large(offers: Iterable[Sequence[Offer]]) -> bool:
    """Whether large data travels after the offers. All ranks know this."""
    return any(o.data is None and o.nbytes > EAGER_LIMIT for row in offers for o in row)


def _room_for(place: Place, senders: int, on_lane: bool, for_all: bool) -> int:
    """Return how many bytes of metadata and data each of the senders may put into its offers."""
    if place.shows or (on_lane and not spans_hosts(place.teams)):
        return min(ROOM_IN_MEMORY, ALL_IN_MEMORY // senders)
    if for_all and not on_lane:
        return min(senders, EAGER_RANKS) * EAGER // senders
    if for_all and place.size <= MAX_RANKS_IN_SMALL_AREA:
        return ROOM_OF_HOSTS // senders
    return ROOM // senders


def one_of_all(
    place: Place, transfer: DeviceTransfer, own: Encoded, want: bytes, on_lane: bool, for_all: bool
) -> Part[tuple[list[Offer], bool, bool]]:
    """Share one offer of each rank to all ranks that want it. `for_all`: all ranks want it.

    Returns the offers, whether they fit at all destinations, and whether the call has a lane.
    """
    everybody = range(place.size)
    wants, agreed, on_lane = yield from share_offers(
        place, transfer, [own], want, everybody, on_lane, senders=place.size, for_all=for_all
    )
    offers = [agreed[src][0] for src in everybody]
    return offers, fitting.all_fit(wants, (offer.meta for offer in offers)), on_lane


def offers_of_all(
    place: Place, transfer: DeviceTransfer, own: Sequence[Encoded], want: bytes, on_lane: bool
) -> Part[tuple[Offers, bool, bool]]:
    """Share what each rank offers to each other rank.

    Returns all offers or those that concern this rank. Also returns whether they fit at all
    destinations, and whether the call has a lane.
    """
    if place.size > MAX_RANKS_IN_SMALL_AREA:
        yield from transfer.to_host()
        apart, fits = yield from _offers_apart(place, own, want)
        return apart, fits, on_lane
    everybody = range(place.size)
    wants, agreed, on_lane = yield from share_offers(
        place, transfer, own, want, everybody, on_lane, each=place.size, senders=place.size
    )
    offers: Offers = [[*agreed[src]] for src in everybody]
    fits = fitting.all_fit(wants, (o.meta for row in agreed.values() for o in row))
    return offers, fits, on_lane


def _offers_apart(place: Place, own: Sequence[Encoded], want: bytes) -> Part[tuple[Offers, bool]]:
    """Do `offers_of_all` for a group in which the offers of all ranks would not fit into a frame.

    If all values of a rank are of one kind, it tells this kind to all. If the kind is the same on
    all ranks, all offers are known. Otherwise each rank tells each other rank only the sizes of the
    values for it.
    """
    one = of_one_kind(own)
    kind = b"" if one is None or len(own[0].meta) > _SHORT else msgpack.packb(one)
    wants, kinds = fitting.parted((yield from share(place, fitting.joined(want, kind), False)))
    if one is not None and all(other == kind != b"" for other in kinds):
        row: list[Offer | None] = [one] * place.size
        return [row] * place.size, fitting.all_fit(wants, [one.meta])
    mine = [Offer(len(value.meta), value.nbytes, None) for value in own]
    others = [rank for rank in range(place.size) if rank != place.rank]
    heads = {rank: bytearray(_HEAD.size) for rank in others}
    yield by(
        place,
        choose_all_to_all(_HEAD.size, place.size, place.costs),
        [memoryview(_HEAD.pack(mine[rank].meta, mine[rank].nbytes)) for rank in others],
        [memoryview(head) for head in heads.values()],
    )
    offers: Offers = [[None] * place.size for _ in range(place.size)]
    offers[place.rank] = [*mine]
    for rank, head in heads.items():
        meta, nbytes = _HEAD.unpack(head)
        offers[rank][place.rank] = Offer(meta, nbytes, None)
    return offers, not any(wants)


def known(offer: Offer | None) -> Offer:
    """Return an offer that concerns this rank, so it must be known."""
    assert offer is not None
    return offer


# -- how it gets there ---------------------------------------------------------------------------


def exchange(
    place: Place,
    sends: Mapping[int, Sequence[memoryview]],
    receives: Mapping[int, Sequence[memoryview]],
    longest: int,
    on_lane: bool,
) -> Part[None]:
    """Move bytes of known sizes directly from their source to their destination.

    On a lane all ranks must know the size of the `longest` message between any two of them.
    """
    source = [view for dst in range(place.size) for view in sends.get(dst, ())]
    target = [view for src in range(place.size) for view in receives.get(src, ())]
    outgoing, incoming = _bounds(place.size, sends), _bounds(place.size, receives)
    if on_lane and not spans_hosts(place.teams):
        yield pulls.exchange(place, outgoing, incoming, longest, source, target)
        return
    args = (outgoing, incoming, MAX_PAYLOAD, ahead_for(MAX_PAYLOAD, place.costs))
    yield Phase(
        prepared(direct_exchange.all_to_all, place.rank, place.size, *args),
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
    """Send the values offered to others, and return those offered to this rank, by source.

    Args:
        place: The group, as this rank sees it.
        transfer: The arrays on devices.
        own: The value that this rank has for itself, and its destination.
        sends: The values for others and their offers, by destination.
        receives: The offers for this rank, by source.
        outs: The destinations by source, or what is wrong with them.
        travelling: All offers of any rank to any other.
        on_lane: Whether the call has a lane.
        fits: Whether all ranks know that the values fit at their destinations.
        lengths: The bytes of each rank if every rank offers the same to all others.
        chosen: How the data travels over links; None: directly.

    Raises MismatchError if something does not fit.
    """
    problem: MismatchError | None = None
    if isinstance(outs, MismatchError):
        problem, outs = outs, {}
    metas = yield from _metas(place, sends, receives, travelling, on_lane)
    incoming: dict[int, Incoming] = {}
    for src, offer in receives.items():
        incoming[src], wrong = opened(place, transfer, src, offer, metas[src], outs.get(src))
        problem = problem or wrong
    if own is not None and not fits:
        # The own value is put in place last, after those of the others. But all ranks have to know
        # before that whether it fits, as for all other values.
        problem = problem or _try_own(place, *own)
    yield from fitting.settle(place, problem, fits, on_lane)
    for src, value in incoming.items():
        if (data := receives[src].data) is not None:
            fill(value.buffers, data)
    transfer.read()
    yield from _data_of_all(place, sends, receives, incoming, travelling, on_lane, lengths, chosen)
    if own is not None:
        incoming[place.rank] = transfer.own(*own)
        transfer.read()
    yield from transfer.land(on_lane)
    return {src: value.finish() for src, value in incoming.items()}


def opened(
    place: Place,
    transfer: DeviceTransfer,
    src: int,
    offer: Offer,
    meta: bytes,
    out: Any,
    name: str = "out",
) -> tuple[Incoming, MismatchError | None]:
    """Return the value that `src` offers, and what is wrong with `out`, if anything.

    The value has memory unless `out` is wrong. Raises ProtocolError.
    """
    value = parse(meta, max_bytes=place.max_message_bytes, allow_pickle=place.allow_pickle)
    # All ranks have chosen their plans by the sizes in the offer. If the metadata had another size,
    # the memory would be too small or too large for these plans.
    if value.nbytes != offer.nbytes + offer.apart:
        raise ProtocolError(f"rank {src} offers {offer.nbytes} bytes for {value.describe()}")
    foreign = transfer.places(src, offer.first, value)
    return value, _allocate(place, value, src, out, name, foreign)


def _allocate(
    place: Place, value: Incoming, src: int, out: Any, name: str, foreign: Taker | None
) -> MismatchError | None:
    """Give `value` its memory. If it does not fit `out`, return a mismatch of the two ranks."""
    try:
        value.allocate(out, name=name, foreign=foreign)
    except (ValueError, TypeError) as error:
        if out is None:
            raise
        text = f"rank {src} sent what does not fit {name} of rank {place.rank}: {error}"
        calls = {src: value.describe(), place.rank: f"{name}={describe(out)}"}
        return MismatchError(text, calls=calls)
    return None


def _try_own(place: Place, own: Encoded, out: Any) -> MismatchError | None:
    """Return what is wrong if this rank's own value does not fit its place on the host."""
    if out is None or own.gaps or device_among(out) is not None:
        return None
    value = parse(own.meta, allow_pickle=place.allow_pickle)
    return _allocate(place, value, place.rank, out, "out", None)


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
        # Check the number before memory is allocated, because another rank may send anything.
        if offer.meta > place.max_message_bytes:
            raise ProtocolError(f"rank {src} offers {offer.meta} bytes of metadata")
        metas[src] = bytearray(offer.meta)
        late[src] = [memoryview(metas[src])]
    longest = max(
        (o.meta for o in travelling if o is not None and isinstance(o.meta, int)), default=0
    )
    # On a lane all ranks take part in a phase, so all must agree whether there is one. Over links
    # a rank does not know what others exchange, and a rank with nothing to move does nothing.
    if longest or not on_lane:
        outgoing = {
            dst: [memoryview(encoded.meta)]
            for dst, (encoded, offer) in sends.items()
            if isinstance(offer.meta, int)
        }
        yield from exchange(place, outgoing, late, longest, on_lane)
    return {src: bytes(meta) for src, meta in metas.items()}


def _data_of_all(
    place: Place,
    sends: Mapping[int, tuple[Encoded, Offer]],
    receives: Mapping[int, Offer],
    incoming: Mapping[int, Incoming],
    travelling: Sequence[Offer | None],
    on_lane: bool,
    lengths: Sequence[int] | None,
    chosen: Choice | None,
) -> Part[None]:
    """Move the data that was not within the offers. The arguments are those of `collect`."""
    longest = max((o.nbytes for o in travelling if o is not None and o.data is None), default=0)
    outgoing = {
        dst: encoded.buffers for dst, (encoded, offer) in sends.items() if offer.data is None
    }
    buffers = {src: incoming[src].buffers for src, offer in receives.items() if offer.data is None}
    target = [view for src in sorted(buffers) for view in buffers[src]]
    if on_lane and longest and _all_see(place, travelling):
        places = {src: receives[src].place for src in buffers if receives[src].nbytes}
        yield pulls.take(place, places, _bounds(place.size, buffers), target)
    elif chosen is not None:
        # Data that is the same for all ranks is in the source once.
        for_whom = sorted(outgoing)[: None if lengths is None else 1]
        yield by(place, chosen, [view for dst in for_whom for view in outgoing[dst]], target)
    elif on_lane and longest and lengths is not None:
        source = next(iter(outgoing.values()), ())
        yield from lanes.all_gather(place, lengths, source, target)
    elif longest or not on_lane:  # on a lane all ranks agree whether there is any data
        yield from exchange(place, outgoing, buffers, longest, on_lane)


def apart(offers: Sequence[Offer], root: int | None = None) -> tuple[int, ...]:
    """Return how many bytes of each rank's data are not within the offers. The data of `root`
    counts as 0, because it stays there."""
    return tuple(
        offer.nbytes if offer.data is None and rank != root else 0
        for rank, offer in enumerate(offers)
    )


def _all_see(place: Place, offers: Sequence[Offer | None]) -> bool:
    """Whether all data outside the offers is in memory that all ranks see. All ranks agree."""
    return not spans_hosts(place.teams) and all(
        o is not None and (o.place or o.data is not None or not o.nbytes) for o in offers
    )


def metadata(
    place: Place, src: int, offer: Offer, own: Encoded | None, on_lane: bool
) -> Part[bytes]:
    """Return the metadata that `src` offers to all. On `src` itself, `own` is the value."""
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


def data_of_one(
    place: Place,
    src: int,
    offer: Offer,
    source: Sequence[memoryview],
    target: Sequence[memoryview],
    on_lane: bool,
) -> Part[None]:
    """Move the data that `src` offers to all, and that was not within its offer."""
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
    yield one_to_all(place, src, source, target)


def one_to_all(
    place: Place, src: int, source: Sequence[memoryview], target: Sequence[memoryview]
) -> Phase:
    """Return the phase that moves the bytes of `src` to all others over links."""
    length = sum(view.nbytes for view in (source or target))
    return by(place, choose_broadcast(length, place.size, src, place.costs), source, target)


def by(
    place: Place, chosen: Choice, source: Sequence[memoryview], target: Sequence[memoryview]
) -> Phase:
    """Return the phase that moves the bytes over links by the chosen algorithm."""
    plan = prepared(chosen.algorithm, place.rank, place.size, *chosen.args)
    return Phase(plan, Regions.of_bytes(source, target, plan.plan.scratch))
