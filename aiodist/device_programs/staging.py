"""Reductions of large arrays on devices through the host: in sections, so that the copies of one
section go on while the one before is on its way between the ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from aiodist.buffers.dtypes import carrier
from aiodist.devices import memory as device_memory
from aiodist.devices.base import Device
from aiodist.devices.memory import DONE, RECORDED, DeviceWork, Settled
from aiodist.phases.base import Call, Part
from aiodist.schedules.cuts import pieces

Cut = tuple[int, int, int]
"""A part of an array: its number, and its elements from and to."""


def sections(lengths: Sequence[int], sizes: Sequence[int], most: int) -> list[list[Cut]]:
    """Cut arrays of so many elements, of these sizes in bytes, in sections of `most` bytes."""
    made: list[list[Cut]] = []
    room = 0
    for index, (length, size) in enumerate(zip(lengths, sizes, strict=True)):
        for start, stop in pieces(0, length, max(1, most // size)):
            nbytes = (stop - start) * size
            if nbytes > room or not made:
                made.append([])
                room = most
            made[-1].append((index, start, stop))
            room -= nbytes
    return made


def in_sections(
    device_work: DeviceWork,
    loop: Any,
    xs: Sequence[Any],
    targets: Sequence[Any] | None,
    reduce: Callable[[list[Any]], Call],
    on_lane: bool,
) -> Part[None]:
    """Reduce `xs` by ``reduce(copies on the host)``, into `targets` where there are any."""
    device, stream = device_work.device, device_work.stream
    flats = [device_work.flat(x) for x in xs]
    into = (
        [] if targets is None else [_flat_target(device, device_work, target) for target in targets]
    )
    names = [device.describe(flat)[0] for flat in flats]
    cuts = sections(
        [device.describe(flat)[1][0] for flat in flats],
        [carrier(name).itemsize for name in names],
        device_memory.SECTION,
    )
    # Section n is copied back before n + 2 is fetched; that n + 2 is there is known when n + 4 is.
    ring: deque[list[Any]] = deque(maxlen=4)
    device_work.kept += [ring, *into]
    events = [device_work.events[RECORDED][1], device_work.events[DONE][1]]

    def fetch(number: int) -> None:
        ring.append([])
        for index, start, stop in cuts[number]:
            copy = device.host(names[index], (stop - start,))
            ring[-1].append(copy)
            device.copy(stream, copy, flats[index][start:stop])
        stream.record(events[number % 2])

    device_work.mark.busy = True
    device_work.follow()
    fetch(0)
    for number, parts in enumerate(cuts):
        copies = ring[-1]
        if number + 1 < len(cuts):
            fetch(number + 1)
        yield Settled(loop, events[number % 2])
        result = yield from reduce(copies).start(on_lane)
        if targets is not None:
            for (index, start, stop), part in zip(parts, result, strict=True):
                device.copy(stream, into[index][start:stop], part)
    for target, flat in zip(targets or (), into, strict=True):
        if device.flat(target) is None:
            device.copy(stream, target, flat.reshape(device.describe(target)[1]))
    yield Settled(loop, device_work.done(), last=True)


def _flat_target(device: Device, device_work: DeviceWork, target: Any) -> Any:
    flat = device.flat(target)
    if flat is None:
        flat = device.flat(device.empty(device_work.stream, *device.describe(target)))
    return flat
