"""What all collectives of arrays on devices share.

First it is found whether all ranks have theirs on devices (`RollCall`). If so, all share where they
lie, and agree to read each other's (`_meet`). Then each queues
what it reads, behind the events of those that it reads from, and shares that it has recorded its
own. In the end all wait until the device has come to their last event, and share that: only then is
an array its owner's again. Where the ranks do not see each other's devices, arrays go through the
host: all take the same way, for they decide by what all have heard.

Ranks that give arrays of the host take no part in this: they run the collective as ever. Then those
with arrays on devices run the same, on copies in memory of the host.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from aiodist.devices.base import Device
from aiodist.devices.memory import EVENTS, RECORDED, DeviceWork, Found, Settled
from aiodist.engine.operation import Program
from aiodist.engine.roll_call import RollCall
from aiodist.errors import ProtocolError
from aiodist.phases.base import Call, Part, Place, share
from aiodist.shared_memory.board import ON_DEVICE


def items_of(x: Any) -> list[Any]:
    return list(x) if isinstance(x, (list, tuple)) else [x]


def count(device: Device, array: Any) -> int:
    """Its elements."""
    return math.prod(device.describe(array)[1])


class DeviceCall:
    """One collective on a device. `result`: what it gives; `direct`: whether the device can do it.

    It is made when the collective is called: what is queued on the current stream by then is what
    the operation comes after.
    """

    def __init__(self, place: Place, device: Device, op: str) -> None:
        self.place = place
        self.device = device
        self.op = op
        self.nbytes = 0
        self.direct = True
        self.result: Any = None
        self.shown: list[Any] = []
        """Flat arrays that the others may read."""
        self.device_work = DeviceWork(place.device_memory, device)

    def call(
        self,
        text: str,
        run: Callable[[list[Found], bool], Part[None]],
        through_host: Callable[[bool], Part[None]],
        as_on_host: Callable[[bool], Part[None]],
    ) -> Call:
        """The call to launch, which ranks with arrays of the host name `text`: `run` where the
        ranks read each other's devices; `as_on_host` where some give arrays of the host."""

        def program(on_lane: bool) -> Program:
            device_memory = self.place.device_memory
            roll = RollCall(self.place)
            try:
                yield roll
                if not roll.all_on_devices:
                    device_memory.mixed()
                    yield from as_on_host(on_lane)
                elif found := (yield from self._meet(on_lane)) if self.direct else None:
                    yield from run(found, on_lane)
                else:
                    yield from through_host(on_lane)
            except BaseException:
                device_memory.abandon(self.device_work)
                raise
            device_memory.finished(self.device_work)
            for array in items_of(self.result):
                if array is not None:
                    self.device.written(array)
            return self.result

        return Call(self.op, text, program, self.nbytes, ON_DEVICE)

    def _meet(self, on_lane: bool) -> Part[list[Found] | None]:
        """What all ranks have, by rank; None if they cannot read each other's."""
        place, device_memory, device_work = self.place, self.place.device_memory, self.device_work
        own = b""
        if not device_memory.problem:
            try:
                own = device_memory.describe(device_work, self.shown)
            except OSError as error:
                device_memory.refuse(f"rank {place.rank}: {error}")
        blobs = yield from share(place, own, on_lane)
        if not all(blobs):
            device_memory.refuse(
                f"rank {blobs.index(b'')} has nothing on a device that others can read"
            )
            return None
        found: list[Found] = []
        problem = ""
        for rank, blob in enumerate(blobs):
            if rank == place.rank:
                events = [event for _, event in device_work.events]
                found.append(Found(events, self.shown))
                continue
            try:
                found.append(device_memory.open(rank, blob))
            except OSError as error:
                problem = f"rank {place.rank}: {error}"
                break
        if any(device_memory.is_news(blob) for blob in blobs):
            problems = yield from share(place, problem.encode(), on_lane)
            if any(problems):
                device_memory.refuse(
                    next(text for text in problems if text).decode(errors="replace")
                )
                return None
            device_memory.told(own)
        if any(len(other.events) != EVENTS for other in found):
            raise ProtocolError(f"{EVENTS} events of each rank were due")
        device_work.kept.append(found)
        return found

    def wait(self, found: Sequence[Found], which: int) -> None:
        """What is queued from here on comes after that event of others."""
        self.device_work.mark.busy = True
        for other in found:
            self.device_work.stream.wait(other.events[which])

    def recorded(self, on_lane: bool) -> Part[None]:
        """All have queued the first half."""
        self.device_work.stream.record(self.device_work.events[RECORDED][1])
        yield from share(self.place, b"", on_lane)

    def complete(self, on_lane: bool) -> Part[None]:
        """Wait until all that was queued is done, here and then everywhere.

        A rank that fails says so before it lets go of its arrays. On a lane, it is heard at the end
        of a phase; else by a round more, into which all go with the arrays of all intact.
        """
        yield from self.settle()
        yield from share(self.place, b"", on_lane)
        if not on_lane:
            yield from share(self.place, b"", on_lane)

    def settle(self, *, last: bool = False) -> Part[None]:
        """Wait until all that was queued is done here; see `Pause.last`."""
        yield Settled(self.place.loop, self.device_work.done(), last=last)

    # -- where devices are not seen ---------------------------------------------------------------

    def to_host(self, x: Any) -> Any:
        """Queue copies in memory of the host: of an array, or a flat list of them."""
        if isinstance(x, (list, tuple)):
            return [self.to_host(item) for item in x]
        copy = self.device.host(*self.device.describe(x))
        self.device.copy(self.device_work.stream, copy, x)
        self.device_work.kept.append(copy)
        self.device_work.mark.busy = True
        return copy

    def from_host(self, targets: Sequence[Any], copies: Sequence[Any]) -> Part[None]:
        """Copy results to where they go."""
        for target, copy in zip(targets, copies, strict=True):
            self.device.copy(self.device_work.stream, target, copy)
        self.device_work.kept += copies
        yield from self.settle(last=True)
