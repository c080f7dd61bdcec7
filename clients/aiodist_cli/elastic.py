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

    A rank that ended well does not come back. So a dead rank is not started again if the others are
    too few for a group.
    """
    started = dict.fromkeys(range(size), 0)
    before: dict[int, Exit] = {}  # the last death of each rank that was started again
    while (died := await ranks.next_death(interruption)) is not None:
        text = f"aiodist run: {headline(died, size)}; "
        too_few = size - ranks.done < spare.least
        if spare.restarts and not too_few:
            before[died.rank] = died
            spare.restarts -= 1
            started[died.rank] += 1
            await tell(f"{text}started again, restarts left: {spare.restarts}", died)
            await start(died.rank, started[died.rank])
            continue
        if spare.restarts:
            ended = f"{ranks.done} of {size} ended with 0"
            text += f"not started again, because {ended} and a group needs {spare.least}; "
        if ranks.living >= spare.least:
            await tell(f"{text}the others go on, living or done: {ranks.living}", died)
            continue
        if spare.restarts:
            await tell(text.removesuffix("; "), died._replace(withheld=()))
        # A successor waits in vain if the others end meanwhile. Then the death before says why.
        return before.get(died.rank, died) if too_few and died.waited_in_vain else died
    return None
