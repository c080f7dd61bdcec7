"""Arrays on devices in values that travel: what is shown of them, and where they go.

The receiver of an array copies it from where it lies in the sender's memory, if it can; else the
sender copies it to the host, from where it travels as others do. Where an array is on a device on
one side alone, it goes through pinned memory of the host on that side.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from aiodist.buffers import arrays
from aiodist.buffers.arrays import Array, Flat, check_same
from aiodist.buffers.dtypes import carrier
from aiodist.buffers.encoding import byte_view
from aiodist.buffers.foreign import Target
from aiodist.buffers.paths import Where
from aiodist.buffers.places import leaves_of
from aiodist.buffers.tokens import Spec
from aiodist.devices import device_of
from aiodist.devices.base import Device
from aiodist.devices.handles import Found
from aiodist.devices.memory import DeviceMemory
from aiodist.devices.work import READY, TOLD, DeviceWork

_NOTHING: Flat = np.empty(0, np.uint8)

MOST_SHOWN = 1024
"""Most arrays of one value that others read where they lie; more of them go through the host."""


def host_bytes(array: Any) -> Flat:
    """The elements of a contiguous array that a device made on the host."""
    view = arrays.view(array, "array")
    assert view is not None
    return view.stage()[0]


def device_among(*values: Any) -> Device | None:
    """The device of those arrays that are on one; None where none is. Raises TypeError where they
    are on several, ValueError where a value is too deep."""
    found = {id(d): d for value in values for leaf in leaves_of(value) if (d := device_of(leaf))}
    if len(found) > 1:
        raise several()
    return next(iter(found.values())) if found else None


def several() -> TypeError:
    return TypeError("the arrays of one operation, and out=, are on one device, or on the host")


def check_place(
    device: Device, out: Any, what: str, due: tuple[str, tuple[int, ...]], where: Where
) -> None:
    """Raise TypeError or ValueError unless `out` can be written, and has dtype and shape as `what`,
    which are `due`."""
    got = device.describe(out)
    if got != due:
        raise arrays.misfit(what, *due, *got, where)
    if not device.can_write(out):
        raise ValueError(
            f"{where}: several elements of {arrays.shown(*got)} share one place in memory: "
            "nothing can be written there"
        )


class Sources:
    """The arrays on devices of values that a rank gives: a `Giver`.

    `device_work`: what the operation has of its device, made with the first such array.
    """

    def __init__(self, device_memory: DeviceMemory) -> None:
        self.device_memory = device_memory
        self.device_work: DeviceWork | None = None
        self.flats: list[Any] = []

    def give(self, value: Any, where: Where) -> tuple[str, tuple[int, ...]] | None:
        device = device_of(value)
        if device is None:
            return None
        try:
            described = device.describe(value)
        except TypeError as error:
            raise TypeError(f"{where}: {error}") from error
        self.flats.append(self.work_on(device).flat(value))
        return described

    def work_on(self, device: Device) -> DeviceWork:
        """What the operation has of `device`. Raises TypeError if it is on another one."""
        if self.device_work is None:
            self.device_work = self.device_memory.begin(device)
        elif self.device_work.device is not device:
            raise several()
        return self.device_work

    def words(self, peer: int | None = None) -> bytes:
        """With which `peer` (None: all others) can read them; b"" where it cannot."""
        if self.device_work is None or self.device_memory.problem or len(self.flats) > MOST_SHOWN:
            return b""  # nothing, or through the host
        try:
            return self.device_memory.handles.describe(self.device_work, self.flats, peer)
        except OSError as error:
            self.device_memory.refuse(f"rank {self.device_memory.rank}: {error}")
            return b""

    def own(self) -> Found:
        """What `words` tells others, for this rank itself."""
        assert self.device_work is not None
        return Found(self.device_work.events[:TOLD], self.flats)

    def finished(self) -> None:
        """Nobody reads them any more."""
        if self.device_work is not None:
            self.device_work.finished()
            self.device_work = None

    def abandon(self, peers: Sequence[int] | None = None) -> None:
        """The operation has failed: `peers` (None: all) may be reading them."""
        if self.device_work is not None:
            self.device_memory.abandon(self.device_work, peers)

    def to_host(self) -> list[memoryview]:
        """Queue copies to memory of the host: their bytes, there when the device is done."""
        assert self.device_work is not None
        self.device_work.begin()
        copies = []
        for flat in self.flats:
            copy = self.device_work.to_host(flat)
            self.device_work.kept.append(copy)
            copies.append(byte_view(host_bytes(copy)))
        return copies


class Leaf:
    """One array that comes from a device, or goes to one: a `Target`."""

    def __init__(
        self, device: Device, spec: Spec, value: Any, out: Array | None, source: Any | None
    ) -> None:
        self._device = device
        self._shape = spec.shape  # of the array
        self._length = math.prod(spec.shape)  # its elements
        self._itemsize = carrier(spec.name).itemsize  # bytes of an element
        self._passed = 0  # so many elements were queued to be copied from the host
        self._out = out  # the user's array on the host, filled when the device is done; or None
        self.value = value  # the user's array, or a new one
        self.source = source  # what is read of another rank; None: its bytes come to the host
        self.staging: Any = None  # memory of the host on the way, where there is any
        if source is None or out is not None:
            # From device to device there is nothing in between.
            self.staging = device.host(spec.name, spec.shape)
        self.into = value if out is None else self.staging  # where the device puts it

    def stage(self) -> tuple[Flat, Flat | None]:
        return (host_bytes(self.staging) if self.source is None else _NOTHING), None

    def queue(self, device_work: DeviceWork) -> None:
        """Queue what is to be done on the device, and was not queued yet."""
        if self._passed:
            self.pass_on(device_work, self._length * self._itemsize)
            return
        source = self.staging if self.source is None else self.source.reshape(self._shape)
        device_work.kept += [self.into, source]
        device_work.device.copy(device_work.stream, self.into, source)

    def pass_on(self, device_work: DeviceWork, nbytes: int) -> None:
        """Its first `nbytes` have come to the host (or more, of others): queue the copies of those
        elements that were not queued yet. Nothing happens where they do not lie one behind the
        other on the device."""
        flat = self._device.flat(self.into)
        count = min(nbytes // self._itemsize, self._length)
        if flat is None or count == self._passed:
            return
        source = self.staging.reshape(-1)
        if not self._passed:
            device_work.kept += [flat, source]
        part = slice(self._passed, count)
        device_work.device.copy(device_work.stream, flat[part], source[part])
        self._passed = count

    def commit(self, staged: Flat | None) -> None:
        if self._out is None:
            self._device.written(self.value)
        else:
            target, rest = self._out.stage()
            target[:] = host_bytes(self.staging)
            self._out.commit(rest)


class Places:
    """Where the arrays of one value go that are on a device on either side: a `Taker`.

    `holder`: has the `device_work` of the operation. `found`: where they lie, in the order of the
    value; None: all bytes come to the host.
    """

    def __init__(self, device_memory: DeviceMemory, holder: Sources, found: Found | None) -> None:
        self._device_memory = device_memory
        self._holder = holder
        self._found = found
        self._next = 0
        self.leaves: list[Leaf] = []

    @property
    def device_work(self) -> DeviceWork | None:
        return self._holder.device_work

    @property
    def reads(self) -> bool:
        """Whether anything is read of another rank."""
        return any(leaf.source is not None for leaf in self.leaves)

    def is_foreign(self, value: Any) -> bool:
        return device_of(value) is not None

    def take(self, spec: Spec, out: Any, where: Where) -> Target | None:
        # Four cases, by where the array was and where it is to go:
        #
        #     from      to        how
        #     device    device    copied from where it lies, by this rank's device
        #     device    host      the same, into pinned memory, and from there to the user's array
        #     host      device    its bytes come to pinned memory, and are copied from there
        #     host      host      nothing for here: as any other array
        #
        # Where this rank cannot read the sender's device (`found` is None), the sender has copied
        # to the host, and the first two cases are like the last two.
        source = None
        if spec.kind == "device" and self._found is not None:
            source = self._found.arrays[self._next]
            self._next += 1
        device = device_of(out) if out is not None else None
        onto = device  # where it goes
        if out is None and spec.kind == "device":
            onto = self._device_memory.device()
        if onto is None and source is None:
            return None  # from host to host
        device = onto or device_of(source)
        assert device is not None
        device_work = self._holder.work_on(device)
        if source is not None and device.describe(source) != (spec.name, (math.prod(spec.shape),)):
            raise ValueError(f"{where}: what its rank shows is not what it describes")
        host: Array | None = None
        array = out
        if out is None:
            array = device.empty(device_work.stream, spec.name, spec.shape)
        elif onto is None:
            host = arrays.writable(out, where)
            check_same("the incoming array", spec.name, spec.shape, host, where)
        else:
            check_place(device, out, "the incoming array", (spec.name, spec.shape), where)
        leaf = Leaf(device, spec, array, host, source)
        self.leaves.append(leaf)
        return leaf

    def queue(self, *, reads: bool) -> None:
        """Queue the copies from other ranks (`reads`), or those from the host."""
        leaves = [leaf for leaf in self.leaves if (leaf.source is not None) is reads]
        if not leaves:
            return
        device_work = self.device_work
        assert device_work is not None
        device_work.begin()
        if reads:
            assert self._found is not None
            device_work.stream.wait(self._found.events[READY])
        for leaf in leaves:
            leaf.queue(device_work)

    def pass_on(self, come: Sequence[tuple[Leaf, int]]) -> None:
        """So many bytes, from the first on, have come to the host for these: have them where they
        go."""
        device_work = self.device_work
        assert device_work is not None
        device_work.begin()
        for leaf, nbytes in come:
            leaf.pass_on(device_work, nbytes)

    def take_over(self, other: Places | None) -> None:
        """Queue copies of what `other`, of the same value, has read of another rank."""
        if other is None:
            return
        read = [leaf for leaf in other.leaves if leaf.source is not None]
        mine = [leaf for leaf in self.leaves if leaf.source is not None]
        if not read:
            return
        device_work = self.device_work
        assert device_work is not None and other.device_work is not None
        device_work.begin()
        device_work.stream.wait(other.device_work.done())
        for leaf, theirs in zip(mine, read, strict=True):
            device_work.kept += [leaf.into, theirs.into]
            device_work.device.copy(device_work.stream, leaf.into, theirs.into)

    def let_go(self) -> None:
        """Nothing is written to the user's arrays any more that is not queued before what the user
        queues from here on."""
        if self.device_work is not None:
            self.device_work.let_go()

    def finished(self) -> None:
        """All that was queued is complete."""
        self._holder.finished()

    def when_done(self, then: Callable[[], None]) -> None:
        """Call `then` when all that was queued is complete."""
        if self.device_work is None:
            then()
        else:
            self._device_memory.when_done([self.device_work.done()], then)
