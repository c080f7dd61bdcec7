"""Messages with arrays on a device that go by way of the host, in sections.

The next section is copied between device and host while others are in flight between the ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

from aiodist.buffers.encoding import Encoded, byte_view
from aiodist.buffers.values import Incoming
from aiodist.devices import sections
from aiodist.devices.values import DeviceLeaf, DevicePlaces, Sources, host_bytes
from aiodist.p2p.pieces import Pieces


class Departure:
    """The data of a message of this rank.

    The next section is copied to the host while one is in flight. Each section brings the buffers
    on the host that come before its arrays. The last one brings the rest.
    """

    def __init__(self, sources: Sources, encoded: Encoded) -> None:
        assert sources.device_work is not None
        self._device_memory = sources.device_memory
        self._encoded = encoded
        self._on_host = 0  # how many buffers on the host have been used
        # When a section leaves, the device has finished it, and the next one is queued.
        self._sections = sections.Sections(sources.device_work, sources.flats, 2)
        self._next = self._sections.fetch()

    @property
    def more(self) -> bool:
        """Whether there is one more section."""
        return self._next is not None

    def fetch(self) -> None:
        """Queue the copies of the next section."""
        self._next = self._sections.fetch()

    def when_there(
        self,
        then: Callable[[Sequence[memoryview]], None],
        failed: Callable[[Exception], None],
    ) -> None:
        """Call `then` with the bytes of the next section when they are on the host, or `failed` if
        the device fails.

        `then` has to `fetch` the section after it, unless the message is given up.
        """
        section = self._next
        assert section is not None
        views: list[memoryview] = []
        for cut, copy in zip(section.cuts, section.copies, strict=True):
            views += self._until(self._encoded.gaps[cut.array])
            views.append(byte_view(host_bytes(copy)))
        if self._sections.is_last:
            views += self._until(len(self._encoded.buffers))
        self._device_memory.when_done([section.there], lambda: then(views), failed)

    def _until(self, stop: int) -> Sequence[memoryview]:
        """Return the unused buffers on the host before the one with number `stop`."""
        start, self._on_host = self._on_host, stop
        return self._encoded.buffers[start:stop]


class DevicePieces(Pieces):
    """Memory of the host for the data of a message. Data for a device is copied there while the
    rest is still coming."""

    __slots__ = ("_leaves", "_passed", "_places", "_total")

    def __init__(self, target: Incoming, places: DevicePlaces) -> None:
        super().__init__(target.buffers)
        self._places = places
        self._total = self.left  # bytes that come to the host
        self._passed = 0  # how many had come at the last copy to the device
        self._leaves: list[
            tuple[int, DeviceLeaf]
        ] = []  # arrays on the device, and the start of each
        at = 0
        for spec, leaf in zip(target.specs, target.targets, strict=True):
            if isinstance(leaf, DeviceLeaf):
                if leaf.source is not None:
                    continue  # it does not come to the host
                self._leaves.append((at, leaf))
            at += spec.nbytes

    def move(self, views: Sequence[memoryview]) -> None:
        super().move(views)
        self._leaves = []  # data in private memory is not for the device of that receive

    def landed(self) -> None:
        super().landed()
        come = self._total - self.left
        if self._leaves and self.left and come - self._passed >= sections.SECTION:
            self._passed = come
            # A frame must not fail by a device. What was not copied is copied once all is here, and
            # if that fails, the receive does.
            with contextlib.suppress(Exception):
                self._places.pass_on([(leaf, come - at) for at, leaf in self._leaves if come > at])
