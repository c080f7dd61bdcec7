"""Arrays on devices in the values that collectives move.

All ranks run one program, whatever they give: who has such arrays says in its offers where they
lie, and all agree to read them there, or that they go through the host. What is read of others is
complete everywhere before anybody has its array back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgpack

from aiodist.buffers.encoding import Encoded, encode
from aiodist.buffers.values import Incoming, parse
from aiodist.devices import device_of
from aiodist.devices.memory import DeviceWork, Found, Settled
from aiodist.devices.values import Places, Sources, device_among
from aiodist.engine.operation import Program, Start
from aiodist.errors import ProtocolError
from aiodist.phases.base import Part, Place, share

NONE, TOLD, NEWS, HOST = range(4)
"""What a rank has on devices: nothing; what all have opened; what they have to open; what goes
through the host."""


class Offer(NamedTuple):
    """What one rank has for another: `meta` (or its length, where large), and maybe the data, or
    the place where it lies in memory that all ranks see (0: elsewhere).

    `apart`: so many bytes more are on the rank's device: its arrays there from number `first` on.
    """

    meta: bytes | int
    nbytes: int
    data: bytes | None
    place: int = 0
    apart: int = 0
    first: int = 0


class DeviceTransfer:
    """One collective's arrays on devices, as seen by one rank. Made when it is called."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._device_memory = place.device_memory
        self._sources = Sources(place.device_memory)
        self._given: list[tuple[Encoded, int]] = []
        self._found: dict[int, Found] = {}
        self._places: list[Places] = []
        self._words: Mapping[int, bytes] = {}
        self._direct = False

    @property
    def direct(self) -> bool:
        """Whether arrays are read where they lie. The same on all ranks."""
        return self._direct

    @property
    def _device_work(self) -> DeviceWork | None:
        return self._sources.device_work

    # -- when it is called ------------------------------------------------------------------------

    def encode(self, value: object) -> Encoded:
        """A value of this rank. Raises as `aiodist.buffers.encoding.encode`."""
        first = len(self._sources.flats)
        encoded = encode(value, allow_pickle=self._place.allow_pickle, foreign=self._sources)
        if encoded.gaps:
            self._given.append((encoded, first))
        return encoded

    def aim(self, *outs: Any) -> None:
        """Where values go: what is queued on the current stream by now comes first."""
        device = device_among(*outs)
        if device is not None:
            self._sources.work_on(device)

    def guard(
        self, program: Callable[[bool], Program], failed: Callable[[], None] | None = None
    ) -> Start:
        """The program, which may fail at any time: then `failed` is called."""

        def guarded(on_lane: bool) -> Program:
            try:
                result = yield from program(on_lane)
            except BaseException:
                self._sources.abandon()
                if failed is not None:
                    failed()
                raise
            self._sources.finished()
            return result

        return guarded

    # -- offers -----------------------------------------------------------------------------------

    def pack(self, offers: Sequence[Offer], room: int) -> bytes:
        """The blob of a rank that makes these offers, in whose order its values were encoded."""
        fields: list[Any] = list(offers)
        if self._given:
            words = self._sources.words()
            if len(words) > room:
                words = b""
            way = HOST if not words else NEWS if self._device_memory.is_news(words) else TOLD
            fields.append([way, words])
        blob: bytes = msgpack.packb(fields)
        return blob

    def first(self, value: Encoded) -> int:
        """The number of the first array of a value on the device, among all of this rank."""
        return next((first for encoded, first in self._given if encoded is value), 0)

    def agree(
        self, blobs: Mapping[int, bytes | memoryview], count: int, on_lane: bool
    ) -> Part[dict[int, list[Offer]]]:
        """What is offered by whom: `count` offers each, and how their arrays travel that are on
        devices. The same on all ranks."""
        offers: dict[int, list[Offer]] = {}
        ways: dict[int, tuple[int, bytes]] = {}
        for src, blob in blobs.items():
            offers[src], ways[src] = unpack(blob, count, src)
        if not any(way for way, _ in ways.values()):
            return offers
        self._direct = all(way != HOST for way, _ in ways.values())
        if self._direct:
            words = {src: words for src, (way, words) in ways.items() if way}
            news = any(way == NEWS for way, _ in ways.values())
            self._direct = yield from self._open(words, news, on_lane)
        if not self._direct:
            yield from self.to_host()
        return {src: [self._settled(offer) for offer in row] for src, row in offers.items()}

    def _open(self, words: Mapping[int, bytes], news: bool, on_lane: bool) -> Part[bool]:
        """Have the arrays of all others, or refuse, all together. What is no news is open."""
        place, device_memory = self._place, self._device_memory
        self._words = words
        problem = device_memory.problem if news else ""
        for src, theirs in words.items():
            if problem:
                break
            if src == place.rank:
                self._found[src] = self._sources.own()
                continue
            try:
                self._found[src] = device_memory.open(src, theirs)
            except OSError as error:
                if not news:
                    raise
                problem = f"rank {place.rank}: {error}"
        if not news:
            return True
        problems = yield from share(place, problem.encode(), on_lane)
        if any(problems):
            device_memory.refuse(next(text for text in problems if text).decode(errors="replace"))
            return False
        if place.rank in words:
            device_memory.told(words[place.rank])
        return True

    def _settled(self, offer: Offer) -> Offer:
        """An offer, now that it is known how arrays travel."""
        if not offer.apart:
            return offer
        if self._direct:
            return offer if offer.nbytes else offer._replace(data=b"")
        nbytes = offer.nbytes + offer.apart
        return offer._replace(nbytes=nbytes, data=None, place=0, apart=0)

    def to_host(self) -> Part[None]:
        """Have the own arrays on the host."""
        device_work = self._device_work
        if device_work is None or not self._given:
            return
        copies = self._sources.to_host()
        yield Settled(self._place.loop, device_work.done())
        for encoded, first in self._given:
            encoded.fill(copies[first : first + len(encoded.gaps)])

    # -- values that come -------------------------------------------------------------------------

    def places(self, src: int, first: int, value: Incoming) -> Places | None:
        """Where those arrays of a value of `src` go that are on a device on either side."""
        if self._device_work is None and not value.has_foreign:
            return None
        found = None
        if self._direct and value.has_foreign:
            count = sum(spec.kind == "device" for spec in value.specs)
            events, arrays = self._found[src]
            found = Found(events, arrays[first : first + count])
            if len(found.arrays) != count:
                raise ProtocolError(f"rank {src} shows fewer arrays than it offers")
        places = Places(self._device_memory, self._sources, found)
        self._places.append(places)
        return places

    def mapped(self, src: int, owner: object) -> list[Any]:
        """The arrays of `src`, where they lie; they and their views keep `owner` alive. They are
        ready when the operation is done."""
        (ready, *_), arrays = self._device_memory.open(src, self._words[src], owner)
        for array in arrays[:1]:
            device = device_of(array)
            assert device is not None
            device_work = self._sources.work_on(device)
            device_work.mark.busy = True
            device_work.stream.wait(ready)
        return arrays

    def own(self, encoded: Encoded, out: Any) -> Incoming:
        """This rank's own part of a result: never the same memory as what was given."""
        value = parse(encoded.meta, allow_pickle=self._place.allow_pickle)
        value.allocate(out, foreign=self.places(self._place.rank, self.first(encoded), value))
        for target, source in zip(value.buffers, encoded.buffers, strict=True):
            target[:] = source
        return value

    def read(self) -> None:
        """Queue what is read of others."""
        for places in self._places:
            places.queue(reads=True)

    def land(self, on_lane: bool) -> Part[None]:
        """All bytes are here that come to the host: wait for the device. Where ranks have read of
        each other, all wait for all.

        A rank that fails says so before it lets go of its arrays. On a lane, it is heard at the end
        of a phase; else by a round more, into which all go with the arrays of all intact.
        """
        for places in self._places:
            places.queue(reads=False)
        if self._device_work is not None and self._device_work.mark.busy:
            yield Settled(self._place.loop, self._device_work.done(), last=not self._direct)
        if self._direct:
            yield from share(self._place, b"", on_lane)
            if not on_lane:
                yield from share(self._place, b"", on_lane)


def unpack(blob: bytes | memoryview, count: int, src: int) -> tuple[list[Offer], tuple[int, bytes]]:
    """The offers in the blob of `src`, and what it says of devices. Raises ProtocolError."""
    way, words = NONE, b""
    try:
        fields = msgpack.unpackb(blob)
        if len(fields) == count + 1:
            way, words = fields.pop()
        offers = [Offer(*each) for each in fields]
    except Exception as error:
        raise ProtocolError(f"malformed offers of rank {src}: {error!r}") from None
    if (
        len(offers) != count
        or not all(_sound(offer) for offer in offers)
        or way not in (NONE, TOLD, NEWS, HOST)
        or type(words) is not bytes
    ):
        raise ProtocolError(f"malformed offers of rank {src}")
    return offers, (way, words)


def _sound(offer: Offer) -> bool:
    nbytes, place, apart, first = offer.nbytes, offer.place, offer.apart, offer.first
    return (
        type(nbytes) is type(place) is type(apart) is type(first) is int
        and min(nbytes, place, apart, first) >= 0
        and (type(offer.meta) is bytes or (type(offer.meta) is int and offer.meta > 0))
        and (offer.data is None or (type(offer.data) is bytes and len(offer.data) == offer.nbytes))
    )
