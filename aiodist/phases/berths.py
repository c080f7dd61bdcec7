"""How an operation without a lane gets one: its ranks meet, and offer berths."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

from aiodist.engine.operation import Operation, Pause
from aiodist.errors import ProtocolError
from aiodist.phases.base import Part, Place, share
from aiodist.shared_memory.berths import MOST, BerthOffer, Offered
from aiodist.shared_memory.board import BERTHS

_WORDS: Final = struct.Struct("<iqi")
LENGTH: Final = _WORDS.size
"""The bytes that say what a rank offers."""
NOTHING: Final = _WORDS.pack(-1, 0, 0)

MARK: Final = b"\xc2"
"""The first byte of an offer that is followed by other words. Words without an offer never begin
with it."""


def words_of(offer: BerthOffer | None) -> bytes:
    """Return the words that tell other ranks of an offer."""
    return NOTHING if offer is None else _WORDS.pack(*offer.words)


def read(words: Sequence[bytes | memoryview]) -> list[Offered] | None:
    """Return the offers of all ranks, or None if a rank offers nothing. Raises ProtocolError."""
    found: list[Offered] = []
    for rank, each in enumerate(words):
        berth, number, shows = _WORDS.unpack(each) if len(each) == LENGTH else (-2, 0, 0)
        if not (-1 <= berth < BERTHS and 0 <= number < MOST and 0 <= shows <= 1):
            raise ProtocolError(f"rank {rank} sent a malformed offer of its berth")
        if berth >= 0:
            found.append(Offered(berth, number, shows == 1))
    return found if len(found) == len(words) else None


def joined(offer: BerthOffer | None, words: bytes) -> bytes:
    """Return the first words of a rank, with its offer in front if there is one."""
    return words if offer is None else b"".join((MARK, words_of(offer), words))


def parted(words: Sequence[bytes | memoryview]) -> tuple[list[bytes], list[bytes | memoryview]]:
    """Split the words of each rank into its offer and the rest."""
    end = len(MARK) + LENGTH
    told = [bytes(each[1:end]) if each[:1] == MARK else NOTHING for each in words]
    return told, [each[end:] if each[:1] == MARK else each for each in words]


class Mooring(Pause):
    """Moves its operation to berths, on which the later phases run."""

    def __init__(self, offer: BerthOffer, offers: Sequence[Offered]) -> None:
        self._offer = offer
        self._offers = offers

    def belong(self, operation: Operation) -> None:
        super().belong(operation)
        operation.lane = self._offer.moor(self._offers, operation.place)
        operation.lane.turns.add(operation)

    def run(self) -> bool:
        return True

    def close(self) -> None:
        """Do nothing, because no other rank waits for this."""


def meet(place: Place) -> Part[bool]:
    """Let all ranks meet, and run the operation on berths if all ranks have one. Return whether it
    does.

    Synchronises all ranks.
    """
    offer = None if place.berths is None else place.berths.offer()
    blobs = yield from share(place, words_of(offer), False, first=True)
    return (yield from met(offer, blobs))


def met(offer: BerthOffer | None, blobs: Sequence[bytes]) -> Part[bool]:
    """Do the rest of `meet`, once all ranks have told their offers."""
    offers = read(blobs)
    if offer is None or offers is None:
        return False
    yield Mooring(offer, offers)
    return True
