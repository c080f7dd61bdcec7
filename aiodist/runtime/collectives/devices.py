"""Reductions of arrays on devices: read by the others where they lie, reduced on the device.

First all share where their arrays lie, and agree to read each other's (`_meet`). Then each queues
what it reads, behind the events of those that it reads from, and shares that it has recorded its
own. In the end all wait until the device has come to their last event, and share that: only then is
an array its owner's again. Where the ranks do not see each other's devices, arrays go through the
host: all take the same way, for they decide by what all have heard.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from aiodist.buffers.arrays import shown
from aiodist.buffers.dtypes import carrier
from aiodist.buffers.kernels import Kernel
from aiodist.devices import device_of
from aiodist.devices.base import Device
from aiodist.errors import ProtocolError
from aiodist.runtime.collectives import reductions
from aiodist.runtime.collectives.base import Call, Part, Place, check_root, share
from aiodist.runtime.device import Found, Lease, Plane, Settled
from aiodist.runtime.operation import Program
from aiodist.schedules.cuts import even_bounds, pieces
from aiodist.types import ReduceOp

PIECE = 32 << 20
"""Bytes that are reduced at once: results of half precision need room to be summed in."""
_SHOWN = 4


class DevicePlace(Place, Protocol):
    """`Place`, and what there is of devices."""

    loop: asyncio.AbstractEventLoop

    @property
    def plane(self) -> Plane: ...


# -- what the group calls -------------------------------------------------------------------------


def all_reduce(place: DevicePlace, x: Any, op: ReduceOp, out: Any) -> Call:
    """The reduction of `x`, on every rank."""
    device = _device(x, out)
    if device is None:
        return reductions.all_reduce(place, x, op, out)
    call = Reduction(place, device, "all_reduce", x, op, x if out is None else out)
    host = partial(reductions.all_reduce, place, op=op, out=None)
    return call.call(f"{op}", call.all_reduce, host)


def reduce(place: DevicePlace, x: Any, dst: int, op: ReduceOp, out: Any) -> Call:
    """The reduction of `x`, at `dst`."""
    device = _device(x, out)
    if device is None:
        return reductions.reduce(place, x, dst, op, out)
    check_root(place, dst, "dst")
    here = place.rank == dst
    if out is not None and not here:
        raise ValueError(f"out= is for rank dst={dst}; this is rank {place.rank}")
    into = None if not here else x if out is None else out
    call = Reduction(place, device, "reduce", x, op, into)
    host = partial(reductions.reduce, place, dst=dst, op=op, out=None)
    return call.call(f"{op}, dst={dst}", partial(call.reduce, dst), host)


def scan(place: DevicePlace, x: Any, op: ReduceOp, out: Any, *, exclusive: bool) -> Call:
    """The reduction of `x` of the ranks up to this one (`exclusive`: before this one)."""
    device = _device(x, out)
    if device is None:
        return reductions.scan(place, x, op, out, exclusive=exclusive)
    if op.name == "AVG":
        raise TypeError("AVG has no meaning for scan and exscan: use SUM, and divide")
    name = "exscan" if exclusive else "scan"
    call = Reduction(place, device, name, x, op, x if out is None else out)
    host = partial(reductions.scan, place, op=op, out=None, exclusive=exclusive)
    stop = place.rank if exclusive else place.rank + 1
    return call.call(f"{op}", partial(call.scan, stop), host)


def reduce_scatter(place: DevicePlace, xs: Any, op: ReduceOp, out: Any) -> Call:
    """The reduction of slot `rank` of `xs`: arrays, or one array that is split."""
    device = _device(xs, out)
    if device is None:
        return reductions.reduce_scatter(place, xs, op, out)
    slots = _slots(place, device, xs)
    own = slots[place.rank]
    listed = isinstance(own, (list, tuple))
    if out is None:
        made = [device.empty(*device.describe(item)) for item in (own if listed else [own])]
        out = made if listed else made[0]
    items = [item for slot in slots for item in (slot if listed else [slot])]
    bounds = [0]
    for slot in slots:
        length = sum(_count(device, item) for item in (slot if listed else [slot]))
        bounds.append(bounds[-1] + length)
    if listed or len({device.describe(item)[0] for item in items}) > 1:
        raise TypeError(
            "reduce_scatter of arrays on a device takes one array of one dtype a slot, or one "
            "array to split"
        )
    call = Reduction(place, device, "reduce_scatter", items, op, None)
    call.result = out
    host = partial(reductions.reduce_scatter, place, op=op, out=None)
    return call.call(f"{op}", partial(call.reduce_scatter, bounds, out), host)


# -- arrays ---------------------------------------------------------------------------------------


def _items(x: Any) -> list[Any]:
    return list(x) if isinstance(x, (list, tuple)) else [x]


def _device(x: Any, out: Any) -> Device | None:
    """The device of the arrays, all of which are on one; None where none is on any.

    Raises TypeError.
    """
    found = [(item, device_of(item)) for item in _items(x)]
    if out is not None:
        found += [(item, device_of(item)) for item in _items(out)]
    devices = {id(device): device for _, device in found}
    if not found or set(devices) == {id(None)}:
        return None
    if len(devices) > 1:
        raise TypeError(
            "arrays that are reduced together, and out=, are on one device, or all on the host"
        )
    return found[0][1]


def _count(device: Device, array: Any) -> int:
    return math.prod(device.describe(array)[1])


def _slots(place: Place, device: Device, xs: Any) -> list[Any]:
    if isinstance(xs, (list, tuple)):
        if len(xs) != place.size:
            raise ValueError(f"xs: expected {place.size} slots, one a rank, got {len(xs)}")
        return list(xs)
    name, shape = device.describe(xs)
    if not shape:
        raise ValueError(f"xs: {shown(name, shape)} has no dimension to split")
    bounds = even_bounds(shape[0], place.size)
    return [xs[bounds[rank] : bounds[rank + 1]] for rank in range(place.size)]


def _signature(device: Device, items: Sequence[Any], listed: bool) -> str:
    texts = [shown(*device.describe(item)) for item in items]
    if not listed:
        return texts[0]
    if len(texts) <= _SHOWN:
        return f"[{', '.join(texts)}]"
    digest = hashlib.blake2b(" ".join(texts).encode(), digest_size=6).hexdigest()
    return f"[{len(texts)} arrays, #{digest}]"


class Joined:
    """A user's arrays of one dtype as one flat array on the device, and back.

    Where they are one contiguous array, and the result goes there, that is the array itself; else
    it is a copy, made in stream order.
    """

    def __init__(self, lease: Lease, xs: Sequence[Any], outs: Sequence[Any] | None) -> None:
        device = lease.device
        self._lease = lease
        self._outs = outs or ()
        self._parts: list[Any] = []
        self.name, _ = device.describe(xs[0])
        self.flat: Any = None
        if len(xs) == 1:
            target = xs[0] if outs is None else outs[0]
            self.flat = device.flat(target)
            if self.flat is not None and target is not xs[0]:
                device.copy(lease.stream, self.flat.reshape(device.describe(xs[0])[1]), xs[0])
                lease.busy = True
        if self.flat is None:
            lengths = [_count(device, x) for x in xs]
            self.flat = device.flat(device.empty(self.name, (sum(lengths),)))
            at = 0
            for x, length in zip(xs, lengths, strict=True):
                part = self.flat[at : at + length].reshape(device.describe(x)[1])
                self._parts.append(part)
                device.copy(lease.stream, part, x)
                at += length
            lease.busy = True
        self.length = _count(device, self.flat)
        self.nbytes = self.length * carrier(self.name).itemsize
        lease.kept += [self.flat, *xs, *self._outs]

    def give_back(self) -> None:
        """Copy the result to where it goes, where it is not there already."""
        for part, out in zip(self._parts, self._outs, strict=False):
            self._lease.device.copy(self._lease.stream, out, part)


class Reduction:
    """One reduction: its arrays, and what is done with them on the device.

    `into`: where the result goes, as `x` is; None where it goes nowhere here.
    """

    def __init__(
        self, place: DevicePlace, device: Device, op: str, x: Any, how: ReduceOp, into: Any
    ) -> None:
        self.place = place
        self.device = device
        self.op = op
        self.how = how
        self.x = x
        self.into = into
        self.result = into
        items = _items(x)
        for item in items:
            if how.function is None:
                Kernel.of(how, device.describe(item)[0])  # raises where it has no meaning
        self._check(items)
        self.signature = _signature(device, items, isinstance(x, (list, tuple)))
        self.nbytes = sum(
            _count(device, item) * carrier(device.describe(item)[0]).itemsize for item in items
        )
        self.lease = lease = Lease(place.plane, device)
        self.lease.kept += [x, into]
        self._called = device.event()
        device.current().record(self._called)
        _, self._ready = lease.events[0]
        device.current().record(self._ready)
        self.joined: list[Joined] = []
        names = {device.describe(item)[0] for item in items}
        self._direct = all(device.reduces(how, name) for name in names)
        if self._direct:
            self._join(items)

    def _check(self, items: list[Any]) -> None:
        if self.into is None:
            return
        outs = _items(self.into)
        if len(outs) != len(items):
            raise ValueError(f"out: expected {len(items)} arrays, as x is, got {len(outs)}")
        for item, out in zip(items, outs, strict=True):
            due, got = self.device.describe(item), self.device.describe(out)
            if due != got:
                error = TypeError if due[0] != got[0] else ValueError
                raise error(f"out: is {shown(*got)}, x is {shown(*due)}")
            if not self.device.can_write(out):
                raise ValueError(
                    f"several elements of {shown(*got)} share one place in memory: nothing can be "
                    "written there"
                )

    def _join(self, items: list[Any]) -> None:
        """Have one flat array for each dtype; what is copied for that is copied by now."""
        names = [self.device.describe(item)[0] for item in items]
        outs = None if self.into is None else _items(self.into)
        lease = self.lease
        before = lease.busy
        lease.stream.wait(self._called)
        for name in dict.fromkeys(names):
            chosen = [index for index, other in enumerate(names) if other == name]
            self.joined.append(
                Joined(
                    lease,
                    [items[index] for index in chosen],
                    None if outs is None else [outs[index] for index in chosen],
                )
            )
        if lease.busy and not before:
            lease.stream.record(self._ready)

    def call(
        self,
        arguments: str,
        run: Callable[[list[Found], bool], Part[None]],
        host: Callable[..., Call],
    ) -> Call:
        """The call to launch. `host`: the same for arrays of the host."""
        text = f"{self.op}({arguments}, {self.signature} on {self.device.kind})"

        def program(on_lane: bool) -> Program:
            plane = self.place.plane
            try:
                found = None
                if self._direct:
                    found = yield from self._meet(on_lane)
                if found is None:
                    yield from self._through_host(host, on_lane)
                else:
                    yield from run(found, on_lane)
            except BaseException:
                plane.abandon(self.lease)
                raise
            plane.finished(self.lease)
            if self.result is not None:
                for array in _items(self.result):
                    self.device.written(array)
            return self.result

        return Call(self.op, text, program, self.nbytes)

    # -- parts of programs ------------------------------------------------------------------------

    def _meet(self, on_lane: bool) -> Part[list[Found] | None]:
        """What all ranks have, by rank; None if they cannot read each other's."""
        place, plane, lease = self.place, self.place.plane, self.lease
        own = plane.describe(lease, [joined.flat for joined in self.joined])
        blobs = yield from share(place, own, on_lane)
        if not all(blobs):
            plane.refuse(f"rank {blobs.index(b'')} has nothing on a device that others can read")
            return None
        found: list[Found] = []
        problem = ""
        for rank, blob in enumerate(blobs):
            if rank == place.rank:
                mine = [joined.flat for joined in self.joined]
                found.append(Found([event for _, event in lease.events], mine))
                continue
            try:
                found.append(plane.open(lease, rank, blob))
            except OSError as error:
                problem = f"rank {place.rank}: {error}"
                break
        if any(plane.is_news(blob) for blob in blobs):
            problems = yield from share(place, problem.encode(), on_lane)
            if any(problems):
                plane.refuse(next(text for text in problems if text).decode(errors="replace"))
                return None
            plane.told(own)
        lengths = [joined.length for joined in self.joined]
        for rank, other in enumerate(found):
            if [_count(self.device, array) for array in other.arrays] != lengths:
                raise ProtocolError(f"rank {rank} has arrays of other lengths than it announced")
        lease.kept.append(found)
        return found

    def _wait(self, found: Sequence[Found], which: int) -> None:
        """What is queued from here on comes after that event of others."""
        self.lease.busy = True
        for other in found:
            self.lease.stream.wait(other.events[which])

    def _recorded(self, which: int, on_lane: bool) -> Part[None]:
        """All have recorded that event."""
        self.lease.stream.record(self.lease.events[which][1])
        yield from share(self.place, b"", on_lane)

    def _complete(self, on_lane: bool) -> Part[None]:
        """Wait until all that was queued is done, here and then everywhere.

        A rank that fails says so before it lets go of its arrays. On a lane, it is heard at the end
        of a phase; else by a round more, into which all go with the arrays of all intact.
        """
        yield from self._settle()
        yield from share(self.place, b"", on_lane)
        if not on_lane:
            yield from share(self.place, b"", on_lane)

    def _settle(self) -> Part[None]:
        _, done = self.lease.events[2]
        self.lease.stream.record(done)
        yield Settled(self.place.loop, done)

    def _reduce(self, operands: Sequence[Any], into: Any, nbytes: int, size: int) -> None:
        length = _count(self.device, into)
        if length == 0:
            return
        unit = nbytes // length
        for start, stop in pieces(0, length, max(1, PIECE // unit)):
            cut = [operand[start:stop] for operand in operands]
            self.device.reduce(self.lease.stream, self.how, cut, into[start:stop], size)

    def all_reduce(self, found: list[Found], on_lane: bool) -> Part[None]:
        rank, size = self.place.rank, self.place.size
        bounds = [even_bounds(joined.length, size) for joined in self.joined]
        self._wait(found, 0)
        for index, joined in enumerate(self.joined):
            start, stop = bounds[index][rank : rank + 2]
            operands = [other.arrays[index][start:stop] for other in found]
            unit = carrier(joined.name).itemsize
            self._reduce(operands, joined.flat[start:stop], (stop - start) * unit, size)
        yield from self._recorded(1, on_lane)
        self._wait(found, 1)
        for index, joined in enumerate(self.joined):
            for peer, other in enumerate(found):
                start, stop = bounds[index][peer : peer + 2]
                if peer != rank and stop > start:
                    self.device.copy(
                        self.lease.stream, joined.flat[start:stop], other.arrays[index][start:stop]
                    )
            joined.give_back()
        yield from self._complete(on_lane)

    def reduce(self, dst: int, found: list[Found], on_lane: bool) -> Part[None]:
        if self.place.rank == dst:
            self._wait(found, 0)
            for index, joined in enumerate(self.joined):
                operands = [other.arrays[index] for other in found]
                self._reduce(operands, joined.flat, joined.nbytes, self.place.size)
                joined.give_back()
        yield from self._complete(on_lane)

    def scan(self, stop: int, found: list[Found], on_lane: bool) -> Part[None]:
        self._wait(found, 0)
        results = []
        for index, joined in enumerate(self.joined):
            result = self.device.flat(self.device.empty(joined.name, (joined.length,)))
            results.append(result)
            self.lease.kept.append(result)
            operands = [other.arrays[index] for other in found[: max(1, stop)]]
            if stop == 0:
                operands = [joined.flat]
            if stop:
                self._reduce(operands, result, joined.nbytes, 1)
        yield from self._complete(on_lane)
        if stop:
            for joined, result in zip(self.joined, results, strict=True):
                self.device.copy(self.lease.stream, joined.flat, result)
        for joined in self.joined:
            joined.give_back()
        yield from self._settle()

    def reduce_scatter(
        self, bounds: list[int], out: Any, found: list[Found], on_lane: bool
    ) -> Part[None]:
        rank = self.place.rank
        (joined,) = self.joined
        start, stop = bounds[rank : rank + 2]
        into = self.device.flat(out)
        staged = None
        if into is None:
            staged = self.device.empty(*self.device.describe(out))
            into = self.device.flat(staged)
        self.lease.kept += [out, into]
        self._wait(found, 0)
        operands = [other.arrays[0][start:stop] for other in found]
        unit = carrier(joined.name).itemsize
        self._reduce(operands, into, (stop - start) * unit, self.place.size)
        if staged is not None:
            self.device.copy(self.lease.stream, out, staged)
        yield from self._complete(on_lane)

    # -- where devices are not seen ---------------------------------------------------------------

    def _through_host(self, host: Callable[..., Call], on_lane: bool) -> Part[None]:
        """The operation on copies in memory of the host."""
        device, lease = self.device, self.lease
        lease.stream.wait(self._called)
        lease.busy = True

        def staged(array: Any) -> Any:
            copy = device.host(*device.describe(array))
            device.copy(lease.stream, copy, array)
            lease.kept.append(copy)
            return copy

        xs = self.x
        copies = [staged(item) for item in xs] if isinstance(xs, (list, tuple)) else staged(xs)
        yield from self._settle()
        result = yield from host(copies).start(on_lane)
        if self.result is not None:
            for target, copy in zip(_items(self.result), _items(result), strict=True):
                device.copy(lease.stream, target, copy)
            lease.kept.append(result)
        yield from self._settle()
