"""Participants of a channel of weights, each on a rank of a simulation."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from typing import Any

import numpy as np

import aiodist
from aiodist.testing import Conditions
from aiodist.testing.simulation import LIMIT, Killed, Simulation

PATIENCE = 2.0
"""Seconds of virtual time that they wait for an answer."""


def line(rate: float, delay: float) -> Conditions:
    """A line that loses nothing, whose connections hold what is in flight."""
    room = round(delay * rate) + (4 << 20)
    return Conditions((delay, delay), 0.0, room=(room, room), largest=1 << 16, short=0.0, rate=rate)


class ChannelStage:
    """`done` is set when all is over, for those who stay until then."""

    def __init__(self, size: int, **options: Any) -> None:
        self.sim = Simulation(size, **options)
        self.options = {"address": self.sim.address, "transports": ("tcp",), "patience": PATIENCE}
        self.done = asyncio.Event()

    def play(
        self, mains: Mapping[int, Coroutine[Any, Any, Any]], limit: float = LIMIT
    ) -> list[Any]:
        """The outcomes of these, within `limit` seconds of virtual time. Raises what one of them
        did."""

        async def guarded(main: Coroutine[Any, Any, Any]) -> Any:
            try:
                return await main
            except Exception:
                self.done.set()  # the others end, too
                raise

        outcomes = self.sim.play({rank: guarded(main) for rank, main in mains.items()}, limit)
        for one in outcomes:
            if isinstance(one, BaseException) and not isinstance(one, Killed):
                raise one
        return outcomes

    def publisher(self, **more: Any) -> aiodist.Publisher:
        return aiodist.publisher("policy", **{**self.options, **more})

    def subscriber(self, **more: Any) -> aiodist.Subscriber:
        return aiodist.subscriber("policy", **{**self.options, **more})


CHUNK = 1 << 16
"""Bytes of a chunk of `tree`, if a test sets `manifest.CHUNK` to it."""
CHUNKS = 20


def tree(version: int) -> dict[str, Any]:
    return {"w": np.full(CHUNKS * CHUNK // 4, version, np.int32)}


class ServingStage(ChannelStage):
    """With a publisher of one version."""

    async def publish(self) -> int:
        """Publish `tree` as version 1, until all is done. Return how many bytes were sent of it."""
        async with self.publisher() as out:
            await out.publish(tree(1), version=1)
            await self.done.wait()
            return out.bytes_sent


async def filled(holding: Any, parts: int) -> None:
    """Wait until so many parts of a version are here."""
    while holding.filled < parts:
        await holding.news()


async def until_filled(weights: Any, parts: int) -> asyncio.Task[Any]:
    """Begin to take version 1, up to so many parts."""
    await weights.wait()
    holding = weights._fetching.holding(weights._participant.releases[-1])
    taking = asyncio.ensure_future(weights.latest())
    await filled(holding, parts)
    return taking


async def next_sign_of_life(participant: Any) -> None:
    """Wait until a participant has given its next sign of life."""
    given, stay = asyncio.Event(), participant.role.stay

    async def stays() -> None:  # called at the end of each sign of life
        await stay()
        given.set()

    participant.role.stay = stays
    await given.wait()
    participant.role.stay = stay
