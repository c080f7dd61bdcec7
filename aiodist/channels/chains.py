"""Differences between versions, sent from one participant to another in a group of two.

The receiver of a version names one that it has. The sender answers with a chain of differences from
that one, and sends the codes of one part after the other, each as soon as it has them. If it cannot
go on, the rest is sent whole (`aiodist.channels.transfers`). At the end the receiver names damaged
parts, and gets these whole.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np

from aiodist.channels.changes import SHARE, Difference, Differences, apply
from aiodist.channels.differences import OVERHEAD
from aiodist.channels.directory import MOST_RELEASES
from aiodist.channels.holding import Holding, in_thread
from aiodist.channels.meetings import GIVES, TAKES
from aiodist.channels.transfers import (
    CODES_AHEAD,
    DATA,
    END,
    PARTS,
    News,
    UnwantedError,
    pieces,
    take_codes,
    word,
)
from aiodist.channels.window import NO_DEADLINE, MessagesInFlight, give_up
from aiodist.errors import ProtocolError
from aiodist.group import Group


async def give(
    pair: Group, holding: Holding, base: bytes, has: int, known: Differences, patience: float
) -> int | None:
    """Send codes of the parts from `has` on to a receiver that has the version `base`.

    Returns the number of parts that the receiver has then. None: no more of the version can come
    from here, and the receiver is told.
    """
    release = holding.release
    sending = MessagesInFlight(CODES_AHEAD, patience)
    # gets no message, but fails when the receiver leaves
    leaves = pair.recv(src=TAKES, tag="leaves")
    news = News(pair, holding, leaves, patience)
    try:
        while not holding.is_begun:
            if not await news.more():
                return None
        chain = known.between(base, release.id, release.nbytes)
        await pair.send([(one.base, one.result) for one in chain], TAKES, tag=PARTS)
        if not chain:
            return has
        while has < release.parts:
            codes = None if holding.is_abandoned else _codes(holding, chain, has)
            if codes is None:
                if any(one.is_over and not one.is_whole for one in chain):
                    break
                if not await news.more():
                    return None
                continue
            for said in _messages(has, codes):
                sending.add(pair.send(said, TAKES, tag=PARTS, timeout=NO_DEADLINE))
            has += 1
            await sending.until_few()
        sending.add(pair.send(END, TAKES, tag=PARTS, timeout=NO_DEADLINE))
        await sending.until_none()
        # It comes when all is decoded, which may take long. A receiver that leaves ends this.
        match await pair.recv(src=TAKES, tag=PARTS, timeout=NO_DEADLINE):
            case [*failed] if all(type(one) is int and 0 < one < has for one in failed):
                pass
            case nonsense:
                raise ProtocolError(f"{nonsense!r} came instead of the numbers of damaged parts")
        for number in failed:
            while number >= holding.filled:
                if not await news.more():
                    return None
            await pair.send(number, TAKES, tag=PARTS)
            await pair.send(np.frombuffer(holding.part(number), np.uint8), TAKES, tag=DATA)
        return has
    finally:
        sending.close()
        news.close()


def _codes(holding: Holding, chain: Sequence[Difference], number: int) -> list[bytes] | None:
    """The data of a part, if it is here: the manifest, or the code of each difference."""
    if number == 0:
        return [bytes(holding.part(0))] if holding.filled else None
    if any(len(one.codes) < number for one in chain):
        return None
    return [one.codes[number - 1] for one in chain]


def _messages(number: int, codes: Sequence[bytes]) -> Iterator[Any]:
    """The messages for one part: its number and the sizes of its codes, then all codes in
    pieces."""
    yield number, [len(code) for code in codes]
    yield from pieces(b"".join(codes))


async def take(
    pair: Group, holding: Holding, base: Holding, known: Differences, patience: float
) -> bool:
    """Ask for a version, and receive what differences bring of it. False: the rest comes whole.

    Raises what `transfers.take` does.
    """
    release = holding.release
    await pair.send((release.version, holding.filled, False, base.release.id), GIVES, tag=PARTS)
    chain = _chain(await word(pair, holding, patience), base, holding)
    most = SHARE * release.nbytes
    if not holding.filled:  # else codes are missing here
        for one in chain:
            known.add(one, most)
    holding.is_begun = True
    holding.tell()
    known.chain = 0
    if not chain:
        return False
    try:
        with base:
            failed = await _Taking(pair, holding, base, chain, patience).run()
    finally:
        for one in chain:
            one.is_over = True
        holding.tell()
        known.trim(most)
    known.fallbacks += failed
    if not holding.is_whole:
        return False
    known.chain = len(chain)
    known.saved += max(0, release.nbytes - sum(one.nbytes for one in chain))
    return True


def _chain(said: Any, base: Holding, holding: Holding) -> list[Difference]:
    """The differences that will come, still empty. Raises ProtocolError."""
    parts = holding.release.parts - 1
    at = base.release.id
    chain = []
    match said:
        case [*pairs] if len(pairs) <= MOST_RELEASES:
            for one in pairs:
                match one:
                    case (bytes(start), bytes(result)) if start == at and len(result) <= 16:
                        chain.append(Difference(start, result, parts))
                        at = result
                    case _:
                        break
            if len(chain) == len(pairs) and (not chain or at == holding.release.id):
                return chain
    raise ProtocolError(
        f"no chain of differences came from version {base.version} to version {holding.version}"
    )


class _Taking:
    """Receives codes, and decodes them in a thread."""

    def __init__(
        self,
        pair: Group,
        holding: Holding,
        base: Holding,
        chain: Sequence[Difference],
        patience: float,
    ) -> None:
        self._pair = pair
        self._holding = holding
        self._base = base
        self._chain = chain
        self._patience = patience
        self._next = holding.filled  # the part whose codes come next
        # A sender gives fewer bytes than the whole. The last difference may not have ended by then.
        release = holding.release
        self._room = round((1 + SHARE) * release.nbytes) + OVERHEAD * release.parts
        self._left: list[tuple[int, list[bytes]]] = []  # to decode
        self._failed: list[int] = []

    async def run(self) -> int:
        """Receive all codes. Returns the number of parts that had to come whole."""
        decoding: asyncio.Task[None] | None = None
        try:
            while self._holding.wanted:
                match await word(self._pair, self._holding, self._patience):
                    case None:
                        break
                    case (int(number), [*sizes]) if number == self._next:
                        self._keep(await self._codes(sizes))
                    case nonsense:
                        raise ProtocolError(f"{nonsense!r} came instead of codes")
                if self._left and (decoding is None or decoding.done()):
                    if decoding is not None:
                        decoding.result()
                    decoding = asyncio.ensure_future(self._decode())
            else:
                raise UnwantedError
            if decoding is not None:
                await decoding
            await self._take_whole()
        finally:
            if decoding is not None:
                await asyncio.gather(decoding, return_exceptions=True)
        return len(self._failed)

    async def _codes(self, sizes: Sequence[Any]) -> list[bytes]:
        """Receive the codes of a part, which have these sizes."""
        holding = self._holding
        most = max(holding.release.chunk, holding.release.manifest) + OVERHEAD
        if not all(type(size) is int and 0 <= size <= most for size in sizes):
            raise ProtocolError(f"codes of {sizes!r} bytes are to come")
        self._room -= sum(sizes)
        if self._room < 0:
            raise ProtocolError(
                f"differences of {len(holding.view)} bytes have more bytes than these"
            )
        data = await take_codes(self._pair, holding, sum(sizes), self._patience)
        ends = list(accumulate(sizes))
        return [data[end - size : end] for end, size in zip(ends, sizes, strict=True)]

    def _keep(self, codes: list[bytes]) -> None:
        """Take over the codes of the next part."""
        holding, number = self._holding, self._next
        self._next += 1
        if number == 0:
            place = holding.part(0)
            if [len(one) for one in codes] != [len(place)]:
                raise ProtocolError(f"no manifest of version {holding.version} came")
            place[:] = codes[0]
            holding.check(0)
            holding.fill()
            return
        if number >= holding.release.parts or len(codes) != len(self._chain):
            raise ProtocolError(f"{len(codes)} codes came for part {number}")
        for one, code in zip(self._chain, codes, strict=True):
            one.add(code)
        holding.tell()  # they can be forwarded
        self._left.append((number, codes))

    async def _decode(self) -> None:
        while self._left:
            batch, self._left = self._left, []
            self._failed += await in_thread(partial(self._apply, batch))
            for _ in batch:
                if not self._failed:  # parts come in order
                    self._holding.fill()

    def _apply(self, batch: Sequence[tuple[int, list[bytes]]]) -> list[int]:
        """Decode in a thread, and return the parts that are damaged."""
        failed = []
        for number, codes in batch:
            try:
                apply(self._base, self._holding, number, codes)
            except ProtocolError:
                failed.append(number)
        return failed

    async def _take_whole(self) -> None:
        """Receive the damaged parts whole."""
        pair, holding = self._pair, self._holding
        await pair.send(self._failed, GIVES, tag=PARTS)
        for number in self._failed:
            place = np.frombuffer(holding.part(number), np.uint8)
            data = pair.recv(src=GIVES, tag=DATA, out=place, timeout=NO_DEADLINE)
            try:
                if (said := await word(pair, holding, self._patience)) != number:
                    raise ProtocolError(f"part {said!r} came instead of part {number}")
                await data.wait(self._patience)
            finally:
                give_up([data])
            holding.check(number)
            while holding.filled < number + 1:
                holding.fill()
        while holding.filled < self._next:
            holding.fill()
