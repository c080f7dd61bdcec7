"""What a subscriber writes to arrays of its user."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from aiodist.buffers.encoding import encode
from aiodist.channels import into
from aiodist.channels.holding import Holding
from aiodist.channels.manifest import Writing
from aiodist.channels.memory import VersionMemory

ARRAYS = 100


def version() -> Holding:
    writing = Writing(encode({f"{at}": np.full(8, at) for at in range(ARRAYS)}), 1)
    memory = VersionMemory(writing.release.nbytes, shared=False)
    release = writing.write(memory.view)
    return Holding.over(release, memory)


@pytest.mark.parametrize(("batch", "writes"), [(1 << 20, 1), (10 * 64, ARRAYS // 10), (1, ARRAYS)])
async def test_small_arrays_are_written_together(
    monkeypatch: pytest.MonkeyPatch, batch: int, writes: int
) -> None:
    """Everything that takes time for each array is done in threads, and each wait takes time."""
    waits = []

    async def in_thread(work: Callable[[], Any]) -> Any:
        waits.append(work)
        return work()

    monkeypatch.setattr(into, "in_thread", in_thread)
    monkeypatch.setattr(into, "BATCH", batch)
    target = {f"{at}": np.full(8, -1) for at in range(ARRAYS)}
    fetch: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    fetch.set_result(version())
    await into.VersionReading(target).in_place(fetch)
    assert [array[-1] for array in target.values()] == [*range(ARRAYS)]
    assert len(waits) == 2 + writes  # first to learn of the arrays, and whether they fit
