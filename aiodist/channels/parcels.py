"""Pieces of a version, sent from one participant to another in a group of two.

The receiver asks for pieces in parcels. The sender sends each parcel as soon as it has all of it,
in any order: its number and its CRC-32, then its bytes. On one host the sender's memory is mapped,
and only the numbers are sent. As with whole versions (`aiodist.channels.transfers`), a sender that
has to wait itself says so.

If the receiver has an older version, it first asks for the differences of its parcels from that
one. The sender encodes them if it has both versions, and stops if they do not pay. Then the
receiver asks for the rest whole, and for parcels whose difference was damaged.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from aiodist.buffers.arrays import Flat
from aiodist.channels import lots, slices
from aiodist.channels.changes import SHARE, Differences
from aiodist.channels.differences import OVERHEAD
from aiodist.channels.holding import ComingVersion, in_thread
from aiodist.channels.lots import Lot
from aiodist.channels.meetings import GIVES, TAKES
from aiodist.channels.memory import VersionMemory
from aiodist.channels.slices import CodedParcel, Parcel, Piece, Source
from aiodist.channels.tasks import OneBeside
from aiodist.channels.transfers import (
    CODES_AHEAD,
    END,
    PARTS,
    News,
    NotThereError,
    Parcels,
    UnwantedError,
    pieces,
    take_codes,
    word,
)
from aiodist.channels.window import NO_DEADLINE, MessagesInFlight
from aiodist.errors import ProtocolError
from aiodist.group import Group
from aiodist.transports.handover import take_segment

AHEAD = 4
"""Messages that are sent before the first of them has been taken."""


async def give(
    pair: Group,
    coming: ComingVersion,
    source: Source,
    parcels: Sequence[Parcel],
    patience: float,
    *,
    maps: bool,
    base: Source | None = None,
) -> None:
    """Send the parcels that the receiver has asked for; returns when all have been taken.

    `base`: an older version that the receiver has. Then their differences from it are sent, as long
    as they pay.
    """
    needed = [set[int]().union(*map(source.needed, parcel)) for parcel in parcels]
    waiting = list(range(len(parcels)))
    sending = MessagesInFlight(AHEAD if base is None else CODES_AHEAD, patience)
    saving = Saving()
    # gets no message, but fails when the receiver leaves
    leaves = pair.recv(src=TAKES, tag="leaves")
    news = News(pair, coming, leaves, patience)
    try:
        while maps and not coming.has_lasting_memory:
            if not await news.more():
                return
        if maps:
            assert coming.memory is not None
            words = coming.memory.words()
            await pair.send(words, TAKES, tag=PARTS)
            maps = words is not None
        while waiting:
            ready = [number for number in waiting if source.has(needed[number])]
            for number in ready:
                if coming.is_abandoned:
                    break
                if maps:
                    sending.add(pair.send((number, 0), TAKES, tag=PARTS))
                elif base is not None:
                    coded = await in_thread(
                        partial(slices.coded_parcel, source, base, parcels[number])
                    )
                    if coded is None or not saving.pays(coded):
                        await end_codes(pair)
                        waiting.clear()
                        break
                    said = number, coded.check, len(coded.code)
                    for one in (said, *pieces(coded.code)):
                        sending.add(pair.send(one, TAKES, tag=PARTS, timeout=NO_DEADLINE))
                else:
                    data, check = await in_thread(
                        partial(slices.packed_parcel, source, parcels[number])
                    )
                    sending.add(pair.send((number, check), TAKES, tag=PARTS))
                    sending.add(pair.send(data, TAKES, tag=PARTS))
                await sending.until_few()
                waiting.remove(number)
            is_over = coming.is_abandoned or not ready
            if waiting and is_over and not await news.more():
                return
        await sending.until_none()
    finally:
        sending.close()
        news.close()


async def end_codes(pair: Group) -> None:
    """Say that no differences come any more."""
    await pair.send(END, TAKES, tag=PARTS)


class Saving:
    """Decides whether a sender goes on encoding."""

    def __init__(self) -> None:
        self._coded = 0
        self._nbytes = 0

    def pays(self, parcel: CodedParcel) -> bool:
        """Count a parcel, and say whether all so far take few enough bytes."""
        self._coded += len(parcel.code)
        self._nbytes += parcel.nbytes
        return self._coded <= SHARE * self._nbytes


class Base(NamedTuple):
    """An older version of the slices, which the sender knows by `id`. `known`: counts what came."""

    lot: Lot
    id: bytes
    known: Differences


class Mirror(NamedTuple):
    """Memory of another participant on the host that can be mapped.

    `over` makes a source of the mapped memory, which has `nbytes`.
    """

    nbytes: int
    over: Callable[[VersionMemory], Source]


async def take(
    pair: Group,
    lot: Lot,
    request: Parcels,
    parcels: list[list[Piece]],
    patience: float,
    mirror: Mirror | None = None,
) -> None:
    """Receive pieces, and remove them from `parcels`. `request`: without them.

    With a `mirror`, they are copied from that, if it can be mapped. If the receiver has no memory
    yet, it wants the same slices as the sender, and uses the sender's memory. Raises what
    `transfers.take` does.
    """
    asked = [[(piece.key, piece.box) for piece in parcel] for parcel in parcels]
    request = request._replace(parcels=asked, maps=mirror is not None)
    await pair.send(tuple(request), GIVES, tag=PARTS)
    left = dict(enumerate(parcels))
    begun = set[int]()  # nothing more may be written to the places of these
    mapped: VersionMemory | None = None
    source: Source | None = None

    def landed(number: int) -> None:
        for piece in left.pop(number):
            lot.fill(piece)
        lot.tell()

    async def check(number: int, data: Flat, check: int) -> None:
        await in_thread(partial(lots.unpacked_parcel, data, check, lot, left[number]))
        landed(number)

    try:
        if mirror is not None and (words := await word(pair, lot, patience)) is not None:
            async with asyncio.timeout(patience):
                mapped = VersionMemory.of(await take_segment(words, mirror.nbytes, keep=True))
            if lot.memory is None:
                lot.take(mapped)
            else:
                source = mirror.over(mapped)
        elif lot.memory is None:
            await lot.make_own(shared=True)
        async with OneBeside() as beside:
            for _ in asked:
                if not lot.wanted:
                    raise UnwantedError
                match await word(pair, lot, patience):
                    case (int(number), int(crc)) if number in left.keys() - begun:
                        begun.add(number)
                    case nonsense:
                        raise ProtocolError(f"{nonsense!r} came instead of a parcel")
                if mapped is not None:
                    if source is not None:
                        await in_thread(partial(lots.copy, source, lot, left[number]))
                    landed(number)
                    continue
                data = lots.room_for(lot, left[number])
                await pair.recv(src=GIVES, tag=PARTS, out=data, timeout=patience)
                await beside.begin(check(number, data, crc))
    finally:
        if mapped is not None and mapped is not lot.memory:
            mapped.close()
        parcels[:] = left.values()


async def take_differences(
    pair: Group,
    lot: Lot,
    request: Parcels,
    parcels: list[list[Piece]],
    patience: float,
    base: Base,
) -> None:
    """Receive the differences of pieces, and remove these from `parcels`. The others are to be
    taken whole.

    Raises what `transfers.take` does.
    """
    asked = [[(piece.key, piece.box) for piece in parcel] for parcel in parcels]
    request = request._replace(parcels=asked, base=base.id)
    await pair.send(tuple(request), GIVES, tag=PARTS)
    left, known = dict(enumerate(parcels)), base.known
    begun = set[int]()

    async def decode(number: int, code: bytes, check: int) -> None:
        parcel = left[number]
        try:
            await in_thread(partial(lots.decoded_parcel, code, check, base.lot, lot, parcel))
        except ProtocolError:
            known.fallbacks += 1
            return
        known.chain = 1
        known.saved += max(0, lot.nbytes_of(parcel) - len(code))
        for piece in left.pop(number):
            lot.fill(piece)
        lot.tell()

    try:
        async with OneBeside() as beside:
            while len(begun) < len(asked):
                if not lot.wanted:
                    raise UnwantedError
                match await word(pair, lot, patience):
                    case None:
                        break
                    case (int(number), int(check), int(size)) if number in left.keys() - begun:
                        pass
                    case nonsense:
                        raise ProtocolError(f"{nonsense!r} came instead of a difference")
                if not 0 <= size <= lot.nbytes_of(left[number]) + OVERHEAD:
                    raise ProtocolError(f"a difference of {size} bytes is to come")
                code = await take_codes(pair, lot, size, patience)
                begun.add(number)
                await beside.begin(decode(number, code, check))
    finally:
        parcels[:] = left.values()


async def give_manifests(pair: Group, packed: Sequence[bytes]) -> None:
    """Send the known manifests of the shares of a version."""
    await pair.send(list(packed), TAKES, tag=PARTS)


async def take_manifests(pair: Group, version: int, patience: float) -> list[bytes]:
    """Ask for the known manifests of the shares of a version.

    Raises AiodistError, ProtocolError, NotThereError.
    """
    request = Parcels(version, b"", "", [], maps=False, who="", base=b"")
    await pair.send(tuple(request), GIVES, tag=PARTS)
    match await pair.recv(src=GIVES, tag=PARTS, timeout=patience):
        case []:
            raise NotThereError
        case [*packed] if all(isinstance(one, bytes) for one in packed):
            return packed
        case nonsense:
            raise ProtocolError(f"a participant said {nonsense!r} instead of manifests")
