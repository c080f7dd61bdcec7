"""A reduction gives the same bits in each call, whether the ranks share memory by then or not."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from sharing import everyone

from aiodist import Group, ReduceOp

KINDS = [
    *itertools.product(["float32"], [30, 5_000, 70_000, 600_000]),
    *itertools.product(["float16", "complex64"], [30, 9_000, 70_000]),
]
"""The dtypes and lengths of arrays."""
LAYOUTS = ["aaa", "aaaa", "aabb"]


def uneven(a: Any, b: Any) -> Any:
    """Combine two operands. Each other order of all operands gives another result."""
    return a / 2 + b


# What is given `out` leaves the array as it is.
CALLS: dict[str, Callable[..., Any]] = {
    "in place": lambda g, x, **tag: g.all_reduce(x.copy(), **tag),
    "out": lambda g, x, **tag: g.all_reduce(x, out=np.empty_like(x), **tag),
    "mean": lambda g, x, **tag: g.all_reduce(x, ReduceOp.AVG, out=np.empty_like(x), **tag),
    "list": lambda g, x, **tag: g.all_reduce([x[:7].copy(), x[7:].astype("complex128")], **tag),
    "uneven": lambda g, x, **tag: g.all_reduce(x, uneven, out=np.empty_like(x), **tag),
    "reduce": lambda g, x, **tag: g.reduce(x.copy(), 1, **tag),
    "slots": lambda g, x, **tag: g.reduce_scatter(x, **tag),
    "scan": lambda g, x, **tag: g.scan(x.copy(), **tag),
    "exscan": lambda g, x, **tag: g.exscan(x.copy(), uneven, **tag),
}


def bits(result: Any) -> bytes:
    parts = result if isinstance(result, list) else [result]
    return b"".join([part.tobytes() for part in parts if part is not None])


def inputs(ranks: list[Group], dtype: str, length: int) -> list[Any]:
    random = np.random.default_rng(length)
    both = [random.standard_normal(2 * length).astype("f4") for _ in ranks]
    return [x.view("c8") if dtype == "complex64" else x[:length].astype(dtype) for x in both]


async def settled(ranks: list[Group]) -> None:
    """Wait until the ranks share memory."""
    for group in ranks:
        group._context._setup.begin()
    await asyncio.gather(*[group._context._setup._task for group in ranks])
    assert all(group._context.lane for group in ranks)


@pytest.mark.strength(2)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tag", [None, "some"])
@pytest.mark.parametrize("name", CALLS)
async def test_first_and_later_calls(
    on_hosts: Any, name: str, tag: str | None, layout: str
) -> None:
    async with on_hosts(layout, wait=False) as ranks:
        fresh = ranks
        for number, (dtype, length) in enumerate(KINDS):
            xs = inputs(ranks, dtype, length)
            seen = []
            for turn in range(5):
                if turn == 2:
                    await settled(fresh)
                results = await everyone(
                    fresh, lambda g, xs=xs: CALLS[name](g, xs[g.rank], tag=tag)
                )
                seen.append([bits(result) for result in results])
            case = f"{dtype}, {length}"
            assert all(each == seen[0] for each in seen), case
            assert name in ("reduce", "slots", "scan", "exscan") or len(set(seen[0])) == 1, case
            fresh = await everyone(ranks, lambda g, n=number: g.split(0) if n % 2 else g.dup())


@pytest.mark.parametrize("name", CALLS)
async def test_more_calls_at_once_than_there_are_berths(on_hosts: Any, name: str) -> None:
    """Time decides which of the calls get one. The others go over links."""
    async with on_hosts("aaaa") as ranks:
        for dtype, length in KINDS:
            xs = inputs(ranks, dtype, length)
            works = [
                [CALLS[name](group, xs[group.rank], tag=tag) for tag in range(12)]
                for group in ranks
            ]
            seen = [[bits(await work) for work in each] for each in works]
            assert all(len(set(each)) == 1 for each in seen), f"{dtype}, {length}"
