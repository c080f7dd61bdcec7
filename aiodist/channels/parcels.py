"""Pieces of a version on their way from one participant to another, in a group of these two.

The one who takes says which pieces it wants, in parcels, and the one who gives sends each parcel
as soon as it has all of it, in whatever order: its number and its CRC-32, and then its bytes. As
for whole versions (`aiodist.channels.transfers`), who has to wait itself says so.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any

from aiodist.buffers.arrays import Flat
from aiodist.channels import slices
from aiodist.channels.holding import Coming, in_thread
from aiodist.channels.participant import GIVES, TAKES
from aiodist.channels.slices import Lot, Piece, Source
from aiodist.channels.transfers import (
    AHEAD,
    PARTS,
    News,
    NotThereError,
    UnwantedError,
    word,
)
from aiodist.errors import ProtocolError
from aiodist.group import Group
from aiodist.work import Work


async def give(
    pair: Group, coming: Coming, source: Source, said: Sequence[Any], patience: float
) -> None:
    """Send the parcels that the other side has asked for, and return when all have been taken."""
    parcels = [slices.pieces_in(parcel) for parcel in said]
    needed = [set[int]().union(*map(source.needed, parcel)) for parcel in parcels]
    waiting = list(range(len(parcels)))
    sent: deque[Work[None]] = deque()
    leaves = pair.recv(src=TAKES, tag="leaves")  # nothing comes: it fails when the other one goes
    news = News(pair, coming, leaves, patience)
    try:
        while waiting:
            ready = [number for number in waiting if source.has(needed[number])]
            for number in ready:
                if coming.is_abandoned:
                    break
                data, check = await in_thread(
                    partial(slices.packed_parcel, source, parcels[number])
                )
                sent.append(pair.send((number, check), TAKES, tag=PARTS))
                sent.append(pair.send(data, TAKES, tag=PARTS))
                while len(sent) > AHEAD:
                    await sent.popleft()
                waiting.remove(number)
            is_over = coming.is_abandoned or not ready
            if waiting and is_over and not await news.more():
                return
        while sent:
            await sent.popleft()
    finally:
        news.close(sent)


async def take(
    pair: Group, lot: Lot, wants: str, parcels: list[list[Piece]], patience: float
) -> None:
    """Receive pieces of those that the other side has by the name `wants`: those that came are gone
    from `parcels`. Raises what `transfers.take` does."""
    asked = [[(piece.key, piece.box) for piece in parcel] for parcel in parcels]
    await pair.send((lot.version, wants, asked), GIVES, tag=PARTS)
    left = dict(enumerate(parcels))
    checking: asyncio.Task[None] | None = None  # of the one before this one

    async def landed(number: int, data: Flat, check: int) -> None:
        await in_thread(partial(slices.unpacked_parcel, data, check, lot, left[number]))
        for piece in left.pop(number):
            lot.fill(piece)
        lot.tell()

    try:
        for _ in asked:
            if not lot.wanted:
                raise UnwantedError
            match await word(pair, lot, patience):
                case (int(number), int(check)) if number in left:
                    data = slices.room_for(lot, left[number])
                case nonsense:
                    raise ProtocolError(f"{nonsense!r} came where a parcel was next")
            await pair.recv(src=GIVES, tag=PARTS, out=data, timeout=patience)
            if checking is not None:
                await checking
            checking = asyncio.ensure_future(landed(number, data, check))
        if checking is not None:
            await checking
    finally:
        if checking is not None:
            await asyncio.gather(checking, return_exceptions=True)
        parcels[:] = left.values()


async def give_manifests(pair: Group, packed: Sequence[bytes]) -> None:
    """What is known of the shares of a version."""
    await pair.send(list(packed), TAKES, tag=PARTS)


async def take_manifests(pair: Group, version: int, patience: float) -> list[bytes]:
    """The same. Raises AiodistError, ProtocolError, NotThereError."""
    await pair.send((version, "", []), GIVES, tag=PARTS)
    match await pair.recv(src=GIVES, tag=PARTS, timeout=patience):
        case []:
            raise NotThereError
        case [*packed] if all(isinstance(one, bytes) for one in packed):
            return packed
        case nonsense:
            raise ProtocolError(f"a participant said {nonsense!r} where manifests were asked for")
