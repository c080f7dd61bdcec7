"""Ranks that share a core although another one is free."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import numpy as np
import pytest

import aiodist
from aiodist import Group, compiled
from aiodist.transports import polling

pytestmark = pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity") or polling.cores() < 2, reason="needs two cores of Linux"
)


async def by_messages(group: Group, x: Any) -> None:
    """Exchange arrays, without a collective."""
    other = 1 - group.rank
    await group.sendrecv(x, other, src=other, out=x)


async def by_collectives(group: Group, x: Any) -> None:
    await group.all_reduce(x)


async def main(group: Group, call: Any = by_collectives) -> tuple[list[Any], bool]:
    """Go to one core again and again, until a rank leaves it by itself."""
    moves: list[Any] = []
    place, allowed = os.sched_setaffinity, os.sched_getaffinity(0)

    def noted(thread: int, to: Any) -> None:
        moves.append(to)
        place(thread, to)

    os.sched_setaffinity = noted
    polling.Neighbours.compute = lambda self, now: False  # type: ignore[method-assign]
    x, other = np.ones(1), 1 - group.rank
    # Each tells the other one by a message, so that no collective has parted them.
    while not len(moves) + await group.sendrecv(len(moves), other, src=other):
        place(0, {min(allowed)})
        place(0, allowed)
        for _ in range(100):
            await call(group, x)
    return moves, os.sched_getaffinity(0) == allowed


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("core", "call"), [("", by_collectives), ("python", by_collectives), ("", by_messages)]
)
@pytest.mark.sample(1)
def test_the_last_one_moves_to_another_core(
    monkeypatch: pytest.MonkeyPatch, core: str, call: Any
) -> None:
    if call is by_messages and compiled.core is None:
        pytest.skip("the Python code does not say on which core it waits for messages")
    monkeypatch.setenv("AIODIST_CORE", core)
    (first, kept), (moves, kept_too) = aiodist.run(partial(main, call=call), nprocs=2)
    assert not first
    (to, back), *_ = zip(moves[::2], moves[1::2], strict=True)
    # Linux may have put both on another core meanwhile, so it is not known which core is the other.
    assert len(to) == 1
    assert to < back == os.sched_getaffinity(0)
    assert kept
    assert kept_too
