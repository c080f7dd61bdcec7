"""A group that one rank revokes as soon as it has it: all have it, and go on together."""

from __future__ import annotations

import pytest
from seeds import seeds

import aiodist
from aiodist.testing import Conditions, Simulation

SIZE = 4
SLOW = Conditions(delay=(20e-6, 5e-3), loss=0.0)

MADE = {
    "dup": lambda group: group.dup(),
    "split": lambda group: group.split(0, key=-group.rank),
    "subgroup": lambda group: group.subgroup([2, 0, 3, 1]),
}


@pytest.mark.parametrize("seed", seeds(2, 4))
@pytest.mark.parametrize("how", ["revoke", "shrink"])
@pytest.mark.parametrize("name", sorted(MADE))
def test_every_rank_has_it(name, how, seed):
    rounds = 5

    async def program(group: aiodist.Group) -> int:
        seen = 0
        for _ in range(rounds):
            made = await MADE[name](group)
            seen += made.closed
            if how == "revoke" and made.rank == 0:
                made.revoke()
            survivors = await made.shrink()
            assert await survivors.all_reduce(1) == SIZE
            with pytest.raises(aiodist.GroupRevokedError):
                made.barrier()
            await survivors.close()
        await group.barrier()
        return seen

    simulation = Simulation(SIZE, seed=seed, conditions=SLOW)
    outcomes = simulation.run(program)
    assert all(isinstance(outcome, int) for outcome in outcomes), outcomes
    assert any(outcomes)  # somebody was given a group that had been revoked by then
    assert simulation.loop.time() < 5.0  # not at a deadline


@pytest.mark.parametrize("name", sorted(MADE))
def test_of_a_group_that_is_revoked_none_is_made(name):
    async def program(group: aiodist.Group) -> bool:
        part = await group.dup()
        if part.rank == 1:
            part.revoke()
        with pytest.raises(aiodist.GroupRevokedError):
            while True:
                await (await MADE[name](part)).close()
        await group.barrier()
        return True

    assert Simulation(SIZE, conditions=SLOW).run(program) == [True] * SIZE
