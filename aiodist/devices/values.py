"""Arrays on devices inside values: what is shown of them, and where they go.

The receiver copies an array directly from the sender's memory if it can. Else the sender copies it
to the host, and it is sent like any other array. If only one side has the array on a device, that
side uses pinned memory of the host.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from aiodist.buffers import arrays
from aiodist.buffers.arrays import Flat, UserArray, check_same
from aiodist.buffers.dtypes import carrier
from aiodist.buffers.encoding import byte_view
from aiodist.buffers.foreign import Target
from aiodist.buffers.paths import Where
from aiodist.buffers.places import leaves_of
from aiodist.buffers.tokens import NO_ARRAYS, Spec
from aiodist.devices import device_of
from aiodist.devices.base import Device
from aiodist.devices.handles import Found
from aiodist.devices.memory import DeviceMemory
from aiodist.devices.work import READY, TOLD, DeviceWork

_NOTHING: Flat = np.empty(0, np.uint8)

MOST_SHOWN = 1024
"""The most arrays of one value that others read in place; if there are more, all go through the
host."""


def host_bytes(array: Any) -> Flat:
    """The elements of a contiguous array that a device made on the host."""
    view = arrays.view(array, "array")
    assert view is not None
    return view.stage()[0]


def device_among(*values: Any) -> Device | None:
    """The device of all arrays that are on one; None if none is.

    Raises TypeError if they are on several devices, and ValueError if a value is too deep.
    """
    among: Device | None = None
    for value in values:
        for leaf in () if value is None else leaves_of(value):
            device = None if type(leaf) in NO_ARRAYS else device_of(leaf)
            if device is None:
                continue
            if among is not None and among is not device:
                raise several()
            among = device
    return among


def several() -> TypeError:
    return TypeError("the arrays of one operation, and out=, are on one device, or on the host")


def check_place(
    device: Device, out: Any, what: str, due: tuple[str, tuple[int, ...]], where: Where
) -> None:
    """Raise TypeError or ValueError unless `out` can be written, and has the `due` dtype and
    shape."""
    got = device.describe(out)
    if got != due:
        raise arrays.misfit(what, *due, *got, where)
    if not device.can_write(out):
        raise ValueError(
            f"{where}: several elements of {arrays.shown(*got)} share one place in memory: "
            "nothing can be written there"
        )


class Sources:
    """The arrays on devices in values that a rank gives: a `Giver`.

    `device_work`: the operation's work on its device, made with the first such array.
    """

    def __init__(self, device_memory: DeviceMemory) -> None:
        self.device_memory = device_memory
        self.device_work: DeviceWork | None = None
        self.flats: list[Any] = []
        self.hidden = ""  # why others cannot read them, if this rank has found that

    def is_foreign(self, value: Any) -> bool:
        return device_of(value) is not None

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
        """The operation's work on `device`. Raises TypeError if it is on another device."""
        if self.device_work is None:
            self.device_work = self.device_memory.begin(device)
        elif self.device_work.device is not device:
            raise several()
        return self.device_work

    def copy(self, some: Sequence[Any]) -> None:
        """Replace `some` of the flat arrays by copies, because they may be written before they are
        read."""
        numbers = set(map(id, some))
        for index, flat in enumerate(self.flats):
            if id(flat) in numbers:
                assert self.device_work is not None
                self.flats[index] = self.device_work.copied(flat)

    def words(self, peer: int | None = None) -> bytes:
        """What `peer` (None: all others) needs to read them; b"" if they go through the host."""
        if self.device_work is None or self.device_memory.problem or len(self.flats) > MOST_SHOWN:
            return b""  # nothing, or through the host
        try:
            return self.device_memory.handles.describe(self.device_work, self.flats, peer)
        except OSError as error:
            # Later operations try again, because other memory may have a handle.
            self.hidden = f"rank {self.device_memory.rank}: {error}"
            text = "some tensors on devices go through host memory: %s"
            self.device_memory.say_once(text, self.hidden)
            return b""

    def own(self) -> Found:
        """What `words` tells others, for this rank itself."""
        assert self.device_work is not None
        return Found(self.device_work.events[:TOLD], self.flats)

    def finished(self) -> None:
        """No rank reads the arrays any more."""
        if self.device_work is not None:
            self.device_work.finished()
            self.device_work = None

    def abandon(self, peers: Sequence[int] | None = None) -> None:
        """The operation has failed, and `peers` (None: all) may be reading the arrays."""
        if self.device_work is not None:
            self.device_memory.abandon(self.device_work, peers)

    def to_host(self) -> list[memoryview]:
        """Queue copies to the host. The bytes are valid when the device is done."""
        assert self.device_work is not None
        self.device_work.begin()
        copies = []
        for flat in self.flats:
            copy = self.device_work.to_host(flat)
            self.device_work.kept.append(copy)
            copies.append(byte_view(host_bytes(copy)))
        return copies


class DeviceLeaf:
    """One array that comes from a device, or goes to one: a `Target`."""

    def __init__(
        self, device: Device, spec: Spec, value: Any, out: UserArray | None, source: Any | None
    ) -> None:
        self._device = device
        self._shape = spec.shape
        self._length = math.prod(spec.shape)  # its elements
        self._itemsize = carrier(spec.name).itemsize  # bytes of an element
        self._passed = 0  # elements whose copies from the host were queued
        self._out = out  # the user's array on the host, filled when the device is done; or None
        self.value = value  # the user's array, or a new one
        self.source = source  # what is read of another rank; None: its bytes come to the host
        self.staging: Any = None  # memory of the host on the way, if needed
        if source is None or out is not None:
            # Arrays from device to device need none.
            self.staging = device.host(spec.name, spec.shape)
        self.into = value if out is None else self.staging  # where the device writes it

    def stage(self) -> tuple[Flat, Flat | None]:
        return (host_bytes(self.staging) if self.source is None else _NOTHING), None

    def queue(self, device_work: DeviceWork) -> None:
        if self._passed:
            self.pass_on(device_work, self._length * self._itemsize)
            return
        source = self.staging if self.source is None else self.source.reshape(self._shape)
        device_work.kept += [self.into, source]
        device_work.device.copy(device_work.stream, self.into, source)

    def pass_on(self, device_work: DeviceWork, nbytes: int) -> None:
        """Queue the copies of the elements in its first `nbytes`, which have come to the host.

        Does nothing if the array is not contiguous on the device.
        """
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


class DevicePlaces:
    """Where the arrays of one value go that are on a device on either side: a `Taker`.

    `holder`: has the `device_work` of the operation. `found`: where the arrays are, in the order of
    the value; None: all bytes come to the host.
    """

    def __init__(self, device_memory: DeviceMemory, holder: Sources, found: Found | None) -> None:
        self._device_memory = device_memory
        self._holder = holder
        self._found = found
        self._next = 0
        self.leaves: list[DeviceLeaf] = []

    @property
    def device_work(self) -> DeviceWork | None:
        return self._holder.device_work

    @property
    def reads(self) -> bool:
        """Whether an array of another rank is read in place."""
        return any(leaf.source is not None for leaf in self.leaves)

    def is_foreign(self, value: Any) -> bool:
        return device_of(value) is not None

    def take(self, spec: Spec, out: Any, where: Where) -> Target | None:
        # There are four cases, by where the array was and where it goes::
        #
        #   from   to      how
        #   device device  copied in place by this rank's device
        #   device host    the same, into pinned memory, and from there to the user's array
        #   host   device  its bytes come to pinned memory, and are copied from there
        #   host   host    like any other array, not handled here
        #
        # If this rank cannot read the sender's device (`found` is None), the sender has copied to
        # the host. Then the first two cases are like the last two.
        source = None
        if spec.kind == "device" and self._found is not None:
            source = self._found.arrays[self._next]
            self._next += 1
        device = device_of(out) if out is not None else None
        onto = device  # where it goes
        if out is None and spec.kind == "device":
            # That of the operation if it has one. A program may use several at once.
            work = self.device_work
            onto = device_of(source) if work is None else work.device
            onto = onto or self._device_memory.device()
        if onto is None and source is None:
            return None  # from host to host
        device = onto or device_of(source)
        assert device is not None
        device_work = self._holder.work_on(device)
        if source is not None and device.describe(source) != (spec.name, (math.prod(spec.shape),)):
            raise ValueError(f"{where}: its rank shows another array than it describes")
        host: UserArray | None = None
        array = out
        if out is None:
            array = device.empty(device_work.stream, spec.name, spec.shape)
        elif onto is None:
            host = arrays.writable(out, where)
            check_same("the incoming array", spec.name, spec.shape, host, where)
        else:
            check_place(device, out, "the incoming array", (spec.name, spec.shape), where)
        leaf = DeviceLeaf(device, spec, array, host, source)
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

    def pass_on(self, come: Sequence[tuple[DeviceLeaf, int]]) -> None:
        """Queue copies of the first bytes of these arrays, which have come to the host."""
        device_work = self.device_work
        assert device_work is not None
        device_work.begin()
        for leaf, nbytes in come:
            leaf.pass_on(device_work, nbytes)

    def take_over(self, other: DevicePlaces | None) -> None:
        """Queue copies of what `other`, for the same value, has read from another rank."""
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
        """Order the user's later work after all writes to the user's arrays."""
        if self.device_work is not None:
            self.device_work.let_go()

    def finished(self) -> None:
        self._holder.finished()

    def when_done(
        self,
        queue: Callable[[], None],
        then: Callable[[], None],
        failed: Callable[[Exception], None],
    ) -> None:
        """Call `queue`, and then `then` when all queued work is complete. If the device fails, call
        `failed` instead."""
        try:
            queue()
            events = [] if self.device_work is None else [self.device_work.done()]
        except Exception as error:
            failed(error)
        else:
            self._device_memory.when_done(events, then, failed)
