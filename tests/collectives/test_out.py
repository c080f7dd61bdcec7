"""`out=`: the result goes there, whatever its form, and the input stays as it was."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

pytestmark = pytest.mark.strength(2)

OPS = ["all_reduce", "reduce", "scan", "reduce_scatter"]
SIZES = [8, 1_000, 20_000, 150_000, 450_000]
"""Elements of float64, for each way that calls take in shared memory."""


async def prepared(ranks):
    """Make calls until the ranks share memory, because only then calls are prepared."""
    async with asyncio.timeout(20):
        while not all(group._context.express for group in ranks):
            await asyncio.gather(*[group.barrier() for group in ranks])


def expected(op, rank, size):
    """What rank `rank` gets if each rank gives its number + 1. None: nothing."""
    if op == "reduce" and rank:
        return None
    return sum(range(1, (rank if op == "scan" else size - 1) + 2))


@pytest.mark.parametrize("transport", ["shm"])
@pytest.mark.parametrize("tag", [None, "a"])
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("form", ["a list of one array", "another byte order"])
def test_out(run, groups, transport, form, op, tag):
    async def main():
        async with groups(2) as ranks:
            await prepared(ranks)
            for length in SIZES:
                for _ in range(4):  # the first ones are not prepared
                    await asyncio.gather(*[call(group, length) for group in ranks])

    async def call(group, length):
        x, dtype = np.full(length, group.rank + 1.0), np.dtype(float)
        if form == "another byte order":
            dtype = dtype.newbyteorder()
        gets = expected(op, group.rank, group.size)
        out = np.zeros(length // 2 if op == "reduce_scatter" else length, dtype)
        listed = form == "a list of one array" and op != "reduce_scatter"
        given, place = ([x], [out]) if listed else (x, out)
        await getattr(group, op)(given, out=place if gets else None, tag=tag)
        assert (out == (gets or 0)).all(), (length, out[:3])
        assert (x == group.rank + 1).all(), length

    run(main())
