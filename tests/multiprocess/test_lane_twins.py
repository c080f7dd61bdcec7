"""Random programs of collectives without a tag between processes, with and without the compiled
part."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import numpy as np
import pytest

import aiodist
from aiodist import Group, ReduceOp
from aiodist.buffers.segment import unsupported_reason
from aiodist.prepared import tapes
from aiodist.prepared.express import _COMPILED
from aiodist.shared_memory.board import LEAST_IN_ROUND, SMALL
from aiodist.transports.polling import cores

pytestmark = pytest.mark.skipif(unsupported_reason() is not None, reason=str(unsupported_reason()))

SIZES = [
    8, 2000, LEAST_IN_ROUND - 8, LEAST_IN_ROUND, 64 * 1024, 64 * 1024 + 8, 100_000, SMALL // 2,
    SMALL, SMALL + 8, 2 * SMALL + 16,
]  # fmt: skip
"""Bytes, around every border at which arrays go to another place in shared memory."""


def given(rank: int, step: int, length: int) -> Any:
    """What a rank gives. All sums of it are exact."""
    return np.arange(length) % 89 * (rank + 1.0) + step


async def call(
    group: Group, op: str, length: int, step: int, *, has_out: bool, shows: bool
) -> None:
    xs = [given(rank, step, length) for rank in range(group.size)]
    x, rank, root = xs[group.rank].copy(), group.rank, step % group.size
    out = np.zeros_like(x) if has_out else None
    if op == "all_reduce":
        found, expected = await group.all_reduce(x, out=out), sum(xs)
    elif op == "shared":
        # Ranks decide alone whether the others may read an array in place, until it is dropped.
        x = group.empty(length, np.float64) if shows else np.empty(length)
        x[:] = xs[rank]
        found, expected = await group.all_reduce(x), sum(xs)
    elif op == "list":
        parts = await group.all_reduce([part.copy() for part in np.array_split(x, 3)])
        found, expected = np.concatenate(parts), sum(xs)
    elif op == "max":
        found, expected = await group.all_reduce(x, ReduceOp.MAX, out=out), np.max(xs, axis=0)
    elif op == "scan":
        found, expected = await group.scan(x, out=out), sum(xs[: rank + 1])
    elif op == "reduce":
        found = await group.reduce(x, root, out=out if rank == root else None)
        expected = sum(xs) if rank == root else None
    elif op == "reduce_scatter":
        slots = [x + number for number in range(group.size)]
        found, expected = await group.reduce_scatter(slots, out=out), sum(xs) + group.size * rank
    elif op == "broadcast":
        found, expected = await group.broadcast(x, root), xs[root]
    else:
        found, expected = np.array(await group.all_gather(x)), np.array(xs)
    assert (found is None) == (expected is None)
    assert np.array_equal(found, expected), (op, length, step)


OPS = [
    "all_reduce", "all_reduce", "shared", "list", "max", "scan", "reduce", "reduce_scatter",
    "broadcast", "gather",
]  # fmt: skip


async def program(group: Group, seed: int, without: tuple[int, ...], steps: int) -> int:
    while await group.all_reduce(int(group._context.lane is None)):
        pass  # shared memory is set up beside the first calls
    assert group._context.lane.goes_round == (cores() > 1)
    if group.rank in without:
        tapes.core = None
        ways = group._context.express
        vars(ways).update({name: getattr(type(ways), name).__get__(ways) for name in _COMPILED})
    rng, late = random.Random(seed), random.Random(seed * 2 + group.rank)
    kinds = [(op, rng.choice(SIZES) // 8, rng.random() < 0.4) for op in OPS]
    for step in range(steps):
        op, length, has_out = rng.choice(kinds)
        for again in range(rng.choice([1, 1, 3, 40])):
            sum(range(late.choice([0, 0, 0, 1000, 30_000])))
            shows = late.random() < 0.5
            await call(group, op, length, step + again, has_out=has_out, shows=shows)
        if rng.random() < 0.2:  # several at once, which wait for their turn
            xs = [given(group.rank, number, length) for number in range(4)]
            works = [group.all_reduce(x) for x in xs]
            for work in works:
                await work
            for number, x in enumerate(xs):
                assert np.array_equal(x, sum(given(r, number, length) for r in range(group.size)))
    return steps


@pytest.mark.timeout(120)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("without", [(), (1,), (0, 1)])
@pytest.mark.sample(2)
def test_collectives_are_alike_with_and_without_the_compiled_part(
    without: tuple[int, ...], seed: int
) -> None:
    run = partial(program, seed=seed, without=without, steps=40)
    assert aiodist.run(run, nprocs=2) == [40, 40]
