"""How the ranks of a collective read arrays on each other's devices.

Reductions and collectives that move values use the same handshake.

**First words.** If a rank gives arrays on a device, it tells all others their locations, in one
exchange of small messages. For each array it sends the number of its allocation and an offset. It
also sends the numbers of two events. A process needs a handle to open an allocation. Handles are
sent until all ranks have it open, and never again (`aiodist.devices.handles`). So a program that
reduces the same tensors many times opens them only the first time. A rank says `THROUGH_HOST` if
its memory has no handle, if there are too many arrays, or if its device was out of reach before.

**Direct or through the host.** `DeviceTransfer.agree` decides this once, before any data is moved.
All ranks decide alike, because all have heard the same. If one rank says THROUGH_HOST, all arrays
go through the host. If no allocation is new, all ranks have everything open, so they read directly.
Otherwise each rank opens what is new, and all share what they could not open. This costs one more
exchange for each new allocation. If one rank could not open something, this operation and all later
ones go through the host, and each rank logs that once::

    rank 0   array at ──┐ all    opens ──┐ all,      reads ─┐ all       reads are complete ──┐ all
    rank 1   array at ──┤ hear   opens ──┤ if there  reads ─┤ (halves)  reads are complete ──┤ hear
    rank 2   host     ──┘ all    opens ──┘ is news   reads ─┘           reads are complete ──┘ all

**Order.** Events order the work of the devices, and messages order the events. A rank makes its
stream wait for an event of another rank only after that rank has said that it recorded the event.
READY is recorded when the collective is called. A rank that gives no array on a device has no event
for the others, but takes part in all exchanges.

**When memory may be reused** (`DeviceTransfer.land`). A rank may be read until all others have said
that their reads are complete. Only then does an array belong to its owner again. A rank that fails
says so before it releases its arrays. On a lane the others hear this at the end of a phase. Over
links it takes one more round, which all ranks enter with their arrays intact. So a rank that
completes knows that no rank had given up before its reads were complete. A rank that gives up keeps
its arrays until all others have said that their queued work is complete
(`aiodist.devices.memory`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from aiodist.buffers.encoding import Encoded, encode
from aiodist.buffers.places import overlapping
from aiodist.buffers.values import Incoming, parse
from aiodist.devices import device_of
from aiodist.devices.handles import NEWS, Found
from aiodist.devices.values import DevicePlaces, Sources, device_among
from aiodist.devices.waiting import Settled
from aiodist.engine.operation import Program, Start
from aiodist.errors import ProtocolError
from aiodist.phases.base import Part, Place, share

IN_CACHE: Final = 512 * 1024
"""The bytes of one copy. Longer copies of the C library write past the caches. That takes longer
here, by a tenth for 32 MiB."""

THROUGH_HOST: Final = b"-"
"""The words of a rank whose arrays go through the host. Those of all others then do as well."""


def copy(target: memoryview, source: memoryview) -> None:
    """Copy `source` to `target`, of the same size, in pieces that stay in the caches."""
    for start in range(0, target.nbytes, IN_CACHE):
        target[start : start + IN_CACHE] = source[start : start + IN_CACHE]


class DeviceTransfer:
    """The arrays on devices in one collective, as one rank sees them. Made when it is called."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._device_memory = place.device_memory  # what this rank can read on others' devices
        self.sources = Sources(place.device_memory)  # what this rank gives
        # Values with arrays on the device, each with the number of its first array there.
        self._given: list[tuple[Encoded, int]] = []
        self.direct = False  # whether arrays are read in place; the same on all ranks
        self.found: dict[int, Found] = {}  # if so, the arrays of each rank that gives any
        self._words: Mapping[int, bytes] = {}  # the words by which they were found
        self._places: list[DevicePlaces] = []  # the places of incoming values

    # -- when it is called ------------------------------------------------------------------------

    def encode(self, value: object) -> Encoded:
        """Encode a value of this rank. Raises as `aiodist.buffers.encoding.encode` does."""
        first = len(self.sources.flats)
        encoded = encode(value, allow_pickle=self._place.allow_pickle, foreign=self.sources)
        if encoded.gaps:
            self._given.append((encoded, first))
        return encoded

    def first(self, value: Encoded) -> int:
        """Return the number of the value's first array among all that this rank has on a device."""
        return next((first for encoded, first in self._given if encoded is value), 0)

    def aim(self, *outs: object) -> None:
        """Note the targets of values, because the work queued on their stream comes first."""
        device = device_among(*outs)
        if device is not None:
            self.sources.work_on(device)

    def keep_apart(
        self,
        values: Sequence[Encoded],
        out: object,
        slots: Callable[[], Mapping[int, Any]],
        own: int = 0,
        at: int = 0,
    ) -> bool:
        """Copy those arrays of `values` that overlap with `out`: see `places.overlapping`.

        Returns whether there were any.
        """
        flats, given = self.sources.flats, []
        for value in values:
            first = self.first(value)
            given.append(value.filled(flats[first : first + len(value.gaps)]))
        found = overlapping(given, out, slots, own, at, values[own].meta)
        if not found:
            return False
        numbers = set(map(id, found))
        for value in values:
            value.buffers = [
                memoryview(bytes(view)) if id(view) in numbers else view for view in value.buffers
            ]
        self.sources.copy(found)
        return True

    def guard(
        self, program: Callable[[bool], Program], failed: Callable[[], None] | None = None
    ) -> Start:
        """Wrap `program`, so that its arrays are released at its end. Call `failed` if it fails."""

        def guarded(on_lane: bool) -> Program:
            try:
                result = yield from program(on_lane)
            # This includes GeneratorExit, which ends a program that was given up elsewhere.
            except BaseException:
                self.sources.abandon()
                if failed is not None:
                    failed()
                raise
            self.sources.finished()
            return result

        return guarded

    # -- the handshake ----------------------------------------------------------------------------

    def words(self, room: int) -> bytes:
        """Return what the others need to read this rank's arrays, in at most `room` bytes.

        Returns b"" if this rank gives no arrays on a device.
        """
        if not self.sources.flats:
            return b""
        words = self.sources.words()
        return words if 0 < len(words) <= room else THROUGH_HOST

    def agree(self, words: Mapping[int, bytes], on_lane: bool) -> Part[None]:
        """Decide how arrays travel by the `words` of all ranks. All decide alike.

        The words of a rank are b"" if it gives no arrays on a device.
        """
        place, device_memory = self._place, self._device_memory
        self._words = {src: theirs for src, theirs in words.items() if theirs}
        if THROUGH_HOST in self._words.values():
            return
        news = any(theirs.startswith(NEWS) for theirs in self._words.values())
        problem = self._open()
        if news:
            problem = device_memory.problem or problem
            problems = yield from share(place, problem.encode(), on_lane)
            if any(problems):
                first = next(text for text in problems if text)
                device_memory.refuse(first.decode(errors="replace"))
                return
            if place.rank in self._words:
                device_memory.handles.told(self._words[place.rank])
        elif problem:
            raise ProtocolError(f"what all ranks had open cannot be opened now: {problem}")
        self.direct = True

    def _open(self) -> str:
        """Open the arrays of all ranks. Return the reason if that fails, else an empty string."""
        rank, work = self._place.rank, self.sources.device_work
        device = None if work is None else work.device
        try:
            for src, theirs in self._words.items():
                mine = src == rank
                self.found[src] = (
                    self.sources.own() if mine else self._device_memory.open(src, theirs, device)
                )
        except OSError as error:
            return f"rank {rank}: {error}"
        if work is not None:
            # Keep the arrays open until the device is done with the work that reads them.
            work.kept.append(self.found)
        return ""

    def to_host(self) -> Part[None]:
        """Copy this rank's arrays from the device to the host."""
        device_work = self.sources.device_work
        if device_work is None or not self._given:
            return
        copies = self.sources.to_host()
        yield Settled(self._place.loop, device_work.done(), alone=True)
        for encoded, first in self._given:
            encoded.fill(copies[first : first + len(encoded.gaps)])

    # -- values that come -------------------------------------------------------------------------

    def places(self, src: int, first: int, value: Incoming) -> DevicePlaces | None:
        """Return the places for arrays of a value of `src` that are on a device on either side.

        None if there are none. Raises ProtocolError.
        """
        if self.sources.device_work is None and not value.has_foreign:
            return None
        found = None
        if self.direct and value.has_foreign:
            count = sum(spec.kind == "device" for spec in value.specs)
            events, arrays = self.found[src]
            found = Found(events, arrays[first : first + count])
            if len(found.arrays) != count:
                raise ProtocolError(f"rank {src} shows fewer arrays than it offers")
        places = DevicePlaces(self._device_memory, self.sources, found)
        self._places.append(places)
        return places

    def mapped(self, src: int, owner: object) -> list[object]:
        """Map the arrays of `src`. They and their views keep `owner` alive.

        They are ready when the operation is done.
        """
        device = next(map(device_of, self.found[src].arrays), None)
        (ready, *_), arrays = self._device_memory.open(src, self._words[src], device, owner)
        if device is not None:
            device_work = self.sources.work_on(device)
            device_work.mark.busy = True
            device_work.stream.wait(ready)
        return arrays

    def own(self, encoded: Encoded, out: object) -> Incoming:
        """Return this rank's own part of a result, which never shares memory with its input."""
        value = parse(encoded.meta, allow_pickle=self._place.allow_pickle)
        value.allocate(out, foreign=self.places(self._place.rank, self.first(encoded), value))
        for target, source in zip(value.buffers, encoded.buffers, strict=True):
            copy(target, source)
        return value

    def read(self) -> None:
        """Queue the reads from other ranks."""
        for places in self._places:
            places.queue(reads=True)

    def land(self, on_lane: bool) -> Part[None]:
        """Wait for the device after all bytes for the host have arrived.

        If ranks have read each other's arrays, wait for all ranks.
        """
        for places in self._places:
            places.queue(reads=False)
        device_work = self.sources.device_work
        if device_work is not None and device_work.mark.busy:
            yield Settled(self._place.loop, device_work.done(), alone=not self.direct)
        if self.direct:
            # Over links this takes two rounds. The first says that reads are complete. All ranks
            # enter the second with their arrays intact. So a rank that completes it knows that no
            # rank had given up while it read.
            yield from share(self._place, b"", on_lane)
            if not on_lane:
                yield from share(self._place, b"", on_lane)
