"""Ranks that are far from each other choose by what messages cost there, and all choose alike."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aiodist import Group
from aiodist.schedules.costs import ONE_HOST_TCP, Costs, written
from aiodist.testing import Simulation
from aiodist.testing.wires import Conditions

ONE_WAY = 0.02
FAR = Conditions(
    delay=(ONE_WAY, ONE_WAY), loss=0.0, room=(1 << 24, 1 << 24), largest=1 << 20, short=0.0
)
OF_FAR = ONE_HOST_TCP._replace(alpha=ONE_WAY)
MANY_ROUNDS = ONE_HOST_TCP._replace(frame=1.0, grant=1.0)
SIZE, LENGTH = 8, 20_000


async def reduced(group: Group) -> float:
    """Seconds of an all_reduce that does not go whole in one frame; right, or it raises."""
    x = np.full(LENGTH, group.rank + 1.0)
    await group.all_reduce(x)  # connects
    assert (x == SIZE * (SIZE + 1) / 2).all()
    await group.barrier()
    loop = asyncio.get_running_loop()
    start = loop.time()
    await group.all_reduce(x)
    return loop.time() - start


def played(folder: Path, profiles: dict[int, Costs]) -> float:
    """What it takes the slowest rank, where some ranks were given profiles."""
    simulation = Simulation(SIZE, seed=1, conditions=FAR)

    async def main(rank: int) -> float:
        options: dict[str, Any] = {}
        if rank in profiles:
            options["costs"] = folder / f"{rank}.toml"
            options["costs"].write_text(written(profiles[rank]))
        async with simulation.connecting(rank, **options) as group:
            return await reduced(group)

    outcomes = simulation.play({rank: main(rank) for rank in range(SIZE)})
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return max(outcomes)


def test_a_profile_saves_rounds_where_they_are_dear(tmp_path: Path) -> None:
    # By halves and back: 2 log2 P rounds; directly: two.
    assert played(tmp_path, {}) > 5.5 * ONE_WAY
    assert played(tmp_path, dict.fromkeys(range(SIZE), OF_FAR)) < 2.5 * ONE_WAY


@pytest.mark.parametrize("holder", [0, SIZE - 1])
def test_one_rank_with_a_profile_is_enough(tmp_path: Path, holder: int) -> None:
    assert played(tmp_path, {holder: OF_FAR}) < 2.5 * ONE_WAY


def test_of_different_profiles_that_of_the_lowest_rank_counts(tmp_path: Path) -> None:
    """All choose alike: otherwise no result would be right, and the ranks would wait for ever."""
    assert played(tmp_path, {2: OF_FAR, 5: MANY_ROUNDS}) < 2.5 * ONE_WAY
    assert played(tmp_path, {2: MANY_ROUNDS, 5: OF_FAR}) > 5.5 * ONE_WAY


def test_groups_made_of_a_group_and_the_next_epoch_choose_alike(tmp_path: Path) -> None:
    """Those that have no rank with a profile go by the constants."""
    profile = tmp_path / "costs.toml"
    profile.write_text(written(OF_FAR))
    simulation = Simulation(4, seed=1, conditions=FAR)

    async def main(rank: int) -> list[float]:
        async with simulation.connecting(rank, costs=profile if rank == 1 else None) as group:
            half = await group.split(rank % 2)
            other = await group.rendezvous()
            alphas = [one._context.costs.alpha for one in (group, half, other)]
            total = await other.all_reduce(np.full(LENGTH, 1.0))
            assert (total == 4).all()
            return alphas

    near = ONE_HOST_TCP.alpha
    outcomes = simulation.play({rank: main(rank) for rank in range(4)})
    assert outcomes == [[ONE_WAY, ONE_WAY if rank % 2 else near, ONE_WAY] for rank in range(4)]
