"""Receives from any rank: messages between processes, with and without the compiled part."""

from __future__ import annotations

import random
from functools import partial

import numpy as np
import pytest

import aiodist
from aiodist import ANY_TAG, Group
from aiodist.buffers.segment import unsupported_reason


def busy(rng: random.Random) -> None:
    """Compute, so that one side is late."""
    sum(range(rng.choice([0, 0, 10, 1000, 20_000])))


async def farm(group: Group, seed: int, without: tuple[int, ...], tasks: int) -> list[int]:
    """Rank 0 gives each worker a new task as soon as it has the result of the last one."""
    express = group._context.p2p_express
    if group.rank in without:
        for name in ("send", "recv"):
            vars(express).pop(name, None)
    rng, late = random.Random(seed), random.Random(seed * 8 + group.rank)
    size = rng.choice([1, 3, 600, 9000])
    by_tag, has_out = rng.random() < 0.5, rng.random() < 0.5
    if group.rank:
        await group.send(np.zeros(size, int), 0, tag="result")
        done = 0
        while (task := await group.recv(src=0))[0]:
            busy(late)
            done += 1
            await group.send(task, 0, tag="result")
        return [done]
    out = np.zeros(size, int) if has_out else None
    given, last = [0] * group.size, [0] * group.size
    for number in range(1, tasks + 2 * group.size):
        work = group.irecv(out=out, tag="result" if by_tag else ANY_TAG)
        result = await work
        worker = work.source
        assert (result == last[worker]).all(), (worker, number)
        assert work.tag == "result"
        last[worker] = task = number if number <= tasks else 0
        await group.send(np.full(size, task), worker)
        given[worker] += task > 0
        if number == tasks + group.size - 1:
            break
    return given


@pytest.mark.long
@pytest.mark.parametrize(
    ("size", "without", "transport"),
    [(2, (), "shm"), (4, (), "shm"), (5, (0,), "shm"), (3, (1, 2), "shm"), (4, (), "tcp")],
)
@pytest.mark.sample(2)
def test_a_farm_of_tasks(size: int, without: tuple[int, ...], transport: str) -> None:
    run = partial(farm, seed=size, without=without, tasks=300)
    given, *done = aiodist.run(run, nprocs=size, transports=(transport,))
    assert given[1:] == [each for (each,) in done]
    assert sum(given) == 300


async def only_receives(group: Group) -> tuple[int, int]:
    """Rank 0 sends nothing, but receives from any rank."""
    if group.rank:
        for number in range(60):
            await group.send(np.array([number]), 0)
        await group.barrier()
        return 60, 0
    for _ in range(60 * (group.size - 1)):
        await group.recv()
    found = len(group._context.p2p_express._near)
    await group.barrier()
    return 0, found


@pytest.mark.skipif(unsupported_reason() is not None, reason=str(unsupported_reason()))
def test_links_are_found_by_receiving_alone() -> None:
    """So that the short way can look at them."""
    assert aiodist.run(only_receives, nprocs=4, transports=("shm",))[0] == (0, 3)
