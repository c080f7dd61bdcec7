"""Groups that span hosts: some ranks give arrays on a device, and others arrays of the host."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterator

import numpy as np
import pytest
from standin import StandinDevice

PATTERNS = [
    ("aabb", "ddhh"), ("aabb", "hhdd"), ("aabb", "ddhd"), ("aabb", "dhdh"), ("abab", "dhdh"),
    ("aab", "ddh"), ("aab", "hhd"), ("aab", "dhd"), ("aabbcc", "ddddhh"), ("aabbcc", "ddhddd"),
    ("aabb", "dddd"), ("aab", "ddd"),
]  # fmt: skip
"""The hosts of the ranks, and whose arrays are on a device (d), and whose on the host (h): where
all ranks of a host have theirs on devices, where they do not, and where all ranks do."""

OPERATIONS = {
    "all_reduce": lambda g, x: g.all_reduce(x),
    "reduce": lambda g, x: g.reduce(x, g.size - 1),
    "reduce_scatter": lambda g, x: g.reduce_scatter(x),
    "scan": lambda g, x: g.scan(x),
}


@pytest.fixture
def device() -> Iterator[StandinDevice]:
    made = StandinDevice()
    yield made
    made.close()


def due(name: str, xs: list[np.ndarray], rank: int) -> np.ndarray | None:
    if name == "scan":
        return np.sum(xs[: rank + 1], axis=0)
    if name == "reduce_scatter":
        return np.array_split(np.sum(xs, axis=0), len(xs))[rank]
    if name == "reduce" and rank != len(xs) - 1:
        return None
    return np.sum(xs, axis=0)


@pytest.mark.strength(2)
@pytest.mark.parametrize(("layout", "pattern"), PATTERNS)
@pytest.mark.parametrize("length", [7, 70_001])
@pytest.mark.sample(8)
def test_one_rank_hears_late_of_it(
    run: Callable[[Awaitable[None]], None],
    on_hosts: Callable,
    device: StandinDevice,
    layout: str,
    pattern: str,
    length: int,
) -> None:
    """Whatever the others do meanwhile, it does not take for what it waits for."""
    xs = [
        np.random.default_rng(rank).integers(0, 9, length, np.int32) for rank in range(len(layout))
    ]

    def put(rank: int) -> object:
        return device.put(xs[rank]) if pattern[rank] == "d" else xs[rank].copy()

    async def main() -> None:
        async with on_hosts(layout) as ranks:
            for late, name in itertools.product(range(len(layout)), OPERATIONS):
                works = []
                endpoint, context = ranks[late]._actor.endpoint, ranks[late]._context
                # What comes for the group is kept, as before the group was made.
                endpoint.inboxes.open.pop(context.id)
                for group in ranks:
                    works.append(OPERATIONS[name](group, put(group.rank)))
                    for _ in range(30):
                        await asyncio.sleep(0)
                    context.lane.kicked()  # its mates may have come as far as it waits for
                endpoint.add(context)
                for rank, got in enumerate(await asyncio.gather(*works)):
                    expected = due(name, xs, rank)
                    if expected is None:
                        assert got is None
                    else:
                        if pattern[rank] == "d":
                            got = device.get(got)
                        np.testing.assert_array_equal(got, expected, f"{name}, rank {rank}")

    run(main())
