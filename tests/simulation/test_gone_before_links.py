"""A rank is gone before there were links: every collective fails at once on all others, also where
it exchanges nothing with that rank, and whoever else is not there to say so."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

import aiodist
from aiodist.testing import Conditions, Simulation

CALLS = {
    "all_reduce": lambda group: group.all_reduce(np.ones(3)),
    "large": lambda group: group.all_reduce(np.ones(200_000)),
    "broadcast": lambda group: group.broadcast(np.ones(3), 0),
    "gather": lambda group: group.gather(1, dst=0),
    "reduce": lambda group: group.reduce(np.ones(3), dst=0),
    "all_gather": lambda group: group.all_gather(1),
    "barrier": lambda group: group.barrier(),
    "scan": lambda group: group.scan(1),
    "tagged": lambda group: group.barrier(tag="t"),
}
SECONDS = 30.0


class Gone:
    """The last rank goes. Rank 0 is busy then (`when` "new"), or waits for something else; the
    others call, before that ("pending") or after ("new"): how long it took, by rank."""

    def __init__(self, simulation: Simulation, name: str, how: str, when: str) -> None:
        self.simulation = simulation
        self.name = name
        self.how = how
        self.when = when

    async def __call__(self, group: aiodist.Group) -> float | None:
        loop = asyncio.get_running_loop()
        node = self.simulation.nodes[group.rank]
        if group.rank == group.size - 1:
            await asyncio.sleep(1.0)
            if self.how == "died":
                node.kill()
            return None
        if group.rank == 0:
            await asyncio.sleep(1.5)
            if self.when == "new":
                self.simulation.network.later_by(SECONDS, node.resume)
                node.block()
            await asyncio.sleep(SECONDS)
            return None
        await asyncio.sleep(0.5 if self.when == "pending" else 2.0)
        with pytest.raises(aiodist.PeerLostError) as lost:
            await CALLS[self.name](group)
        assert lost.value.ranks == (group.size - 1,)
        seconds = loop.time()
        await asyncio.sleep(SECONDS)
        return seconds


@pytest.mark.parametrize("when", ["new", "pending"])
@pytest.mark.parametrize("how", ["left", "died"])
@pytest.mark.parametrize("name", CALLS)
def test_it_fails_at_once(name: str, how: str, when: str) -> None:
    conditions = Conditions(delay=(20e-6, 200e-6), loss=0.0)
    simulation = Simulation(3, conditions=conditions, lease=100.0, op_timeout=20.0)
    found: list[Any] = simulation.run(Gone(simulation, name, how, when))
    for seconds in found[1:-1]:
        assert seconds < 2.5
