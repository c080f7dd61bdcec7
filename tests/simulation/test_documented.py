"""The example of docs/testing.md."""

from __future__ import annotations

from typing import Any

import numpy as np

import aiodist
from aiodist.testing import Killed, Simulation


async def program(group: aiodist.Group) -> Any:
    x = np.full(4, group.rank + 1.0)
    await group.barrier()
    await group.all_reduce(x)
    return x.tolist()


def test_the_others_hear_of_a_death() -> None:
    simulation = Simulation(3, seed=1, lease=15.0)
    simulation.faults.fail_at(rank=1, op="all_reduce", point="entered", action="unplug")
    outcomes = simulation.run(program)
    assert isinstance(outcomes[1], Killed)
    for outcome in (outcomes[0], outcomes[2]):
        assert isinstance(outcome, aiodist.PeerLostError)
        assert outcome.ranks == (1,)
