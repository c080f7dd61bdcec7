"""A version, sent from one participant to another in a group of two.

The receiver (rank 1) asks for a version and says how much of it it has. The sender (rank 0) sends
part after part, each as soon as it has it itself. Before some parts it sends the number of the part
behind them. On one host, memory is mapped, and only the numbers are sent. If no message comes for
`patience` seconds, the sender counts as gone. A sender that has to wait itself says so in time.
Then its receivers wait as long again, so that they do not all leave when one source at the front is
gone.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

from aiodist.channels.holding import ComingVersion, Holding, in_thread
from aiodist.channels.manifest import Manifest
from aiodist.channels.meetings import GIVES, TAKES
from aiodist.channels.memory import VersionMemory
from aiodist.channels.pace import ParticipantPace
from aiodist.channels.window import NO_DEADLINE, FlightWindow, MessagesInFlight, give_up
from aiodist.errors import ProtocolError
from aiodist.group import Group
from aiodist.operations.messages import send_steady
from aiodist.transports.handover import take_segment
from aiodist.work import Work

WAIT = -1
"""Sent instead of the number of a part: it takes longer."""

MOST_WAITS = 16
"""How often a receiver is told to wait, without data, before it looks for another source. It is
told twice in `patience`."""

KNOWN = 1 / 4
"""Of `patience`: for so long a participant waits for its own program to begin with a version, or to
go on with it, before it refuses that version to others."""

NOT_HERE = -2
"""Sent instead of the number of a part: the source does not have that version, or no longer."""

PARTS = "parts"
"""The tag of messages, such as numbers of parts."""

DATA = "data"
"""The tag of the parts."""

AT_ONCE = 8
"""The most parts after one number. The sender has to send all of them, even if it gives the version
up meanwhile. Of lent memory, one part follows each number, because it may be taken back."""

CODES_AHEAD = 128
"""Messages of codes that are sent before the first of them has been taken."""

PIECE = 60 << 10
"""The most bytes of a message of codes. Each larger message would take a round trip."""

END = None
"""Sent instead of codes: no more codes come."""


class NotThereError(Exception):
    """The source does not have the version."""


class UnwantedError(Exception):
    """No call waits for the version any more."""


class RestRequest(NamedTuple):
    """A request for all parts of a version after the first `has`.

    `maps`: map memory, if possible. `base`: the id of a version from which differences can be
    applied; empty: no differences.
    """

    version: int
    has: int
    maps: bool
    base: bytes


class Parcels(NamedTuple):
    """A request for parcels of the slices named `wants`; without parcels: for the manifests.

    `identity`: of the releases that the receiver takes (`directory.identity`). `maps`: map memory,
    if possible. `who`: the id of the receiver. `base`: the id of a version from which differences
    can be applied; empty: no differences.
    """

    version: int
    identity: bytes
    wants: str
    parcels: list[Any]
    maps: bool
    who: str
    base: bytes


async def asked(pair: Group, patience: float) -> RestRequest | Parcels:
    """Receive a request. Raises ProtocolError; AiodistError when the receiver has left."""
    match await pair.recv(src=TAKES, tag=PARTS, timeout=patience):
        case (int(version), int(has), bool(maps), bytes(base)) if has >= 0:
            return RestRequest(version, has, maps, base)
        case (
            int(version),
            bytes(identity),
            str(wants),
            list(parcels),
            bool(maps),
            str(who),
            bytes(base),
        ):
            return Parcels(version, identity, wants, parcels, maps, who, base)
        case nonsense:
            raise ProtocolError(f"a participant asked for {nonsense!r}")


async def refuse(pair: Group) -> None:
    """Say that the requested data is not here."""
    await pair.send(NOT_HERE, TAKES, tag=PARTS)


async def give(pair: Group, holding: Holding, has: int, patience: float, *, maps: bool) -> None:
    """Send the parts from `has` on; returns when all have been taken."""
    window = FlightWindow(pair, holding.release.chunk)
    sending = MessagesInFlight(window.messages, patience)
    # gets no message, but fails when the receiver leaves
    leaves = pair.recv(src=TAKES, tag="leaves")
    news = News(pair, holding, leaves, patience)
    told = has  # the end of the parts whose numbers were sent
    try:
        while maps and not holding.has_lasting_memory:
            if not await news.more():
                return
        if maps:
            assert holding.memory is not None
            words = holding.memory.words()
            await pair.send(words, TAKES, tag=PARTS)
            maps, has = words is not None, 0 if words else has
            told = has
        if not maps:
            holding.given[news] = has
        while has < holding.release.parts:
            if has == told:
                if has >= holding.filled or holding.is_abandoned:
                    if not await news.more():
                        # The receiver takes these before it hears of it. If it is too slow, it
                        # learns from the end of this group.
                        async with asyncio.timeout(patience):
                            await sending.until_none()
                        return
                    continue
                assert holding.memory is not None
                most = AT_ONCE if holding.memory.is_steady else 1
                told = min(holding.filled, has + most)
                sending.add(pair.send(told, TAKES, tag=PARTS, timeout=NO_DEADLINE))
            if not maps:
                assert holding.memory is not None
                # Lent memory may be written after it was taken back, so it is not steady.
                send = partial(send_steady, pair) if holding.memory.is_steady else pair.send
                works = [
                    send(data, TAKES, tag=DATA, timeout=NO_DEADLINE)
                    for data in window.slices(holding.part(has))
                ]
                for work in works:
                    sending.add(work)
                works[-1].add_done_callback(partial(news.given, has + 1))
            has += 1
            await sending.until_few()
        await sending.until_none()
    finally:
        sending.close()
        news.close()


class News:
    """Watches a version that is given to another participant while it comes."""

    def __init__(
        self, pair: Group, coming: ComingVersion, leaves: Work[None], patience: float
    ) -> None:
        self._pair = pair
        self._coming = coming
        self._leaves = leaves
        self._patience = patience
        self._stirs = coming.stirs
        self._starved = coming.starved

    def given(self, parts: int, sent: Work[None]) -> None:
        """Note that the receiver has so many parts, if the message was sent."""
        if self in self._coming.given and not (sent.cancelled() or sent.exception()):
            self._coming.given[self] = parts
            self._coming.tell()

    async def more(self) -> bool:
        """Wait for a change, and tell the receiver if it takes longer.

        Returns False if no more will come, after the receiver was told. Raises AiodistError if the
        receiver has gone.
        """
        coming = self._coming
        is_idle = not (coming.fed or coming.is_whole)
        is_starved = coming.starved != self._starved or (is_idle and coming.is_starved)
        if coming.is_abandoned or is_starved:
            await refuse(self._pair)
            return False
        news = asyncio.ensure_future(coming.news())
        try:
            done, _ = await asyncio.wait(
                {news, self._leaves},
                timeout=self._patience * (KNOWN if is_idle else 1 / 2),
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            news.cancel()
        if self._leaves.done():
            self._leaves.result()
        if is_idle and not done and not coming.fed:
            await refuse(self._pair)
            return False
        if coming.stirs != self._stirs or (not done and coming.fed):
            self._stirs = coming.stirs
            await self._pair.send(WAIT, TAKES, tag=PARTS)
        return True

    def close(self) -> None:
        """End it, because no more is sent."""
        give_up([self._leaves])
        self._coming.given.pop(self, None)
        self._coming.tell()


async def ask(pair: Group, holding: Holding, *, maps: bool) -> None:
    await pair.send((holding.version, holding.filled, maps, b""), GIVES, tag=PARTS)


async def take(
    pair: Group, holding: Holding, patience: float, pace: ParticipantPace, *, maps: bool
) -> None:
    """Receive what was asked for.

    Raises AiodistError if the sender fails or is silent, ProtocolError if its data is damaged,
    OSError if its memory cannot be mapped, NotThereError.
    """
    release = holding.release
    words = await word(pair, holding, patience) if maps else None
    if words is not None:
        async with asyncio.timeout(patience):
            segment = await take_segment(words, release.nbytes, keep=True)
        holding.take(VersionMemory.of(segment))
    elif maps:  # memory that was lent to the sender
        await holding.make_own(shared=True)
    maps = words is not None
    window = FlightWindow(pair, release.chunk)
    coming: deque[list[Work[Any]]] = deque()  # for each part after those that are here
    end = holding.filled  # the end of the parts that are waited for
    landed = holding.filled  # the end of the parts that have come
    told = holding.filled  # the end of the parts that will come, by the numbers that have come
    checking: asyncio.Task[None] | None = None  # of those

    async def check() -> None:
        """Check all parts that have come together, because a thread may wait for its turn on a busy
        machine."""
        while holding.filled < landed:
            numbers = range(holding.filled, landed)
            await in_thread(partial(holding.check_all, numbers))
            for _ in numbers:
                holding.fill()

    try:
        for number in range(holding.filled, release.parts):
            if not holding.wanted:
                raise UnwantedError
            if not maps:
                # Data in flight would be sent again anyhow, so take it when it comes.
                while end < min(number + 1 + window.ahead, release.parts):
                    if end == number:
                        await pace.keep(end - window.ahead)
                    elif pace.holds(end - window.ahead):
                        break
                    coming.append(_received(pair, window, holding.part(end)))
                    end += 1
            if number == told:
                told = await word(pair, holding, patience)
                if type(told) is not int or not number < told <= release.parts:
                    raise ProtocolError(f"{told!r} came instead of a number after part {number}")
            if maps:
                if number == 0:
                    holding.check(0)
                holding.fill()
                continue
            for work in coming[0]:
                await work.wait(patience)
            coming.popleft()
            if checking is not None and (checking.done() or number - holding.filled > window.ahead):
                await checking
            landed = number + 1
            if checking is None or checking.done():
                checking = asyncio.ensure_future(check())
        if checking is not None:
            await checking
    finally:
        give_up(chain.from_iterable(coming))
        if checking is not None:
            await asyncio.gather(checking, return_exceptions=True)


def _received(pair: Group, window: FlightWindow, part: memoryview) -> list[Work[Any]]:
    return [
        pair.recv(src=GIVES, tag=DATA, out=data, timeout=NO_DEADLINE)
        for data in window.slices(part)
    ]


async def take_offered(holding: Holding, patience: float) -> None:
    """Map the publisher's memory on this host, without meeting it.

    Raises OSError if the memory is gone, ProtocolError.
    """
    release = holding.release
    async with asyncio.timeout(patience):
        words = release.offer, release.key
        segment = await take_segment(words, release.nbytes, keep=True)
    try:
        await in_thread(partial(Manifest.read, segment.memory, release))
    except BaseException:
        segment.close()
        raise
    holding.take(VersionMemory.of(segment), release.parts)


def pieces(codes: bytes) -> Iterator[bytes]:
    """The messages for some codes, after their size was sent."""
    for at in range(0, len(codes), PIECE):
        yield codes[at : at + PIECE]


async def take_codes(pair: Group, coming: ComingVersion, nbytes: int, patience: float) -> bytes:
    """Receive codes of so many bytes. Raises what `take` does."""
    codes = bytearray()
    while len(codes) < nbytes:
        piece = await word(pair, coming, patience)
        if not isinstance(piece, bytes) or not piece:
            raise ProtocolError(f"{piece!r} came instead of a piece of a code")
        codes += piece
    return bytes(codes)


async def word(pair: Group, coming: ComingVersion, patience: float) -> Any:
    """Receive the next message that is not WAIT."""
    for _ in range(MOST_WAITS):
        said = await pair.recv(src=GIVES, tag=PARTS, timeout=patience)
        if type(said) is not int or said >= 0:
            return said
        if said != WAIT:
            raise NotThereError
        if not coming.wanted:
            raise UnwantedError
        coming.stir()
    # The source may be waiting for us, because a restarted coordinator has forgotten the order.
    raise NotThereError
