"""`Group.share`: other ranks map arrays on a device where they lie."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from aiodist.buffers.arrays import Flat, shown
from aiodist.buffers.foreign import Target
from aiodist.buffers.paths import Where
from aiodist.buffers.tokens import Spec
from aiodist.buffers.values import parse
from aiodist.devices import device_of
from aiodist.errors import ProtocolError
from aiodist.runtime.collectives.base import Call, Place, check_root, share
from aiodist.runtime.collectives.passages import Passage
from aiodist.runtime.collectives.values import ROOM, metadata, pack_offers
from aiodist.runtime.device_values import leaves_of
from aiodist.runtime.operation import Program

_NOTHING: Flat = np.empty(0, np.uint8)


class _Mapped:
    """An array that is where it is: a `Target`."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def stage(self) -> tuple[Flat, Flat | None]:
        return _NOTHING, None

    def commit(self, staged: Flat | None) -> None:
        pass


class _Mapper:
    """Has the arrays of a value, in order: a `Taker`."""

    def __init__(self, arrays: list[Any]) -> None:
        self._arrays = iter(arrays)

    def is_foreign(self, value: Any) -> bool:
        return False

    def take(self, spec: Spec, out: Any, where: Where) -> Target | None:
        array = next(self._arrays, None)
        if spec.kind != "device" or array is None:
            raise ProtocolError(f"{where}: it is not shown")
        return _Mapped(array.reshape(spec.shape))


def loan(place: Place, x: Any, src: int) -> Call:
    """`x` of rank `src`, an array on a device or a tree of them; elsewhere the same memory."""
    check_root(place, src, "src")
    here = place.rank == src
    if not here and x is not None:
        raise ValueError(f"x is for rank src={src}; this is rank {place.rank}: pass None here")
    shares = place.plane.shares
    passage = Passage(place)
    own = None
    number = -1
    if here:
        _check(x)
        own = passage.encode(x)
        number = shares.lend(x, set(range(place.size)) - {src})

    def program(on_lane: bool) -> Program:
        blob = b"" if own is None else pack_offers(place, passage, [own], ROOM)
        blobs = yield from share(place, blob, on_lane)
        offers = yield from passage.agree({src: blobs[src]}, 1, on_lane)
        (offer,) = offers[src]
        meta = yield from metadata(place, src, offer, own, on_lane)
        numbers = yield from share(place, b"%d" % number if here else b"", on_lane)
        if not passage.direct:
            why = place.plane.problem or "there are too many arrays"
            raise OSError(f"not all ranks can map this: {why}; use broadcast, which copies")
        if own is not None:
            yield from passage.land(on_lane)
            return x
        value = parse(meta, max_bytes=place.max_message_bytes)
        holder = shares.borrow(src, int(numbers[src]))
        value.allocate(foreign=_Mapper(passage.mapped(src, holder)))
        yield from passage.land(on_lane)
        return value.finish()

    nbytes = 0 if own is None else own.elsewhere
    start = passage.guard(program, partial(shares.ask, number))
    return Call("share", f"share(src={src})", start, nbytes)


def _check(x: Any) -> None:
    """Raise where there is anything in `x` that cannot be mapped."""
    leaves = list(leaves_of(x))
    for leaf in leaves:
        device = device_of(leaf)
        if device is None:
            if isinstance(leaf, (str, bytes, bool, int, float, complex)):
                continue
            raise TypeError(
                f"share takes arrays on a device, or trees of them: got a {type(leaf).__name__} of "
                "the host. group.empty gives arrays of the host that all ranks see"
            )
        if device.flat(leaf) is None:
            raise ValueError(
                f"share takes contiguous arrays: {shown(*device.describe(leaf))} has gaps, or "
                "another order; pass x.contiguous()"
            )
    if not any(device_of(leaf) for leaf in leaves):
        raise TypeError("share takes arrays on a device, or trees of them: there is none in this")
