"""How the ranks of a collective come to read each other's devices: the one handshake, of reductions
as of collectives that move values.

**What is told.** Each rank that gives arrays on a device tells all others, in one exchange of small
words, where they lie: for each array the number of its allocation and an offset, and the numbers of
two events. The handles, with which a process opens what has such a number, are told until all have
it open, and then no more (`aiodist.devices.handles`): a program that reduces the same tensors again
and again opens nothing but the first time. A rank that cannot tell says `THROUGH_HOST`: its memory
has no handle, or there are too many arrays, or it has found before that its device is out of reach.

**Direct or through the host** is decided once, before anything is moved, by what all have heard, so
all decide alike (`DeviceTransfer.agree`). If anybody says THROUGH_HOST, all arrays go by way of the
host. If there is nothing new, all have it open and the answer is known: yes. If there is, each rank
opens what it has not, and all share what could not be opened: one word more, as often as a new
allocation shows up. If anything could not be, the answer is no, for this operation and for all that
come, and each rank says so once in the log::

    rank 0   array at ──┐ all    opens ──┐ all,      reads ─┐ all       reads are complete ──┐ all
    rank 1   array at ──┤ hear   opens ──┤ if there  reads ─┤ (halves)  reads are complete ──┤ hear
    rank 2   host     ──┘ all    opens ──┘ is news   reads ─┘           reads are complete ──┘ all

**Who waits for whom.** Events order what the devices do; words order the events: a rank has its
stream wait for an event of another rank only when that one has said that it recorded it. READY is
recorded when the collective is called. Whoever gives no array on a device has none to wait for, and
shares all words.

**When memory may be let go of** (`DeviceTransfer.land`). A rank may be read until it has heard from
all others that their reads are complete, and only then is an array its owner's again. A rank that
fails says so before it lets go of its arrays. On a lane, that is heard at the end of a phase; over
links it takes a round more, into which all go with the arrays of all intact: a rank that completes
knows that nobody had given up when its reads were complete. Whoever does give up keeps its arrays
until all others have said that what they had queued is complete (`aiodist.devices.memory`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from aiodist.buffers.encoding import Encoded, encode
from aiodist.buffers.values import Incoming, parse
from aiodist.devices import device_of
from aiodist.devices.handles import NEWS, Found
from aiodist.devices.values import Places, Sources, device_among
from aiodist.devices.waiting import Settled
from aiodist.engine.operation import Program, Start
from aiodist.errors import ProtocolError
from aiodist.phases.base import Part, Place, share

IN_CACHE: Final = 512 * 1024
"""Bytes that are copied at once: of long copies the C library has the target go past the caches,
which takes longer here, a tenth for 32 MiB."""

THROUGH_HOST: Final = b"-"
"""The words of a rank whose arrays go through the host, and so those of all others do."""


def copy(target: memoryview, source: memoryview) -> None:
    """Copy as many bytes, of any number."""
    for start in range(0, target.nbytes, IN_CACHE):
        target[start : start + IN_CACHE] = source[start : start + IN_CACHE]


class DeviceTransfer:
    """One collective's arrays on devices, as seen by one rank. Made when it is called."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._device_memory = place.device_memory  # what this rank can read of the others' devices
        self.sources = Sources(place.device_memory)  # what this rank gives
        # The values with arrays on the device, and the number of the first one of each.
        self._given: list[tuple[Encoded, int]] = []
        self.direct = False  # whether arrays are read where they lie; the same on all ranks
        self.found: dict[int, Found] = {}  # then the arrays of each rank that gives any
        self._words: Mapping[int, bytes] = {}  # by which they were found
        self._places: list[Places] = []  # where what comes goes

    # -- when it is called ------------------------------------------------------------------------

    def encode(self, value: object) -> Encoded:
        """A value of this rank. Raises as `aiodist.buffers.encoding.encode`."""
        first = len(self.sources.flats)
        encoded = encode(value, allow_pickle=self._place.allow_pickle, foreign=self.sources)
        if encoded.gaps:
            self._given.append((encoded, first))
        return encoded

    def first(self, value: Encoded) -> int:
        """The number of the first array of a value on the device, among all of this rank."""
        return next((first for encoded, first in self._given if encoded is value), 0)

    def aim(self, *outs: object) -> None:
        """Where values go: what is queued on the current stream by now comes first."""
        device = device_among(*outs)
        if device is not None:
            self.sources.work_on(device)

    def guard(
        self, program: Callable[[bool], Program], failed: Callable[[], None] | None = None
    ) -> Start:
        """The program, which may fail at any time: then `failed` is called."""

        def guarded(on_lane: bool) -> Program:
            try:
                result = yield from program(on_lane)
            # Also GeneratorExit, by which a program ends whose operation was given up elsewhere.
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
        """What all others need to read the arrays that this rank gives, in so many bytes; b"" where
        it gives none."""
        if not self.sources.flats:
            return b""
        words = self.sources.words()
        return words if 0 < len(words) <= room else THROUGH_HOST

    def agree(self, words: Mapping[int, bytes], on_lane: bool) -> Part[None]:
        """Decide how arrays travel, alike on all ranks, by their `words` (b"": gives none)."""
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
            raise ProtocolError(f"what all had open cannot be had: {problem}")
        self.direct = True

    def _open(self) -> str:
        """Have the arrays of all ranks. Returns what is in the way."""
        rank = self._place.rank
        try:
            for src, theirs in self._words.items():
                mine = src == rank
                self.found[src] = (
                    self.sources.own() if mine else self._device_memory.open(src, theirs)
                )
        except OSError as error:
            return f"rank {rank}: {error}"
        if self.sources.device_work is not None:
            # What was opened stays open until the device is done with what reads it.
            self.sources.device_work.kept.append(self.found)
        return ""

    def to_host(self) -> Part[None]:
        """Have the own arrays on the host."""
        device_work = self.sources.device_work
        if device_work is None or not self._given:
            return
        copies = self.sources.to_host()
        yield Settled(self._place.loop, device_work.done())
        for encoded, first in self._given:
            encoded.fill(copies[first : first + len(encoded.gaps)])

    # -- values that come -------------------------------------------------------------------------

    def places(self, src: int, first: int, value: Incoming) -> Places | None:
        """Where those arrays of a value of `src` go that are on a device on either side."""
        if self.sources.device_work is None and not value.has_foreign:
            return None
        found = None
        if self.direct and value.has_foreign:
            count = sum(spec.kind == "device" for spec in value.specs)
            events, arrays = self.found[src]
            found = Found(events, arrays[first : first + count])
            if len(found.arrays) != count:
                raise ProtocolError(f"rank {src} shows fewer arrays than it offers")
        places = Places(self._device_memory, self.sources, found)
        self._places.append(places)
        return places

    def mapped(self, src: int, owner: object) -> list[object]:
        """The arrays of `src`, where they lie; they and their views keep `owner` alive. They are
        ready when the operation is done."""
        (ready, *_), arrays = self._device_memory.open(src, self._words[src], owner)
        for array in arrays[:1]:
            device = device_of(array)
            assert device is not None
            device_work = self.sources.work_on(device)
            device_work.mark.busy = True
            device_work.stream.wait(ready)
        return arrays

    def own(self, encoded: Encoded, out: object) -> Incoming:
        """This rank's own part of a result: never the same memory as what was given."""
        value = parse(encoded.meta, allow_pickle=self._place.allow_pickle)
        value.allocate(out, foreign=self.places(self._place.rank, self.first(encoded), value))
        for target, source in zip(value.buffers, encoded.buffers, strict=True):
            copy(target, source)
        return value

    def read(self) -> None:
        """Queue what is read of others."""
        for places in self._places:
            places.queue(reads=True)

    def land(self, on_lane: bool) -> Part[None]:
        """All bytes are here that come to the host: wait for the device. Where ranks have read of
        each other, all wait for all."""
        for places in self._places:
            places.queue(reads=False)
        device_work = self.sources.device_work
        if device_work is not None and device_work.mark.busy:
            yield Settled(self._place.loop, device_work.done(), last=not self.direct)
        if self.direct:
            # Two rounds over links. The first says that reads are complete. All go into the second
            # with their arrays intact, so whoever comes out of it knows that nobody had given up
            # while it read.
            yield from share(self._place, b"", on_lane)
            if not on_lane:
                yield from share(self._place, b"", on_lane)
