"""Collectives that move arrays between devices: each copies what it gets from where it lies.

Values other than arrays, and arrays in trees, travel as elsewhere; a list or tuple of arrays is
taken here where it is the slots of `scatter` or `all_to_all`, or an ``out``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from aiodist.buffers.arrays import shown
from aiodist.buffers.dtypes import carrier
from aiodist.devices import device_of
from aiodist.devices.base import Device
from aiodist.errors import MismatchError
from aiodist.runtime.collectives import values
from aiodist.runtime.collectives.base import Call, Part, check_root
from aiodist.runtime.collectives.device_calls import (
    READY,
    DeviceCall,
    DevicePlace,
    count,
    device_among,
    items_of,
)
from aiodist.runtime.device import Found

Source = tuple[int, int]
"""An array of a rank, by its place among those that the rank shows."""


def broadcast(place: DevicePlace, x: Any, src: int) -> Call:
    """`x` of rank `src`; `x` of the others is where it goes."""
    device = device_of(x)
    if device is None:
        return values.broadcast(place, x, src)
    check_root(place, src, "src")
    here = place.rank == src
    move = Move(place, device, "broadcast", [x] if here else [])
    move.result = x
    takes = [] if here else [((src, 0), x)]
    host = partial(values.broadcast, place, src=src)
    return move.start(
        f"broadcast(src={src})", takes, lambda result: x, lambda: host(move.to_host(x)), [x]
    )


def all_gather(place: DevicePlace, x: Any, out: Any) -> Call:
    """`x` of every rank, by rank."""
    device = device_of(x)
    if device is None:
        return values.all_gather(place, x, out)
    outs = values.slots_of(out, place.size, x)
    _same_device(device, outs)
    move = Move(place, device, "all_gather", [x])
    takes = [((rank, 0), outs.get(rank)) for rank in range(place.size)]
    return move.start(
        "all_gather()",
        takes,
        lambda results: results if out is None else out,
        lambda: values.all_gather(place, move.to_host(x), None),
    )


def gather(place: DevicePlace, x: Any, dst: int, out: Any) -> Call:
    """`x` of every rank, by rank, at `dst`."""
    device = device_of(x)
    if device is None:
        return values.gather(place, x, dst, out)
    check_root(place, dst, "dst")
    here = place.rank == dst
    if out is not None and not here:
        raise ValueError(f"out= is for rank dst={dst}; this is rank {place.rank}")
    outs = values.slots_of(out, place.size, x)
    _same_device(device, outs)
    move = Move(place, device, "gather", [x])
    takes = [((rank, 0), outs.get(rank)) for rank in range(place.size)] if here else []
    return move.start(
        f"gather(dst={dst})",
        takes,
        lambda results: None if not here else results if out is None else out,
        lambda: values.gather(place, move.to_host(x), dst, None),
    )


def scatter(place: DevicePlace, xs: Any, src: int, out: Any) -> Call:
    """``xs[rank]`` of rank `src`; elsewhere `out` says that it goes to a device."""
    device = device_among(xs, out)
    if device is None:
        return values.scatter(place, xs, src, out)
    check_root(place, src, "src")
    here = place.rank == src
    if not here and xs is not None:
        raise ValueError(f"xs is for rank src={src}; this is rank {place.rank}: pass None here")
    slots = _slots(place, xs, "scatter") if here else []
    move = Move(place, device, "scatter", slots)
    return move.start(
        f"scatter(src={src})",
        [((src, place.rank), out)],
        lambda results: results[0] if out is None else out,
        lambda: values.scatter(place, move.to_host(slots) if here else None, src, None),
    )


def all_to_all(place: DevicePlace, xs: Any, out: Any) -> Call:
    """``xs[rank]`` of every rank, by rank."""
    device = device_among(xs, None)
    if device is None:
        return values.all_to_all(place, xs, out)
    slots = _slots(place, xs, "all_to_all")
    outs = values.slots_of(out, place.size, None)
    _same_device(device, outs)
    move = Move(place, device, "all_to_all", slots)
    takes = [((rank, place.rank), outs.get(rank)) for rank in range(place.size)]
    return move.start(
        "all_to_all()",
        takes,
        lambda results: results if out is None else out,
        lambda: values.all_to_all(place, move.to_host(slots), None),
    )


def _slots(place: DevicePlace, xs: Any, op: str) -> list[Any]:
    if not isinstance(xs, (list, tuple)):
        raise TypeError(f"{op} takes a list of {place.size} values, one a rank")
    if len(xs) != place.size:
        raise ValueError(f"{op} takes {place.size} values, one a rank; got {len(xs)}")
    return list(xs)


def _same_device(device: Device, outs: dict[int, Any]) -> None:
    if any(device_of(out) is not device for out in outs.values()):
        raise TypeError("out= is on the device of what is given")


class Move(DeviceCall):
    """One collective that shows `xs` to the others."""

    def __init__(self, place: DevicePlace, device: Device, op: str, xs: Sequence[Any]) -> None:
        super().__init__(place, device, op)
        self.lease.kept += xs
        for x in xs:
            name, shape = device.describe(x)
            flat = device.flat(x)
            if flat is None:
                self.follow()
                copy = device.empty(name, shape)
                device.copy(self.lease.stream, copy, x)
                flat = device.flat(copy)
                self.lease.busy = True
            self.shown.append(flat)
            self.shapes.append(shape)
            self.lease.kept.append(flat)
            self.nbytes += count(device, x) * carrier(name).itemsize
        if self.lease.busy:
            self.shown_later()

    def start(
        self,
        text: str,
        takes: Sequence[tuple[Source, Any]],
        finish: Callable[[list[Any]], Any],
        host: Callable[[], Call],
        targets: Sequence[Any] | None = None,
    ) -> Call:
        """The call to launch. `takes`: what goes where (None: to a new array); `finish` makes the
        result of these. `host`: the same, of arrays of the host. `targets`: where its result goes,
        if not as `takes` says."""
        self.lease.kept += [out for _, out in takes if out is not None]

        def run(found: list[Found], on_lane: bool) -> Part[None]:
            self.wait(found, READY)
            results = [self._take(found, source, out) for source, out in takes]
            yield from self.complete(on_lane)
            self.result = finish(results)

        def through_host(on_lane: bool) -> Part[None]:
            self.follow()
            call = host()
            yield from self.settle()
            got = yield from call.start(on_lane)
            if got is None:
                self.result = None
                return
            copies = items_of(got)
            outs = list(targets) if targets is not None else [out for _, out in takes]
            results = [
                self._target(out, *self._described(copy))
                for out, copy in zip(outs, copies, strict=True)
            ]
            yield from self.from_host(results, copies)
            self.result = finish(results)

        return self.call(text, run, through_host)

    def _described(self, copy: Any) -> tuple[str, tuple[int, ...]]:
        name = self.device.host_dtype(copy)
        return name, tuple(copy.shape)

    def _take(self, found: Sequence[Found], source: Source, out: Any) -> Any:
        rank, index = source
        flat, shape = found[rank].arrays[index], found[rank].shapes[index]
        name, _ = self.device.describe(flat)
        into = self._target(out, name, shape, rank)
        self.lease.kept.append(into)
        self.device.copy(self.lease.stream, into, flat.reshape(shape))
        return into

    def _target(self, out: Any, name: str, shape: tuple[int, ...], rank: int = -1) -> Any:
        if out is None:
            return self.device.empty(name, shape)
        got = self.device.describe(out)
        if got != (name, shape):
            raise self.place.error(
                MismatchError,
                f"what came does not fit out: it is {shown(name, shape)}",
                calls={self.place.rank: f"out={shown(*got)}"}
                | ({rank: shown(name, shape)} if rank >= 0 else {}),
            )
        if not self.device.can_write(out):
            raise ValueError(
                f"several elements of {shown(*got)} share one place in memory: nothing can be "
                "written there"
            )
        return out
