"""Ranks of an elastic group that die: the run starts them again, goes on without them, or ends."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from aiodist_cli.ranks import Ranks
from aiodist_cli.summary import Exit, headline


@dataclass(slots=True)
class Spare:
    """What a run can spare: all ranks but `least`, and `restarts` restarts in all."""

    least: int
    restarts: int


async def keep(
    ranks: Ranks,
    spare: Spare,
    size: int,
    interruption: asyncio.Future[Any],
    start: Callable[[int, int], Awaitable[None]],
    tell: Callable[[str, Exit], Awaitable[None]],
) -> Exit | None:
    """Wait for `size` ranks, and start dead ones again.

    Returns None if all have ended, or if `interruption` is done; else the death that the run cannot
    spare. `start` gets a rank and how often it was started before. `tell` gets what happens after a
    death.
    """
    started = dict.fromkeys(range(size), 0)
    while (died := await ranks.next_death(interruption)) is not None:
        text = f"aiodist run: {headline(died, size)}; "
        if spare.restarts:
            spare.restarts -= 1
            started[died.rank] += 1
            await tell(f"{text}started again, restarts left: {spare.restarts}", died)
            await start(died.rank, started[died.rank])
        elif ranks.living >= spare.least:
            await tell(f"{text}the others go on, living or done: {ranks.living}", died)
        else:
            return died
    return None
