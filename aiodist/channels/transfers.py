"""A version on its way from one participant to another, in a group of these two.

The one who takes (rank 1) says what it wants and how much it has; the one who gives (rank 0) sends
part after part, each as soon as it has it itself, with its number before it. Where both are on one
host, memory is mapped, and only the numbers go. If nothing comes for `patience` seconds, the one
who gives counts as gone. One who has to look for another source itself says so: then those who take
from it wait for as long again, instead of leaving all at once.
"""

from __future__ import annotations

import asyncio
from collections import deque
from functools import partial
from typing import Any

import numpy as np

from aiodist.channels.holding import Holding, Memory, in_thread
from aiodist.errors import ProtocolError
from aiodist.group import Group
from aiodist.transports.handover import take_segment
from aiodist.work import Work

WAIT = -1
"""Instead of the number of a part: it takes longer."""

NOT_HERE = -2
"""It has not got that version, or not any more."""

TAKES, GIVES = 1, 0
"""Ranks."""

AHEAD = 4
"""Messages that are sent before the first of them has been taken."""

PARTS = "parts"
"""The tag."""


class NotThereError(Exception):
    """Who was asked for a version has not got it."""


async def asked(pair: Group, patience: float) -> tuple[int, int, bool]:
    """What the one who takes wants: the version, how many parts it has, whether it maps memory.
    Raises ProtocolError."""
    match await pair.recv(src=TAKES, tag=PARTS, timeout=patience):
        case (int(version), int(has), bool(maps)) if has >= 0:
            return version, has, maps
        case nonsense:
            raise ProtocolError(f"a participant asked for {nonsense!r}")


async def give(pair: Group, holding: Holding | None, has: int, *, maps: bool) -> None:
    """Send the parts from `has` on, and return when all have been taken."""
    if holding is None:
        await pair.send(NOT_HERE, TAKES, tag=PARTS)
        return
    sent: deque[Work[None]] = deque()
    leaves = pair.recv(src=TAKES, tag="leaves")  # nothing comes: it fails when the other one goes
    try:
        with holding:
            news = _News(pair, holding, leaves)
            # Its memory is given to others when it stays: one that has half a version in the memory
            # of another who is gone will have its own in a moment.
            while maps and not (holding.is_whole or _is_own(holding)):
                if not await news.more():
                    return
            if maps:
                assert holding.memory is not None
                await pair.send(holding.memory.words(), TAKES, tag=PARTS)
            while has < holding.release.parts:
                if has >= holding.filled:
                    if not await news.more():
                        return
                    continue
                sent.append(pair.send(has, TAKES, tag=PARTS))
                if not maps:
                    part = np.frombuffer(holding.part(has), np.uint8)
                    sent.append(pair.send(part, TAKES, tag=PARTS))
                has += 1
                while len(sent) > AHEAD:
                    await sent.popleft()
            while sent:
                await sent.popleft()
    finally:
        for one in (*sent, leaves):
            if one.done() and not one.cancelled():
                one.exception()  # seen: the other one has gone, which its own error says
            one.cancel()


def _is_own(holding: Holding) -> bool:
    return holding.memory is not None and holding.memory.is_own


class _News:
    """What becomes of a version that somebody else is given as it comes."""

    def __init__(self, pair: Group, holding: Holding, leaves: Work[None]) -> None:
        self._pair = pair
        self._holding = holding
        self._leaves = leaves
        self._stirs = holding.stirs

    async def more(self) -> bool:
        """Wait until something has changed, and tell the other one where it takes longer. False: no
        more will come, and it is told. Raises AiodistError where the other one has gone."""
        holding = self._holding
        if holding.is_abandoned:
            await self._pair.send(NOT_HERE, TAKES, tag=PARTS)
            return False
        news = asyncio.ensure_future(holding.news())
        try:
            await asyncio.wait({news, self._leaves}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            news.cancel()
        if self._leaves.done():
            self._leaves.result()
        if holding.stirs != self._stirs:
            self._stirs = holding.stirs
            await self._pair.send(WAIT, TAKES, tag=PARTS)
        return True


async def take(pair: Group, holding: Holding, patience: float, *, maps: bool) -> None:
    """Receive what is missing. Raises AiodistError where the other one fails or is silent,
    ProtocolError where what it sends is damaged, OSError where its memory cannot be mapped,
    NotThereError."""
    release = holding.release
    await pair.send((release.version, 0 if maps else holding.filled, maps), GIVES, tag=PARTS)
    if maps:
        words = await _word(pair, holding, patience)
        async with asyncio.timeout(patience):
            segment = await take_segment(words, release.nbytes, keep=True)
        holding.take(Memory.of(segment))
    checking: asyncio.Task[None] | None = None  # of the part before this one
    try:
        for number in range(holding.filled, release.parts):
            said = await _word(pair, holding, patience)
            if said != number:
                raise ProtocolError(f"part {said!r} came where {number} was next")
            if maps:
                if number == 0:
                    holding.check(0)
                holding.fill()
                continue
            if release.span(number)[0] < release.span(number)[1]:
                part = np.frombuffer(holding.part(number), np.uint8)
                await pair.recv(src=GIVES, tag=PARTS, out=part, timeout=patience)
            if checking is not None:
                await checking
                holding.fill()
            checking = asyncio.ensure_future(in_thread(partial(holding.check, number)))
        if checking is not None:
            await checking
            holding.fill()
    finally:
        if checking is not None:
            await asyncio.gather(checking, return_exceptions=True)


async def _word(pair: Group, holding: Holding, patience: float) -> Any:
    """What comes next that is not to wait."""
    while True:
        said = await pair.recv(src=GIVES, tag=PARTS, timeout=patience)
        if type(said) is not int or said >= 0:
            return said
        if said != WAIT:
            raise NotThereError
        holding.stir()
