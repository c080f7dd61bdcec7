"""Collectives that move values: broadcast, all_gather, gather, scatter, all_to_all.

Each program first shares offers, and then moves the data: see `aiodist.collectives.exchange`.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from aiodist.buffers import places
from aiodist.buffers.arrays import BUFFERS
from aiodist.buffers.encoding import Encoded
from aiodist.buffers.paths import as_list
from aiodist.buffers.values import describe, fill
from aiodist.collectives import fitting
from aiodist.collectives.device_transfer import DeviceTransfer
from aiodist.collectives.exchange import (
    apart,
    collect,
    data_of_one,
    known,
    metadata,
    offers_of_all,
    one_of_all,
    opened,
    share_offers,
)
from aiodist.collectives.offers import Offer
from aiodist.engine.operation import Program
from aiodist.errors import MismatchError
from aiodist.phases.base import Call, Place, as_rank
from aiodist.schedules.choose_values import (
    choose_all_gather,
    choose_all_to_all,
    choose_gather,
    choose_scatter,
)
from aiodist.schedules.selection import Choice


def broadcast(place: Place, x: Any, src: int) -> Call:
    """Make the call that copies `x` of rank `src` to all. On other ranks `x` is its destination."""
    src = as_rank(src, place.size, "src")
    transfer = DeviceTransfer(place)
    own = transfer.encode(x) if place.rank == src else None
    want = fitting.NOTHING
    if own is None:
        transfer.aim(x)
        places.check_tree(x, "x")
        want = fitting.wanted(x)

    def program(on_lane: bool) -> Program:
        mine = [] if own is None else [own]
        wants, offers, on_lane = yield from share_offers(
            place, transfer, mine, want, [src], on_lane, for_all=True
        )
        (offer,) = offers[src]
        meta = yield from metadata(place, src, offer, own, on_lane)
        fits = fitting.all_fit(wants, [offer.meta])
        if own is not None:
            # This comes before any data moves: if a value does not fit on one rank, none gets it.
            yield from fitting.settle(place, None, fits, on_lane)
            if offer.data is None:
                yield from data_of_one(place, src, offer, own.buffers, [], on_lane)
            yield from transfer.land(on_lane)
            return x
        value, problem = opened(place, transfer, src, offer, meta, x, "x")
        yield from fitting.settle(place, problem, fits, on_lane)
        transfer.read()
        if offer.data is not None:
            fill(value.buffers, offer.data)
        else:
            yield from data_of_one(place, src, offer, [], value.buffers, on_lane)
        yield from transfer.land(on_lane)
        return value.finish()

    nbytes = 0 if own is None else own.nbytes + own.elsewhere
    return Call(
        "broadcast",
        f"broadcast(src={src})",
        transfer.guard(program),
        nbytes,
        shares_first=place.may_post,
    )


def all_gather(place: Place, x: Any, out: Any) -> Call:
    """Make the call that returns `x` of every rank, by rank."""
    return _gathered(place, "all_gather", "all_gather()", x, None, out)


def gather(place: Place, x: Any, dst: int, out: Any) -> Call:
    """Make the call that returns `x` of every rank, by rank, at rank `dst`."""
    dst = as_rank(dst, place.size, "dst")
    if out is not None and place.rank != dst:
        raise ValueError(f"out= is for rank dst={dst}; this is rank {place.rank}")
    return _gathered(place, "gather", f"gather(dst={dst})", x, dst, out)


def _gathered(place: Place, op: str, text: str, x: Any, dst: int | None, out: Any) -> Call:
    """Make the call for all_gather, or for gather if `dst` is a rank."""
    here = dst is None or place.rank == dst
    transfer = DeviceTransfer(place)
    own = transfer.encode(x)
    check_slots(out, place.size)
    transfer.aim(out)
    _keep_apart(place, transfer, [own], out, x, 0)
    want = fitting.wanted_of_each(out, x, place.size)

    def program(on_lane: bool) -> Program:
        # Data that one rank alone wants is not sent to all.
        offers, fits, on_lane = yield from one_of_all(
            place, transfer, own, want, on_lane, dst is None
        )
        outs = _slots(place, transfer, out, x, offers, own)
        others = [rank for rank in range(place.size) if rank != place.rank]
        receivers = others
        if dst is not None:
            receivers = [] if here else [dst]
        lengths = apart(offers, dst)
        chosen = None
        if not on_lane:
            if dst is None:
                chosen = choose_all_gather(lengths, place.costs)
            else:
                chosen = choose_gather(lengths, dst, place.costs)
        values = yield from collect(
            place,
            transfer,
            (own, _slot(outs, place.rank)) if here else None,
            dict.fromkeys(receivers, (own, offers[place.rank])),
            {src: offers[src] for src in others} if here else {},
            outs,
            [offer for src, offer in enumerate(offers) if src != dst],
            on_lane,
            fits,
            lengths if dst is None else None,
            chosen,
        )
        if not here:
            return None
        return _result(values, out)

    return Call(
        op, text, transfer.guard(program), own.nbytes + own.elsewhere, shares_first=place.may_post
    )


def scatter(place: Place, xs: Any, src: int, out: Any) -> Call:
    """Make the call that gives each rank its slot of `xs` of rank `src`."""
    src = as_rank(src, place.size, "src")
    here = place.rank == src
    if not here and xs is not None:
        raise ValueError(f"xs is for rank src={src}; this is rank {place.rank}: pass None here")
    transfer = DeviceTransfer(place)
    own = _encode_slots(place, transfer, xs, "scatter") if here else []
    transfer.aim(out)
    places.check_tree(out, "out")
    if own and out is not None:
        transfer.keep_apart(own, out, lambda: {src: out}, src, src)
    want = fitting.wanted(out)

    def program(on_lane: bool) -> Program:
        wants, agreed, on_lane = yield from share_offers(
            place, transfer, own, want, [src], on_lane, each=place.size
        )
        offers = agreed[src]
        fits = all(
            fitting.all_fit([want], [offer.meta]) for want, offer in zip(wants, offers, strict=True)
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
            chosen=None if on_lane else choose_scatter(apart(offers, src), src, place.costs),
        )
        return values[src]

    nbytes = sum(slot.nbytes + slot.elsewhere for slot in own)
    return Call(
        "scatter",
        f"scatter(src={src})",
        transfer.guard(program),
        nbytes,
        shares_first=place.may_post,
    )


def all_to_all(place: Place, xs: Any, out: Any, *, apart: bool = False) -> Call:
    """Make the call that returns this rank's slot of `xs` of every rank, by rank.

    `apart` says that no part of `xs` shares memory with the target of another part, and that no two
    targets in `out` share memory.
    """
    transfer = DeviceTransfer(place)
    own = _encode_slots(place, transfer, xs, "all_to_all")
    check_slots(out, place.size)
    transfer.aim(out)
    if not apart:
        _keep_apart(place, transfer, own, out, xs[place.rank], place.rank)
    want = fitting.wanted_of_each(out, xs[place.rank], place.size)

    def program(on_lane: bool) -> Program:
        offers, fits, on_lane = yield from offers_of_all(place, transfer, own, want, on_lane)
        here = place.rank
        others = [rank for rank in range(place.size) if rank != here]
        mine = [known(row[here]) for row in offers]
        outs = _slots(place, transfer, out, xs[here], mine, own[here])
        values = yield from collect(
            place,
            transfer,
            (own[here], _slot(outs, here)),
            {dst: (own[dst], known(offers[here][dst])) for dst in others},
            {src: known(offers[src][here]) for src in others},
            outs,
            # On a lane all ranks need the longest offer. Elsewhere a list of P x P offers is
            # wasted.
            [
                offer
                for src, row in enumerate(offers if on_lane else ())
                for dst, offer in enumerate(row)
                if src != dst
            ],
            on_lane,
            fits,
            chosen=None if on_lane else _alike(place, offers),
        )
        return _result(values, out)

    nbytes = sum(slot.nbytes + slot.elsewhere for slot in own)
    return Call(
        "all_to_all", "all_to_all()", transfer.guard(program), nbytes, shares_first=place.may_post
    )


def _alike(place: Place, offers: Sequence[Sequence[Offer | None]]) -> Choice | None:
    """Return the plan for an all_to_all if all its messages have one length and travel apart."""
    size = len(offers)
    rows = offers[:1] if size > 1 and offers[0] is offers[-1] else offers  # one row may be for all
    others = (offer for src, row in enumerate(rows) for dst, offer in enumerate(row) if src != dst)
    sizes = {None if o is None or o.data is not None else o.nbytes for o in others}
    nbytes = sizes.pop() if len(sizes) == 1 else None
    return None if not nbytes else choose_all_to_all(nbytes, size, place.costs)


def _encode_slots(place: Place, transfer: DeviceTransfer, xs: Any, op: str) -> list[Encoded]:
    if not isinstance(xs, (list, tuple)):
        raise TypeError(
            f"{op} takes a list of {place.size} values, one a rank, not {describe(xs)}"
            f"{as_list(xs, 'xs')}"
        )
    if len(xs) != place.size:
        raise ValueError(f"{op} takes {place.size} values, one a rank; got {len(xs)}")
    return [transfer.encode(x) for x in xs]


def _keep_apart(
    place: Place, transfer: DeviceTransfer, values: Sequence[Encoded], out: Any, x: Any, own: int
) -> None:
    """Refuse slots of `out` that share memory, and copy `values` that lie in them.

    This happens before anything is sent. The own value, ``values[own]``, may stay in its own slot.
    If `out` is one array, this slot depends on the values of the others, so `_slots` checks again.
    """
    if out is None:
        return
    if isinstance(out, (list, tuple)):
        places.check(out, "out")

    def slots() -> dict[int, Any]:
        try:
            return slots_of(out, x, [values[own].nbytes + values[own].elsewhere] * place.size)
        except ValueError:
            return {place.size: out}  # no rank's slot is known yet

    transfer.keep_apart(values, out, slots, own, place.rank)


def _slots(
    place: Place,
    transfer: DeviceTransfer,
    out: Any,
    x: Any,
    offers: Sequence[Offer],
    own: Encoded,
) -> dict[int, Any] | MismatchError:
    """Return the destination of each rank's value, or what is wrong with it.

    `own` is the value of this rank, `x`.
    """
    sizes = [offer.nbytes + offer.apart for offer in offers]
    try:
        slots = slots_of(out, x, sizes)
    except ValueError as error:
        return MismatchError(
            f"what the ranks sent does not fit out of rank {place.rank}: {error}",
            calls={place.rank: f"out={describe(out)}"},
        )
    offer = offers[place.rank]
    is_one = out is not None and not isinstance(out, (list, tuple))
    differ = is_one and any(size != sizes[place.rank] for size in sizes)
    copied = differ and transfer.keep_apart([own], out, lambda: slots, at=place.rank)
    if copied and (offer.place or offer.apart):
        # It is too late for a copy, because the others know the old location already.
        wrong = "x lies in out where the value of another rank goes: give it memory of its own"
        return MismatchError(f"rank {place.rank}: {wrong}", calls={place.rank: wrong})
    return slots


def _slot(outs: dict[int, Any] | MismatchError, rank: int) -> Any:
    return None if isinstance(outs, MismatchError) else outs.get(rank)


def _result(values: Mapping[int, Any], out: Any) -> Any:
    """Return `out` if it has the values of all ranks, else a list of them."""
    found = [values[rank] for rank in range(len(values))]
    if out is None:
        return found
    # A slot may be None, and a tree of arrays and numbers in a slot keeps its old numbers.
    is_list = isinstance(out, (list, tuple))
    return found if is_list and any(map(operator.is_not, found, out)) else out


def check_slots(out: Any, size: int) -> None:
    """Raise ValueError if `out` cannot take the values of `size` ranks."""
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
    """Return the shape of `out`, or () if it has none.

    Nested tensors have no shape, and the shape of jagged ones is not made of numbers alone.
    """
    if isinstance(out, BUFFERS):
        out = np.asarray(out)
    try:
        shape: Sequence[int] = getattr(out, "shape", ())
    except RuntimeError:
        return ()
    return shape if all(isinstance(n, int) for n in shape) else ()


def slots_of(out: Any, x: Any, nbytes: Sequence[int]) -> dict[int, Any]:
    """Return the destination of each rank's value: elements of a list, or parts of one array.

    If an array has the shape ``(size, *x.shape)``, each rank has a row. In other arrays the values
    are one after the other along the first dimension. `nbytes` has the bytes of each rank's value.
    """
    if out is None:
        return {}
    if isinstance(out, (list, tuple)):
        return {rank: slot for rank, slot in enumerate(out) if slot is not None}
    if isinstance(out, (np.ndarray, *BUFFERS)):
        out = np.asarray(out)  # because np.matrix has no 1-d rows, and bytearrays cannot be cut
    size, (rows, *row) = len(nbytes), out.shape
    room = getattr(out, "nbytes", 0)
    if rows == size and tuple(row) == tuple(_shape_of(x)):
        if row:
            return {rank: out[rank] for rank in range(size)}
        return {rank: out[rank : rank + 1].reshape(()) for rank in range(size)}
    if sum(nbytes) == room > 0 and not any(n % (room // rows) for n in nbytes):
        ends = [*accumulate((n * rows // room for n in nbytes), initial=0)]
    elif rows % size == 0:  # if a part does not fit, that is found when it is filled
        ends = [rank * rows // size for rank in range(size + 1)]
    else:
        raise ValueError(
            f"out is {describe(out)}, {room} bytes: the ranks' values are to lie in it one "
            f"after the other, and have {', '.join(map(str, nbytes))} bytes"
        )
    return {rank: out[ends[rank] : ends[rank + 1]] for rank in range(size)}
