"""Reductions of arrays on devices, in the order of the ranks.

Each rank queues its reads of other ranks after their events READY. It reports that it has recorded
its own events before others wait for them.
"""

from __future__ import annotations

from functools import partial
from itertools import accumulate, pairwise
from typing import Any

from aiodist.buffers.arrays import shown
from aiodist.buffers.places import leaves_of
from aiodist.buffers.reductions import check_slots
from aiodist.collectives import reductions
from aiodist.collectives.operators import operator
from aiodist.device_programs.reduction import (
    Joined,
    Reduction,
    count,
    flat_place,
    put_back,
)
from aiodist.devices import device_of
from aiodist.devices.base import Device
from aiodist.devices.values import check_place, device_among, several
from aiodist.devices.work import READY, RECORDED
from aiodist.phases.base import Call, Part, Place, as_rank, share
from aiodist.schedules.cuts import even_bounds, pieces
from aiodist.types import Op, ReduceOp

PIECE = 8 << 20
"""Bytes that are reduced at once if there are intermediate results, so that these stay in cache."""


# Called by the group.


def all_reduce(place: Place, x: Any, op: Op, out: Any) -> Call:
    """Reduce `x` on every rank."""
    op, host = operator(op), partial(reductions.all_reduce, place)
    device = _device_of_all(x, out)
    if device is None:
        return host(x, op, out)
    call = Reduction(place, device, "all_reduce", x, op, x if out is None else out)
    return call.start(f"{op}", _all_reduce, partial(host, op=op, out=None))


def reduce(place: Place, x: Any, dst: int, op: Op, out: Any) -> Call:
    """Reduce `x` at `dst`."""
    dst = as_rank(dst, place.size, "dst")
    op, host = operator(op), partial(reductions.reduce, place, dst=dst)
    device = _device_of_all(x, out)
    if device is None:
        return host(x, op=op, out=out)
    result = reductions.place_at(place, x, dst, out)
    call = Reduction(place, device, "reduce", x, op, result)
    run = partial(_reduce, dst=dst)
    return call.start(f"{op}, dst={dst}", run, partial(host, op=op, out=None))


def scan(place: Place, x: Any, op: Op, out: Any) -> Call:
    """Reduce `x` of the ranks up to this one."""
    return _scan(place, x, operator(op), out, exclusive=False)


def exscan(place: Place, x: Any, op: Op, out: Any) -> Call:
    """Reduce `x` of the ranks before this one."""
    return _scan(place, x, operator(op), out, exclusive=True)


def _scan(place: Place, x: Any, op: ReduceOp, out: Any, *, exclusive: bool) -> Call:
    host = partial(reductions.scan, place, exclusive=exclusive)
    device = _device_of_all(x, out)
    if device is None:
        return host(x, op, out)
    name = reductions.name_of_scan(op, exclusive)
    call = Reduction(place, device, name, x, op, x if out is None else out)
    run = partial(_prefix, stop=place.rank + (not exclusive))
    return call.start(f"{op}", run, partial(host, op=op, out=None))


def reduce_scatter(place: Place, xs: Any, op: Op, out: Any) -> Call:
    """Reduce slot `rank` of `xs`: arrays, or one array that is split."""
    op, host = operator(op), partial(reductions.reduce_scatter, place)
    device = _device_of_all(xs, out)
    if device is None:
        return host(xs, op, out)
    slots = _slots(place, device, xs)
    listed = any(device_of(slot) is None for slot in slots)
    if listed or len({device.describe(slot)[0] for slot in slots}) > 1:
        raise TypeError(
            "reduce_scatter of arrays on a device takes one array of one dtype a slot, or one "
            "array to split"
        )
    call = Reduction(place, device, "reduce_scatter", slots, op, None, "slots")
    own = device.describe(slots[place.rank])
    call.result = device.empty(call.work.stream, *own) if out is None else out
    if device_of(call.result) is None:
        raise TypeError(f"out: expected an array, got {type(out).__name__}")
    call.work.kept.append(call.result)
    check_place(device, call.result, f"slot {place.rank} of xs", own, "out")
    call.signature = f"slots {call.signature}"
    bounds = [*accumulate((count(device, slot) for slot in slots), initial=0)]
    run = partial(_slot, start=bounds[place.rank], stop=bounds[place.rank + 1])
    return call.start(f"{op}", run, partial(host, op=op, out=None))


def _device_of_all(x: Any, out: Any) -> Device | None:
    """The device that all arrays are on; None if they are on the host.

    Raises TypeError if they are not together.
    """
    device = device_among(x, out)
    if device is not None and any(device_of(leaf) is None for leaf in leaves_of([x, out])):
        raise several()
    return device


def _slots(place: Place, device: Device, xs: Any) -> list[Any]:
    if isinstance(xs, (list, tuple)):
        return check_slots(xs, place.size)
    if device_of(xs) is None:
        raise TypeError(
            f"xs: expected a list of {place.size} slots, one a rank, or an array to split, "
            f"got {type(xs).__name__}"
        )
    name, shape = device.describe(xs)
    if not shape:
        raise ValueError(f"xs: {shown(name, shape)} has no dimension to split")
    bounds = even_bounds(shape[0], place.size)
    return [xs[start:stop] for start, stop in pairwise(bounds)]


# Run on the device.


def _all_reduce(call: Reduction, on_lane: bool) -> Part[None]:
    place, work, size = call.place, call.work, call.place.size
    bounds = [even_bounds(joined.length, size) for joined in call.joined]
    _wait(call, READY)
    for index, joined in enumerate(call.joined):
        start, stop = bounds[index][place.rank : place.rank + 2]
        # In place is safe, because the others read only the slices that they reduce themselves
        # until this one is RECORDED.
        _fold(call, index, size, joined.flat[start:stop], start, stop, size)
    # Recorded before it is told, because a rank that hears of it may wait for the event at once.
    work.stream.record(work.events[RECORDED])
    yield from share(place, b"", on_lane)
    _wait(call, RECORDED)
    for index, joined in enumerate(call.joined):
        for peer, other in call.transfer.found.items():
            start, stop = bounds[index][peer : peer + 2]
            if peer != place.rank and stop > start:
                into, source = joined.flat[start:stop], other.arrays[index][start:stop]
                call.device.copy(work.stream, into, source)
        joined.give_back()
    yield from call.transfer.land(on_lane)


def _reduce(call: Reduction, on_lane: bool, *, dst: int) -> Part[None]:
    size = call.place.size
    if call.place.rank == dst:
        _wait(call, READY)
        for index, joined in enumerate(call.joined):
            _fold(call, index, size, joined.flat, 0, joined.length, size)
            joined.give_back()
    yield from call.transfer.land(on_lane)


def _prefix(call: Reduction, on_lane: bool, *, stop: int) -> Part[None]:
    """Reduce the arrays of the ranks before `stop`; of none: that of this rank."""
    device, work = call.device, call.work
    _wait(call, READY)
    results: list[tuple[Joined, Any]] = []
    for index, joined in enumerate(call.joined if stop else ()):
        # Not in place, because higher ranks read the whole array until `land`.
        result = device.flat(device.empty(work.stream, joined.name, (joined.length,)))
        work.kept.append(result)
        results.append((joined, result))
        _fold(call, index, stop, result, 0, joined.length, 1)
    yield from call.transfer.land(on_lane)
    for joined, result in results:
        device.copy(work.stream, joined.flat, result)
    for joined in call.joined:
        joined.give_back()
    yield call.settled(alone=True)


def _slot(call: Reduction, on_lane: bool, *, start: int, stop: int) -> Part[None]:
    """Reduce these elements of all ranks' arrays."""
    into, size = flat_place(call.work, call.result), call.place.size
    _wait(call, READY)
    _fold(call, 0, size, into, start, stop, size)
    put_back(call.work, call.result, into)
    yield from call.transfer.land(on_lane)


def _wait(call: Reduction, which: int) -> None:
    """Order later work after that event of all ranks."""
    call.work.mark.busy = True
    for other in call.transfer.found.values():
        call.work.stream.wait(other.events[which])


def _fold(
    call: Reduction, index: int, ranks: int, into: Any, start: int, stop: int, size: int
) -> None:
    """Queue the reduction of elements `start` to `stop` of array `index` of the first `ranks`
    ranks.

    `size`: the divisor of AVG.
    """
    # In the order of the ranks, so that the result is the same on every rank, bit for bit.
    operands = [call.transfer.found[rank].arrays[index] for rank in range(ranks)]
    most = max(1, PIECE // call.joined[index].itemsize) if ranks > 2 else max(1, stop - start)
    for a, b in pieces(start, stop, most):
        cut = [operand[a:b] for operand in operands]
        call.device.reduce(call.work.stream, call.op, cut, into[a - start : b - start], size)
