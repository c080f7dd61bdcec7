"""Random programs: any collectives, tags and sizes, in another order on each rank, some cancelled,
with arrays of the host or on devices.

Whatever completes is right, nothing hangs, and nothing is left in the engine. The seed is the name
of the test: it replays alone.
"""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict, deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from seeds import seeds
from standin import StandinArray, StandinDevice

import aiodist

pytestmark = pytest.mark.strength(2)

CALLS = 120
SIZES = [0, 1, 5, 1000, 20_000, 60_000, 200_000]


@dataclass(frozen=True)
class Step:
    """One collective of the program, the same on all ranks. `canceller` gives it up (or nobody).
    Ranks in `on_device` give an array on a device. Reductions that are `listed` get a list of
    arrays."""

    number: int
    kind: str
    tag: Any
    size: int
    root: int
    canceller: int | None
    on_device: frozenset[int]
    listed: bool

    def start(self, group: aiodist.Group, device: StandinDevice) -> aiodist.Work[Any]:
        def put(values: Any) -> Any:
            return device.put(values) if group.rank in self.on_device else values

        host = np.full(self.size, float(group.rank + self.number))
        x = put(host)
        options: dict[str, Any] = {"tag": self.tag}
        if self.kind == "reduce":
            options["dst"] = self.root
        match self.kind:
            case "all_gather":
                return group.all_gather(x, **options)
            case "broadcast":
                mine = x if group.rank == self.root else None
                return group.broadcast(mine, self.root, **options)
            case "all_to_all":
                return group.all_to_all([put(host + to) for to in range(group.size)], **options)
            case "barrier":
                return group.barrier(**options)
            case "scan":
                return group.scan(x, **options)
            case name if self.listed:
                slots = group.size if name == "reduce_scatter" else 3
                return getattr(group, name)(
                    [put(part.copy()) for part in np.array_split(host, slots)], **options
                )
            case name:
                return getattr(group, name)(x, **options)

    def is_right(self, result: Any, rank: int, size: int) -> bool:
        total = sum(range(size)) + size * self.number
        match self.kind:
            case "all_gather":
                parts = [(part, src + self.number) for src, part in enumerate(result)]
            case "all_to_all":
                parts = [(part, src + self.number + rank) for src, part in enumerate(result)]
            case "broadcast":
                parts = [(result, self.root + self.number)]
            case "scan":
                parts = [(result, sum(range(rank + 1)) + (rank + 1) * self.number)]
            case "reduce" if rank != self.root:
                return result is None
            case "all_reduce" | "reduce" if self.listed:
                parts = [(part, total) for part in result]
            case "all_reduce" | "reduce" | "reduce_scatter":
                parts = [(result, total)]
            case _:
                return result is None
        return all((_values(part) == expected).all() for part, expected in parts)


def _values(array: Any) -> Any:
    return array.__aiodist_device__.get(array) if isinstance(array, StandinArray) else array


def program(chooser: random.Random, size: int, devices: bool) -> list[Step]:
    kinds = [
        "all_reduce", "all_gather", "broadcast", "reduce_scatter", "all_to_all", "barrier",
        "reduce", "scan",
    ]  # fmt: skip
    return [
        Step(
            number,
            chooser.choice(kinds),
            chooser.choice([None, "a", 1, "1", f"request {number}"]),
            chooser.choice(SIZES),
            chooser.randrange(size),
            chooser.choice([*[None] * 8, chooser.randrange(size)]),
            frozenset(some_ranks(chooser, size) if devices else ()),
            chooser.choice([False, True]),
        )
        for number in range(CALLS)
    ]


def some_ranks(chooser: random.Random, size: int) -> list[int]:
    """All, or none, or any."""
    return chooser.sample(range(size), chooser.choice([0, size, chooser.randrange(size)]))


def order_of(steps: list[Step], chooser: random.Random) -> list[Step]:
    """The order of one rank: that of the program within a tag, another one across tags."""
    by_tag: dict[Any, deque[Step]] = defaultdict(deque)
    for step in steps:
        by_tag[type(step.tag), step.tag].append(step)
    shuffled = sorted(steps, key=lambda step: step.number + chooser.uniform(0, 10))
    return [by_tag[type(step.tag), step.tag].popleft() for step in shuffled]


async def run_rank(
    group: aiodist.Group, steps: list[Step], chooser: random.Random, device: StandinDevice
) -> int:
    """Run the program; returns how many collectives were completed."""
    pending: deque[tuple[Step, aiodist.Work[Any]]] = deque()
    completed = 0

    async def settle() -> int:
        step, work = pending.popleft()
        try:
            result = await work
        except (aiodist.CollectiveAbortedError, asyncio.CancelledError):
            assert step.canceller is not None
            return 0
        assert step.is_right(result, group.rank, group.size), step
        return 1

    for step in order_of(steps, chooser):
        work = step.start(group, device)
        pending.append((step, work))
        if step.canceller == group.rank:
            for _ in range(chooser.randrange(4)):
                await asyncio.sleep(0)
            work.cancel()
        if len(pending) > 20:
            completed += await settle()
    while pending:
        completed += await settle()
    return completed


@pytest.fixture
def device():
    made = StandinDevice()
    yield made
    made.close()


@pytest.mark.parametrize("devices", [False, True])
@pytest.mark.parametrize("seed", seeds(3, 6))
@pytest.mark.sample(6)
def test_random_programs(run, groups, device, seed, devices):
    chooser = random.Random(seed)
    size = chooser.choice([2, 3, 4])
    steps = program(chooser, size, devices)

    async def main():
        async with groups(size) as ranks:
            counts = await asyncio.gather(
                *[run_rank(g, steps, random.Random(f"{seed} {g.rank}"), device) for g in ranks]
            )
            undisturbed = sum(step.canceller is None for step in steps)
            assert min(counts) >= undisturbed
            for group in ranks:
                context = group._context
                assert not context.calls.ops
                assert not context.calls.arrivals.early
                assert not any(context.calls._unsolicited)

    run(main())
