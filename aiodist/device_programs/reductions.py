"""Reductions of arrays on devices: in the order of the ranks, on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from aiodist.buffers.arrays import shown
from aiodist.buffers.dtypes import carrier
from aiodist.buffers.kernels import Kernel
from aiodist.buffers.reductions import signature_of_list
from aiodist.collectives import reductions
from aiodist.collectives.operators import operator
from aiodist.device_programs import staging
from aiodist.device_programs.calls import DeviceCall, count, items_of
from aiodist.devices import device_of
from aiodist.devices import memory as device_memory
from aiodist.devices.base import Device
from aiodist.devices.memory import READY, RECORDED, DeviceWork, Found
from aiodist.devices.values import device_among, leaves_of, several
from aiodist.errors import ProtocolError
from aiodist.phases.base import Call, Part, Place, check_root
from aiodist.schedules.cuts import even_bounds, pieces
from aiodist.types import Op, ReduceOp

PIECE = 8 << 20
"""Bytes that are reduced at once where there are results in between: these stay in cache."""


# -- what the group calls -------------------------------------------------------------------------


def all_reduce(place: Place, x: Any, op: Op, out: Any) -> Call:
    """The reduction of `x`, on every rank."""
    op = operator(op)
    device = _device_of_all(x, out)
    if device is None:
        return reductions.all_reduce(place, x, op, out)
    call = Reduction(place, device, "all_reduce", x, op, x if out is None else out)
    host = partial(reductions.all_reduce, place, op=op, out=None)
    return call.start(f"{op}", call.all_reduce, host)


def reduce(place: Place, x: Any, dst: int, op: Op, out: Any) -> Call:
    """The reduction of `x`, at `dst`."""
    op = operator(op)
    device = _device_of_all(x, out)
    if device is None:
        return reductions.reduce(place, x, dst, op, out)
    check_root(place, dst, "dst")
    here = place.rank == dst
    if out is not None and not here:
        raise ValueError(f"out= is for rank dst={dst}; this is rank {place.rank}")
    into = None if not here else x if out is None else out
    call = Reduction(place, device, "reduce", x, op, into)
    host = partial(reductions.reduce, place, dst=dst, op=op, out=None)
    return call.start(f"{op}, dst={dst}", partial(call.reduce, dst), host)


def scan(place: Place, x: Any, op: Op, out: Any) -> Call:
    """The reduction of `x` of the ranks up to this one."""
    return _scan(place, x, operator(op), out, exclusive=False)


def exscan(place: Place, x: Any, op: Op, out: Any) -> Call:
    """The reduction of `x` of the ranks before this one."""
    return _scan(place, x, operator(op), out, exclusive=True)


def _scan(place: Place, x: Any, op: ReduceOp, out: Any, *, exclusive: bool) -> Call:
    device = _device_of_all(x, out)
    if device is None:
        return reductions.scan(place, x, op, out, exclusive=exclusive)
    if op.name == "AVG":
        raise TypeError("AVG has no meaning for scan and exscan: use SUM, and divide")
    name = "exscan" if exclusive else "scan"
    call = Reduction(place, device, name, x, op, x if out is None else out)
    host = partial(reductions.scan, place, op=op, out=None, exclusive=exclusive)
    stop = place.rank if exclusive else place.rank + 1
    return call.start(f"{op}", partial(call.scan, stop), host)


def reduce_scatter(place: Place, xs: Any, op: Op, out: Any) -> Call:
    """The reduction of slot `rank` of `xs`: arrays, or one array that is split."""
    op = operator(op)
    device = _device_of_all(xs, out)
    if device is None:
        return reductions.reduce_scatter(place, xs, op, out)
    slots = _slots(place, device, xs)
    own = slots[place.rank]
    listed = isinstance(own, (list, tuple))
    if out is None:
        stream = place.device_memory.stream(device)
        made = [device.empty(stream, *device.describe(item)) for item in (own if listed else [own])]
        out = made if listed else made[0]
    items = [item for slot in slots for item in (slot if listed else [slot])]
    bounds = [0]
    for slot in slots:
        length = sum(count(device, item) for item in (slot if listed else [slot]))
        bounds.append(bounds[-1] + length)
    if listed or len({device.describe(item)[0] for item in items}) > 1:
        raise TypeError(
            "reduce_scatter of arrays on a device takes one array of one dtype a slot, or one "
            "array to split"
        )
    call = Reduction(place, device, "reduce_scatter", items, op, None)
    call.result = out
    host = partial(reductions.reduce_scatter, place, op=op, out=None)
    call.signature = f"slots {call.signature}"
    return call.start(f"{op}", partial(call.reduce_scatter, bounds, out), host)


# -- arrays ---------------------------------------------------------------------------------------


def _device_of_all(x: Any, out: Any) -> Device | None:
    """The device that all arrays are on; None where they are on the host. Raises TypeError where
    they are not together."""
    device = device_among(x, out)
    if device is not None and any(device_of(leaf) is None for leaf in leaves_of([x, out])):
        raise several()
    return device


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


class Joined:
    """A user's arrays of one dtype as one flat array on the device, and back.

    Where they are one contiguous array, and the result goes there, that is the array itself; else
    it is a copy, made in stream order.
    """

    def __init__(
        self, device_work: DeviceWork, xs: Sequence[Any], outs: Sequence[Any] | None
    ) -> None:
        device = device_work.device
        self._device_work = device_work
        self._outs = outs or ()
        self._parts: list[Any] = []
        self.name, _ = device.describe(xs[0])
        self.flat: Any = None
        if len(xs) == 1:
            target = xs[0] if outs is None else outs[0]
            self.flat = device.flat(target)
            if self.flat is not None and target is not xs[0]:
                device.copy(device_work.stream, self.flat.reshape(device.describe(xs[0])[1]), xs[0])
                device_work.mark.busy = True
        if self.flat is None:
            lengths = [count(device, x) for x in xs]
            self.flat = device.flat(device.empty(device_work.stream, self.name, (sum(lengths),)))
            at = 0
            for x, length in zip(xs, lengths, strict=True):
                part = self.flat[at : at + length].reshape(device.describe(x)[1])
                self._parts.append(part)
                device.copy(device_work.stream, part, x)
                at += length
            device_work.mark.busy = True
        self.length = count(device, self.flat)
        self.nbytes = self.length * carrier(self.name).itemsize
        device_work.kept += [self.flat, *xs, *self._outs]

    def give_back(self) -> None:
        """Copy the result to where it goes, where it is not there already."""
        for part, out in zip(self._parts, self._outs, strict=False):
            self._device_work.device.copy(self._device_work.stream, out, part)


class Reduction(DeviceCall):
    """One reduction: its arrays, and what is done with them on the device.

    `into`: where the result goes, as `x` is; None where it goes nowhere here.
    """

    def __init__(
        self, place: Place, device: Device, op: str, x: Any, how: ReduceOp, into: Any
    ) -> None:
        super().__init__(place, device, op)
        self.how = how
        self.x = x
        self.into = self.result = into
        items = items_of(x)
        described = [device.describe(item) for item in items]
        for name, _ in described:
            if how.function is None:
                Kernel.of(how, name)  # raises where it has no meaning
        self._check(items)
        texts = [shown(*each) for each in described]
        self.signature = texts[0]
        if isinstance(x, (list, tuple)):
            elements = sum(count(device, item) for item in items)
            self.signature = signature_of_list(texts, elements)
        self.nbytes = sum(
            count(device, item) * carrier(name).itemsize
            for item, (name, _) in zip(items, described, strict=True)
        )
        self.device_work.kept += [x, into]
        # The same on all ranks; whether they see each other's devices they have to agree on.
        self.direct = all(device.reduces(how, name) for name, _ in described)
        self.joined: list[Joined] = []
        if self.direct and not place.device_memory.problem:
            self._join(items)

    def _check(self, items: list[Any]) -> None:
        if self.into is None:
            return
        outs = items_of(self.into)
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
        outs = None if self.into is None else items_of(self.into)
        self.device_work.follow()
        for name in dict.fromkeys(names):
            chosen = [index for index, other in enumerate(names) if other == name]
            self.joined.append(
                Joined(
                    self.device_work,
                    [items[index] for index in chosen],
                    None if outs is None else [outs[index] for index in chosen],
                )
            )
        self.shown = [joined.flat for joined in self.joined]
        if self.device_work.mark.busy:
            self.device_work.shown_later()

    def start(
        self,
        arguments: str,
        run: Callable[[list[Found], bool], Part[None]],
        host: Callable[..., Call],
    ) -> Call:
        """The call to launch. `host`: the same for arrays of the host."""

        def checked(found: list[Found], on_lane: bool) -> Part[None]:
            lengths = [joined.length for joined in self.joined]
            for rank, other in enumerate(found):
                if [count(self.device, array) for array in other.arrays] != lengths:
                    raise ProtocolError(
                        f"rank {rank} has arrays of other lengths than it announced"
                    )
            yield from run(found, on_lane)

        def through_host(on_lane: bool) -> Part[None]:
            elementwise = self.how.function is None or self.how.elementwise
            if self.nbytes > device_memory.SECTION and elementwise and self.op != "reduce_scatter":
                targets = None if self.result is None else items_of(self.result)
                yield from staging.in_sections(
                    self.device_work, self.place.loop, items_of(self.x), targets, host, on_lane
                )
            else:
                yield from whole(on_lane)

        def whole(on_lane: bool) -> Part[None]:
            self.device_work.follow()
            copies = self.to_host(self.x)
            yield from self.settle()
            result = yield from host(copies).start(on_lane)
            if self.result is not None:
                yield from self.from_host(items_of(self.result), items_of(result))

        text = f"{self.op}({arguments}, {self.signature})"
        return self.call(text, checked, through_host, whole)

    # -- parts of programs ------------------------------------------------------------------------

    def _reduce(self, operands: Sequence[Any], into: Any, nbytes: int, size: int) -> None:
        length = count(self.device, into)
        if length == 0:
            return
        unit = nbytes // length
        piece = length if len(operands) <= 2 else max(1, PIECE // unit)
        for start, stop in pieces(0, length, piece):
            cut = [operand[start:stop] for operand in operands]
            self.device.reduce(self.device_work.stream, self.how, cut, into[start:stop], size)

    def all_reduce(self, found: list[Found], on_lane: bool) -> Part[None]:
        rank, size = self.place.rank, self.place.size
        bounds = [even_bounds(joined.length, size) for joined in self.joined]
        self.wait(found, READY)
        for index, joined in enumerate(self.joined):
            start, stop = bounds[index][rank : rank + 2]
            operands = [other.arrays[index][start:stop] for other in found]
            unit = carrier(joined.name).itemsize
            self._reduce(operands, joined.flat[start:stop], (stop - start) * unit, size)
        yield from self.recorded(on_lane)
        self.wait(found, RECORDED)
        for index, joined in enumerate(self.joined):
            for peer, other in enumerate(found):
                start, stop = bounds[index][peer : peer + 2]
                if peer != rank and stop > start:
                    self.device.copy(
                        self.device_work.stream,
                        joined.flat[start:stop],
                        other.arrays[index][start:stop],
                    )
            joined.give_back()
        yield from self.complete(on_lane)

    def reduce(self, dst: int, found: list[Found], on_lane: bool) -> Part[None]:
        if self.place.rank == dst:
            self.wait(found, READY)
            for index, joined in enumerate(self.joined):
                operands = [other.arrays[index] for other in found]
                self._reduce(operands, joined.flat, joined.nbytes, self.place.size)
                joined.give_back()
        yield from self.complete(on_lane)

    def scan(self, stop: int, found: list[Found], on_lane: bool) -> Part[None]:
        self.wait(found, READY)
        results = []
        for index, joined in enumerate(self.joined):
            result = self.device.flat(
                self.device.empty(self.device_work.stream, joined.name, (joined.length,))
            )
            results.append(result)
            self.device_work.kept.append(result)
            operands = [other.arrays[index] for other in found[: max(1, stop)]]
            if stop == 0:
                operands = [joined.flat]
            if stop:
                self._reduce(operands, result, joined.nbytes, 1)
        yield from self.complete(on_lane)
        if stop:
            for joined, result in zip(self.joined, results, strict=True):
                self.device.copy(self.device_work.stream, joined.flat, result)
        for joined in self.joined:
            joined.give_back()
        yield from self.settle(last=True)

    def reduce_scatter(
        self, bounds: list[int], out: Any, found: list[Found], on_lane: bool
    ) -> Part[None]:
        rank = self.place.rank
        (joined,) = self.joined
        start, stop = bounds[rank : rank + 2]
        into = self.device.flat(out)
        staged = None
        if into is None:
            staged = self.device.empty(self.device_work.stream, *self.device.describe(out))
            into = self.device.flat(staged)
        self.device_work.kept += [out, into]
        self.wait(found, READY)
        operands = [other.arrays[0][start:stop] for other in found]
        unit = carrier(joined.name).itemsize
        self._reduce(operands, into, (stop - start) * unit, self.place.size)
        if staged is not None:
            self.device.copy(self.device_work.stream, out, staged)
        yield from self.complete(on_lane)
