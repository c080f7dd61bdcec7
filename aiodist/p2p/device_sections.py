"""Messages whose arrays are on a device and go by way of the host: in sections, so that the copies
of one go on while others are on their way between the ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from aiodist.buffers.dtypes import carrier
from aiodist.buffers.encoding import Encoded, byte_view
from aiodist.buffers.values import Incoming
from aiodist.devices import memory as device_memory
from aiodist.devices.memory import DONE, RECORDED
from aiodist.devices.values import Leaf, Places, Sources, host_bytes
from aiodist.p2p.pieces import Pieces

Part = memoryview | tuple[Any, int, int]
"""Bytes of the host, or a flat array on the device, and its elements from and to."""


class Departure:
    """The data of a message of this rank. While a section is on its way, the next one is copied to
    the host."""

    def __init__(self, sources: Sources, encoded: Encoded) -> None:
        device_work = sources.device_work
        assert device_work is not None
        self._device_work = device_work
        self._device_memory = sources.device_memory
        self._parts = _cut(encoded, sources)
        # A section is done with on the device when it leaves, and then the next one is queued.
        self._copies: deque[list[Any]] = deque(maxlen=2)
        self._events = deque([device_work.events[RECORDED][1], device_work.events[DONE][1]])
        self._views: list[memoryview] = []
        device_work.kept.append(self._copies)
        device_work.mark.busy = True
        device_work.follow()
        self.more = True
        """Whether there is a section that was not asked for."""
        self.fetch()

    def fetch(self) -> None:
        """Queue the copies of the next section."""
        self.more = bool(self._parts)
        if not self.more:
            return
        device, stream = self._device_work.device, self._device_work.stream
        self._views = []
        self._copies.append([])
        for part in self._parts.popleft():
            if isinstance(part, memoryview):
                self._views.append(part)
                continue
            flat, start, stop = part
            copy = device.host(device.describe(flat)[0], (stop - start,))
            device.copy(stream, copy, flat[start:stop])
            self._copies[-1].append(copy)
            self._views.append(byte_view(host_bytes(copy)))
        self._events.rotate()
        stream.record(self._events[0])

    def when_there(self, then: Callable[[Sequence[memoryview]], None]) -> None:
        """Call `then` with the bytes of the next section when they are on the host. It is to
        `fetch` the one after it, unless the message is given up."""
        views = self._views
        self._device_memory.when_done([self._events[0]], lambda: then(views))


def _cut(encoded: Encoded, sources: Sources) -> deque[list[Part]]:
    """The data of a message in sections; at least one."""
    made: deque[list[Part]] = deque([[]])
    assert sources.device_work is not None
    device = sources.device_work.device
    room = device_memory.SECTION
    at = 0
    for gap, flat in zip(encoded.gaps, sources.flats, strict=True):
        made[-1] += encoded.buffers[at:gap]
        at = gap
        name, (length,) = device.describe(flat)
        size = carrier(name).itemsize
        start = 0
        while start < length:
            if room < size:
                made.append([])
                room = max(device_memory.SECTION, size)
            stop = min(length, start + room // size)
            made[-1].append((flat, start, stop))
            room -= (stop - start) * size
            start = stop
    made[-1] += encoded.buffers[at:]
    return made


class Arrival(Pieces):
    """Where the data of a message comes to the host. What has come for a device is copied there
    while the rest comes."""

    __slots__ = ("_leaves", "_passed", "_places", "_total")

    def __init__(self, target: Incoming, places: Places) -> None:
        super().__init__(target.buffers)
        self._places = places
        self._total = self.left
        self._passed = 0
        self._leaves: list[tuple[int, Leaf]] = []
        at = 0
        for spec, leaf in zip(target.specs, target.targets, strict=True):
            if isinstance(leaf, Leaf):
                if leaf.source is not None:
                    continue  # it does not come to the host
                self._leaves.append((at, leaf))
            at += spec.nbytes

    def move(self, views: Sequence[memoryview]) -> None:
        super().move(views)
        self._leaves = []  # what is in memory of its own is not for the device of that receive

    def landed(self) -> None:
        super().landed()
        come = self._total - self.left
        if self._leaves and self.left and come - self._passed >= device_memory.SECTION:
            self._passed = come
            self._places.pass_on([(leaf, come - at) for at, leaf in self._leaves if come > at])
