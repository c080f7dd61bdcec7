"""Collectives whose plans are as those of huge arrays: not all of their steps are written down."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from aiodist import ReduceOp
from aiodist.schedules import script

LENGTH = 2_500_003
"""Of int32: some 10 MB, which go in dozens of pieces."""


@pytest.mark.parametrize("transport", ["shm", "tcp", "hosts"], indirect=True)
async def test_results_are_those_of_plans_that_are_listed(
    groups: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = 0
    move = script._moved

    def moved(*args: Any) -> Any:
        nonlocal made
        made += 1
        return move(*args)

    monkeypatch.setattr(script, "LISTED", 0)
    monkeypatch.setattr(script, "_moved", moved)
    size = 3
    rows = np.random.default_rng(0).integers(-1000, 1000, (size, LENGTH), np.int32)
    total = rows.sum(0, dtype=np.int32)
    parts = [np.array_split(row, size) for row in rows]

    async def member(group: Any) -> None:
        rank, own = group.rank, rows[group.rank]
        x = own.copy()
        await group.all_reduce(x)
        assert np.array_equal(x, total)
        x = own.copy()
        reduced = await group.reduce(x, 1)
        assert rank != 1 or np.array_equal(reduced, total)
        slices = await group.reduce_scatter(own.copy())
        assert np.array_equal(slices, np.array_split(total, size)[rank])
        assert np.array_equal(await group.broadcast(own if rank == 2 else None, 2), rows[2])
        gathered = await group.all_gather(own[: LENGTH - 1000 * rank])
        assert all(np.array_equal(g, rows[r, : LENGTH - 1000 * r]) for r, g in enumerate(gathered))
        received = await group.all_to_all(parts[rank])
        assert all(np.array_equal(part, parts[r][rank]) for r, part in enumerate(received))
        x = own.copy()
        await group.scan(x, ReduceOp.SUM)
        assert np.array_equal(x, rows[: rank + 1].sum(0, dtype=np.int32))
        found = await group.gather(own, 0)
        assert rank or all(np.array_equal(part, rows[r]) for r, part in enumerate(found))

    async with groups(size) as ranks:
        await asyncio.gather(*map(member, ranks))
    assert made > 30, f"{made} steps were made: all others were written down"
