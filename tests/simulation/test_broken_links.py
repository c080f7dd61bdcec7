"""A connection that breaks between two living ranks, at any byte: nothing is lost, nothing doubled."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

import aiodist
from aiodist.testing import Conditions, Simulation

SMALL, MIDDLE, LARGE = 5, 3_000, 120_000
"""Elements of float64: frames of 4 KiB are copied, 256 KiB are one frame, and more is lent."""


async def collectives(group: aiodist.Group) -> list[Any]:
    """All kinds of operations, and what came of them."""
    found: list[Any] = []
    size, rank = group.size, group.rank
    for length in (SMALL, MIDDLE, LARGE):
        x = np.arange(length, dtype=np.float64) + rank
        await group.all_reduce(x)
        found.append(x)
        x[:] = -1.0  # the memory is ours again
        x[:] = np.arange(length) * (1 + (rank == 0))
        await group.broadcast(x, 0)
        found.append(x.copy())
        out = await group.all_gather(np.full(length, rank))
        found.append(np.concatenate(out))
        parts = await group.all_to_all([np.full(length, rank * size + to) for to in range(size)])
        found.append(np.concatenate(parts))
        x[:] = 0.0
    await group.barrier()
    return [(array.shape, float(array.sum())) for array in found]


async def messages(group: aiodist.Group) -> list[Any]:
    """Every rank sends numbered messages to every other, of all sizes."""
    others = [rank for rank in range(group.size) if rank != group.rank]

    async def give(dst: int) -> None:
        for number in range(24):
            x = np.full((SMALL, MIDDLE, LARGE)[number % 3], float(number))
            await group.send(x, dst)
            x[:] = -1.0

    async def take(src: int) -> list[float]:
        return [float(np.unique(await group.recv(src=src)).item()) for _ in range(24)]

    outcomes = await asyncio.gather(*map(give, others), *map(take, others))
    return list(outcomes[len(others) :])


PROGRAMS = {"collectives": collectives, "messages": messages}
QUICK = Conditions(delay=(20e-6, 200e-6), loss=0.0)


def outcome(program: Any, seed: int, at: int, *, arrived: bool, size: int) -> tuple[list[Any], int]:
    simulation = Simulation(size, seed=seed, conditions=QUICK, lease=5.0, op_timeout=30.0)
    network = simulation.network
    if at:
        network.break_after(simulation.nodes[0], simulation.nodes[1], at, arrived=arrived)
    outcomes = simulation.run(program)
    for found in outcomes:
        if isinstance(found, BaseException):
            raise found
    return outcomes, network.broken


@pytest.mark.parametrize("arrived", [False, True], ids=["in flight", "arrived"])
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("size", [2, 3])
def test_a_link_that_breaks_at_byte_k(name, arrived, size):
    program = PROGRAMS[name]
    expected, _ = outcome(program, 0, 0, arrived=arrived, size=size)
    broken = 0
    ats = [*range(1, 1500, 97), *(int(1500 * 1.5**step) for step in range(20))]
    for seed, at in enumerate(ats):
        found, breaks = outcome(program, seed, at, arrived=arrived, size=size)
        assert found == expected, f"broken at byte {at}"
        broken += breaks
    assert broken > len(ats) // 2
