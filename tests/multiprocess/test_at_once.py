"""Large collectives that are under way at once, on a host with more ranks than cores."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import aiodist
from aiodist import Group
from aiodist.transports.polling import cores

LENGTH = 600_000
"""Elements of arrays that take several pieces, so that ranks wait in the midst of an operation."""


def mean(a: Any, b: Any) -> Any:
    """A custom operator, which is carried out in phases of its own."""
    return (a + b) / 2


CALLS: dict[str, Callable[..., Any]] = {
    "all_reduce": lambda group, x, **more: group.all_reduce(x, **more),
    "all_gather": lambda group, x, **more: group.all_gather(x, **more),
    "broadcast": lambda group, x, **more: group.broadcast(x, 0, **more),
    "scan": lambda group, x, **more: group.scan(x, **more),
    "custom": lambda group, x, **more: group.all_reduce(x, mean, **more),
}


async def pairs(group: Group, turns: int) -> str:
    """Each collective with a tag, beside each one without, and beside one of another group."""
    other = await group.dup()
    for tagged in CALLS.values():
        for name, call in CALLS.items():
            for turn in range(turns):
                works = [
                    tagged(group, np.ones(LENGTH), tag="large", timeout=30.0),
                    call(group, np.ones(LENGTH), timeout=30.0),
                ]
                if turn % 2:
                    works.append(call(other, np.ones(LENGTH), timeout=30.0))
                _, found, *_ = await asyncio.gather(*works)
                if name == "all_reduce":
                    assert (found == group.size).all()
    return "done"


@pytest.mark.long
@pytest.mark.timeout(200)
def test_none_gives_way_for_ever() -> None:
    size = max(3, min(2 * cores(), 4))
    assert aiodist.run(pairs, nprocs=size, args=(3,)) == ["done"] * size
