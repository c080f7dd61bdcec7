"""Operators of the user run in the context of their call: its contextvars, and what numpy warns
of, are those of the caller, whoever has the operation go on."""

from __future__ import annotations

import asyncio
from contextvars import ContextVar

import numpy as np
import pytest

from aiodist import ReduceOp

pytestmark = pytest.mark.strength(2)

SIZE = 3
VALUES = {"small": np.ones(4), "large": np.ones(40_009), "number": 1.0}
CALLS = {
    "all_reduce": lambda g, x, op: g.all_reduce(x, op),
    "all_reduce tag": lambda g, x, op: g.all_reduce(x, op, tag="t"),
    "reduce": lambda g, x, op: g.reduce(x, 1, op),
    "reduce_scatter": lambda g, x, op: g.reduce_scatter([x] * SIZE, op),
    "scan": lambda g, x, op: g.scan(x, op),
    "exscan": lambda g, x, op: g.exscan(x, op),
}

CALLER: ContextVar[str] = ContextVar("CALLER", default="nobody")


def listening(seen):
    """An operator that adds, and notes in which context."""

    def add(a, b):
        seen.append(CALLER.get())
        return a + b

    return ReduceOp.custom(add, name="adds")


async def each_by_a_task(ranks, start):
    """`start` of each rank, called by a task that has a context of its own, the last rank last: who
    called in which contexts, by rank. The Works are awaited by a task that called none."""
    seen = {group.rank: [] for group in ranks}

    async def call(group):
        CALLER.set(f"rank {group.rank}")
        return start(group, listening(seen[group.rank]))

    works = [await asyncio.create_task(call(group)) for group in ranks]
    await asyncio.gather(*works)
    return seen


def check(seen):
    assert any(seen.values())
    for rank, callers in seen.items():
        assert {*callers} <= {f"rank {rank}"}


@pytest.mark.parametrize("name", sorted(CALLS))
@pytest.mark.parametrize("value", sorted(VALUES))
def test_the_context_of_the_call(run, groups, name, value):
    async def main():
        async with groups(SIZE) as ranks:
            await asyncio.gather(*[group.barrier() for group in ranks])

            def start(group, op):
                x = VALUES[value]
                return CALLS[name](group, x if value == "number" else x.copy(), op)

            for _ in range(3):
                check(await each_by_a_task(ranks, start))

    run(main())


def test_what_numpy_warns_of(run, groups):
    """numpy keeps that in a context variable."""

    async def main():
        async with groups(2) as ranks:
            op = ReduceOp.custom(lambda a, b: a / (b - b), name="divides")
            with np.errstate(all="ignore"):
                work = ranks[0].all_reduce(np.ones(3), op)
            with np.errstate(all="raise"):
                other = ranks[1].all_reduce(np.ones(3), op)
            found = await asyncio.gather(work, other, return_exceptions=True)
            assert not isinstance(found[0], FloatingPointError)

    run(main())
