"""`Group.share` for arrays on a device, which other ranks map in place. For arrays of the host, see
`host_loans`."""

from __future__ import annotations

from typing import Any

from aiodist.buffers.arrays import shown
from aiodist.buffers.encoding import encode
from aiodist.buffers.foreign import Target
from aiodist.buffers.mapped import Mapped
from aiodist.buffers.paths import Where
from aiodist.buffers.places import leaves_of
from aiodist.buffers.tokens import Spec
from aiodist.buffers.values import parse
from aiodist.collectives import host_loans
from aiodist.collectives.device_transfer import DeviceTransfer
from aiodist.collectives.exchange import ROOM, metadata
from aiodist.collectives.offers import agree, pack_offers
from aiodist.devices import device_of
from aiodist.engine.operation import Program
from aiodist.errors import ProtocolError
from aiodist.phases.base import Call, Place, as_rank, share


class _Mapper:
    """Provides the arrays of a value in order: a `Taker`."""

    def __init__(self, arrays: list[Any]) -> None:
        self._arrays = iter(arrays)

    def is_foreign(self, value: Any) -> bool:
        return False

    def take(self, spec: Spec, out: Any, where: Where) -> Target | None:
        array = next(self._arrays, None)
        if spec.kind != "device" or array is None:
            raise ProtocolError(f"{where}: it is not shown")
        return Mapped(array.reshape(spec.shape))


_ON_HOST = b"host"
"""The first message of an owner whose arrays are on the host."""


def loan(place: Place, x: Any, src: int) -> Call:
    """Return `x` of rank `src`, an array or a tree of them; on other ranks the same memory."""
    src = as_rank(src, place.size, "src")
    here = place.rank == src
    if not here and x is not None:
        raise ValueError(f"x is for rank src={src}; this is rank {place.rank}: pass None here")
    if here and not _is_on_device(x):
        return _of_host(place, x, src)
    shares = place.device_memory.shares
    transfer = DeviceTransfer(place)
    own = None
    number = -1
    if here:
        own = transfer.encode(x)

    def program(on_lane: bool) -> Program:
        nonlocal number
        if here:
            number = shares.lend(x, place.device_memory.others())
        blob = b"" if own is None else pack_offers(place, transfer, [own], ROOM)
        # A round of all ranks in which only the owner gives something. So all ranks hear of it, or
        # of a lost rank, before they map memory.
        blobs = yield from share(place, blob, on_lane)
        if blobs[src] == _ON_HOST:
            return (yield from host_loans.borrow(place, src, on_lane))
        offers = yield from agree(transfer, {src: blobs[src]}, 1, on_lane)
        (offer,) = offers[src]
        meta = yield from metadata(place, src, offer, own, on_lane)
        numbers = yield from share(place, b"%d" % number if here else b"", on_lane)
        if not transfer.direct:
            why = place.device_memory.problem or transfer.sources.hidden
            if not why:
                why = "there are too many arrays" if here else f"see the error of rank {src}"
            raise OSError(f"not all ranks can map this: {why}; use broadcast, which copies")
        if own is not None:
            yield from transfer.land(on_lane)
            return x
        value = parse(meta, max_bytes=place.max_message_bytes)
        holder = shares.borrow(src, int(numbers[src]), transfer.found[src].arrays)
        value.allocate(foreign=_Mapper(transfer.mapped(src, holder)))
        yield from transfer.land(on_lane)
        return value.finish()

    nbytes = 0 if own is None else own.elsewhere
    start = transfer.guard(program, lambda: shares.ask(number))
    return Call("share", f"share(src={src})", start, nbytes)


def _of_host(place: Place, x: Any, src: int) -> Call:
    """The owner's call if its arrays are on the host."""
    own = encode(x)
    lent = host_loans.Lent(place, own)

    def program(on_lane: bool) -> Program:
        yield from share(place, _ON_HOST, on_lane)
        return (yield from host_loans.lend(place, lent, on_lane))

    return Call("share", f"share(src={src})", program, own.nbytes)


def _is_on_device(x: Any) -> bool:
    """Whether the arrays of `x` are on a device. Raises TypeError or ValueError if they cannot be
    mapped."""
    on_device = on_host = False
    for leaf in leaves_of(x):
        if isinstance(leaf, (str, bytes, bool, int, float, complex)):
            continue
        device = device_of(leaf)
        if device is None:
            on_host = True
            continue
        on_device = True
        if device.flat(leaf) is None:
            raise ValueError(
                f"share takes contiguous arrays of devices: {shown(*device.describe(leaf))} has "
                "gaps, or another order; pass x.contiguous()"
            )
    if on_device == on_host:
        what = "arrays of the host and of a device" if on_host else "no array"
        raise TypeError(
            f"x has {what}: share takes an array or a tree of arrays, all of the host or all of "
            "devices"
        )
    return on_device
