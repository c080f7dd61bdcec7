"""One reduction of arrays on a device: the checks of its call, and the choice of its way.

A roll call finds whether all ranks' arrays are on devices (`aiodist.engine.roll_call`). If they
are, and the ranks can read each other's (`aiodist.collectives.device_transfer`), the reduction runs
on the devices. Else the hosts reduce copies. If all arrays are on devices, this goes by sections,
so that copies and transfers overlap. If some are on the host, it goes as a whole, because their
plans expect that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from aiodist.buffers import overlaps
from aiodist.buffers.arrays import shown
from aiodist.buffers.dtypes import carrier
from aiodist.buffers.kernels import Kernel
from aiodist.buffers.reductions import signature_of_list
from aiodist.collectives.device_transfer import THROUGH_HOST, DeviceTransfer
from aiodist.devices import device_of, sections
from aiodist.devices.base import Device
from aiodist.devices.memory import MOST_VAIN
from aiodist.devices.values import check_place
from aiodist.devices.waiting import Settled
from aiodist.devices.work import DeviceWork
from aiodist.engine.operation import Program
from aiodist.engine.roll_call import RollCall
from aiodist.errors import ProtocolError
from aiodist.phases.base import Call, Part, Place, share
from aiodist.shared_memory.board import ON_DEVICE
from aiodist.types import ReduceOp
from aiodist.wire.frames import MAX_PAYLOAD

MIXED = "tensors on devices go through host memory in reductions, because %s"
"""What the log says."""


class Joined:
    """A user's arrays of one dtype as one flat array on the device, and back.

    One contiguous array that also takes the result is used itself, unless it `is_met` by other
    inputs. Else a copy is made in stream order.
    """

    def __init__(
        self,
        work: DeviceWork,
        name: str,
        xs: Sequence[Any],
        outs: Sequence[Any],
        *,
        is_met: bool = False,
    ) -> None:
        device = work.device
        self._work = work
        self._outs = outs  # where the result goes
        self._parts: list[Any] = []  # parts of `flat` that arrays were copied to
        self.name = name  # the dtype
        self.itemsize = carrier(name).itemsize  # bytes of an element
        self.flat: Any = None  # all elements; also the place for the result
        if len(xs) == 1 and not is_met:
            target = outs[0] if outs else xs[0]
            # Use the array itself if it takes the result and is contiguous (else `flat` returns
            # None). A rank that only gives has no `outs`, and its input is only read.
            self.flat = device.flat(target)
            if self.flat is not None and target is not xs[0]:
                self._copy(self.flat.reshape(device.describe(xs[0])[1]), xs[0])
        if self.flat is None:
            lengths = [count(device, x) for x in xs]
            # Copy all arrays into one, so that one reduction is enough and the others open one
            # array.
            self.flat = device.flat(device.empty(work.stream, name, (sum(lengths),)))
            at = 0
            for x, length in zip(xs, lengths, strict=True):
                part = self.flat[at : at + length].reshape(device.describe(x)[1])
                self._parts.append(part)
                self._copy(part, x)
                at += length
        self.length = count(device, self.flat)  # elements of all arrays
        work.kept += [self.flat, *xs, *outs]

    def _copy(self, into: Any, x: Any) -> None:
        self._work.device.copy(self._work.stream, into, x)
        self._work.mark.busy = True

    def give_back(self) -> None:
        """Copy the result to its places, if it is not there already."""
        for part, out in zip(self._parts, self._outs, strict=False):
            self._copy(out, part)


class Reduction:
    """One reduction of `x` on `device`, called `name`."""

    def __init__(
        self,
        place: Place,
        device: Device,
        name: str,
        x: Any,
        op: ReduceOp,
        result: Any,
        what: str = "arrays",
    ) -> None:
        """`what`: what `x` has, if it is a list."""
        items, outs = arrays_of(x, "x"), [] if result is None else arrays_of(result, "out")
        described = [device.describe(item) for item in items]
        if op.function is None:
            for dtype, _ in described:
                Kernel.of(op, dtype)  # raises if the operator has no meaning for the dtype
        if result is not None:
            if (len(outs), is_list(result)) != (len(items), is_list(x)):
                form = f"a list of {len(items)} arrays" if is_list(x) else "one array"
                got = f"{len(outs)} items" if is_list(result) else f"a {type(result).__name__}"
                raise ValueError(f"out: expected {form}, as x is, got {got}")
            for due, out in zip(described, outs, strict=True):
                check_place(device, out, "x", due, "x" if result is x else "out")
            if any(overlaps.meetings([device.layout(out) for out in outs])):
                raise ValueError(
                    "two of the arrays that the result goes to share memory: give each array once"
                )
        self.place = place
        self.device = device
        self.name = name
        self.x = x  # an array, or a list of them
        self.op = op
        # where the result goes, in the form of `x`; None if it goes nowhere here
        self.result = result
        self.transfer = DeviceTransfer(place)  # how the ranks read each other's arrays
        # This collective's work on the device.
        self.work = self.transfer.sources.work_on(device)
        self.work.kept += [x, result]
        lengths = [math.prod(shape) for _, shape in described]
        texts = [shown(*each) for each in described]
        self.signature = (  # what all ranks must agree on
            signature_of_list(texts, sum(lengths), what) if is_list(x) else texts[0]
        )
        sizes = [carrier(dtype).itemsize for dtype, _ in described]
        # Bytes of the arrays of this rank.
        self.nbytes = sum(n * size for n, size in zip(lengths, sizes, strict=True))
        # The same on all ranks. Whether they can read each other's devices is agreed on later.
        self._on_device = all(device.reduces(op, dtype) for dtype, _ in described)
        # The arrays of each dtype, if they may be reduced on the device. They are joined in the
        # program, because an operation that ends before it starts must not write `out`.
        self.joined: list[Joined] = []
        self._items, self._outs = items, outs
        self._dtypes = [dtype for dtype, _ in described]

    def _join(self) -> None:
        """Make one flat array for each dtype, and queue the copies for that."""
        dtypes, items, outs = self._dtypes, self._items, self._outs
        self.work.follow()
        met = self._met(items)
        for dtype in dict.fromkeys(dtypes):
            chosen = [index for index, other in enumerate(dtypes) if other == dtype]
            xs, into = [items[i] for i in chosen], [outs[i] for i in chosen if outs]
            is_met = chosen[0] in met
            self.joined.append(Joined(self.work, dtype, xs, into, is_met=is_met))
        self.transfer.sources.flats = [joined.flat for joined in self.joined]
        if self.work.mark.busy:
            self.work.shown_later()

    def start(
        self,
        arguments: str,
        run: Callable[[Reduction, bool], Part[None]],
        host: Callable[..., Call],
    ) -> Call:
        """The call to launch. `run`: the reduction on the device; `host`: the same collective on
        the host."""

        # All ranks must decide alike, because each answer is a branch in what they send. Are all
        # arrays on devices (the roll call tells)? Does each device have the operator (by dtype)?
        # Can each read all others (`_meet`)? Only then the reduction runs on the devices.
        def program(on_lane: bool) -> Program:
            roll = RollCall(self.place)
            yield roll
            if roll.all_on_devices and self._on_device:
                yield from self._meet(on_lane)
            if not roll.all_on_devices:
                self.place.device_memory.say_once(MIXED, "other ranks give tensors of the host")
                yield from self._whole(host, on_lane)
            elif self.transfer.direct:
                yield from run(self, on_lane)
            elif self._has_sections:
                yield from self._in_sections(host, on_lane)
            else:
                yield from self._whole(host, on_lane)
            for array in [] if self.result is None else items_of(self.result):
                self.device.written(array)
            return self.result

        text = f"{self.name}({arguments}, {self.signature})"
        start = self.transfer.guard(program)
        return Call(self.name, text, start, self.nbytes, ON_DEVICE, settles=True)

    def _meet(self, on_lane: bool) -> Part[None]:
        memory, own = self.place.device_memory, b""
        if not memory.problem and memory.vain < MOST_VAIN:
            self._join()
            own = self.transfer.words(MAX_PAYLOAD)
            memory.vain = memory.vain + 1 if self.transfer.sources.hidden else 0
        blobs = yield from share(self.place, own or THROUGH_HOST, on_lane)
        yield from self.transfer.agree(dict(enumerate(blobs)), on_lane)
        if not self.transfer.direct:
            return
        lengths = [joined.length for joined in self.joined]
        for rank, found in self.transfer.found.items():
            if [count(self.device, array) for array in found.arrays] != lengths:
                raise ProtocolError(f"rank {rank} has arrays of other lengths than it announced")

    # Through the host.

    def _whole(self, host: Callable[..., Call], on_lane: bool) -> Part[None]:
        work = self.work
        work.begin()
        copies: list[Any] = []
        work.kept.append(copies)
        copies.extend(map(work.to_host, self._items))
        yield self.settled()
        result = yield from host(copies if is_list(self.x) else copies[0]).start(on_lane)
        if self.result is not None:
            work.kept.append(result)
            for target, copy in zip(items_of(self.result), items_of(result), strict=True):
                self.device.copy(work.stream, target, copy)
            yield self.settled(alone=True)

    @property
    def _has_sections(self) -> bool:
        """Whether it can go by sections, and is large enough. The same on all ranks."""
        elementwise = self.op.function is None or self.op.elementwise
        return elementwise and self.nbytes > sections.SECTION and self.name != "reduce_scatter"

    def _in_sections(self, host: Callable[..., Call], on_lane: bool) -> Part[None]:
        work = self.work
        outs = [] if self.result is None else items_of(self.result)
        given = [work.flat(x) for x in self._items]
        met = self._met(given)  # section n is copied back before n + 2 is fetched
        into = [flat_place(work, out, is_met=index in met) for index, out in enumerate(outs)]
        # That section n + 2 is complete is known when n + 4 is.
        fetched = sections.Sections(work, given, 4)
        section, after = fetched.fetch(), fetched.fetch()
        while section is not None:
            yield Settled(self.place.loop, section.there)
            result = yield from host(section.copies).start(on_lane)
            if into:
                for (index, start, stop), part in zip(section.cuts, result, strict=True):
                    self.device.copy(work.stream, into[index][start:stop], part)
            section, after = after, fetched.fetch()
        for out, flat in zip(outs, into, strict=True):
            put_back(work, out, flat)
        yield self.settled(alone=True)

    def _met(self, given: Sequence[Any]) -> set[int]:
        """Return which outs share memory with `given` inputs, except with their own as a whole."""
        layout, outs = self.device.layout, self._outs
        pairs = overlaps.meetings([layout(out) for out in outs], [layout(x) for x in given])
        return {
            index
            for index, other in pairs
            if other != len(outs) + index or not _is_in(self.work, given[index], outs[index])
        }

    def settled(self, *, alone: bool = False) -> Settled:
        """A pause until all queued work is done here; see `Pause.alone`."""
        return Settled(self.place.loop, self.work.done(), alone=alone)


def is_list(x: Any) -> bool:
    return isinstance(x, (list, tuple))


def items_of(x: Any) -> list[Any]:
    return list(x) if is_list(x) else [x]


def arrays_of(x: Any, where: str) -> list[Any]:
    """Return the arrays on devices of a list, or the only one. Raises TypeError for others."""
    items = items_of(x)
    for index, item in enumerate(items):
        if device_of(item) is None:
            wanted = "an array" if is_list(x) else "an array or a flat list of arrays"
            place = f"{where}[{index}]" if is_list(x) else where
            raise TypeError(f"{place}: expected {wanted}, got {type(item).__name__}")
    return items


def count(device: Device, array: Any) -> int:
    return math.prod(device.describe(array)[1])


def flat_place(work: DeviceWork, target: Any, *, is_met: bool = False) -> Any:
    """Flat memory for what goes to `target`: its own if it is contiguous, unless `is_met` says that
    something else is read there meanwhile."""
    flat = None if is_met else work.device.flat(target)
    if flat is None:
        flat = work.device.flat(work.device.empty(work.stream, *work.device.describe(target)))
    work.kept += [target, flat]
    return flat


def put_back(work: DeviceWork, target: Any, flat: Any) -> None:
    """Copy from the `flat_place` to `target`, if they differ."""
    if not _is_in(work, flat, target):
        shape = work.device.describe(target)[1]
        work.device.copy(work.stream, target, flat.reshape(shape))


def _is_in(work: DeviceWork, x: Any, target: Any) -> bool:
    """Whether `x` is the memory of `target`, and both are contiguous."""
    flats = [work.device.flat(x), work.device.flat(target)]
    return None not in flats and overlaps.same(*map(work.device.layout, flats))
