"""Small operations of every kind beside all_reduce: awaited one by one, tagged, and many at once.

An order of `aiodist_cli.bench_rank`. Rounds of all kinds take turns, and of each the fastest
counts: the machine may be busy with other things meanwhile. Every other round has
them in the opposite order, for what comes behind another finds memory that the other has left.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import numpy as np

from aiodist import Group
from aiodist_cli.bench_rank import Rank

CALLS = 100
"""Operations of a round."""
SIZES = {"8 B": 8, "64 KiB": 64 << 10, "1 MiB": 1 << 20, "16 MiB": 16 << 20}
"""Of tagged operations."""

Start = Callable[[Group, Any], Awaitable[Any]]


def slot(nbytes: int, size: int) -> Any:
    """An array that is the first slot of its base, which has one for each of so many ranks."""
    length = -(-nbytes // 8)
    return np.zeros(length * size)[:length]


TAGGED: dict[str, Callable[..., Awaitable[Any]]] = {
    "all_reduce": lambda g, x, tag=None: g.all_reduce(x, tag=tag),
    "broadcast": lambda g, x, tag=None: g.broadcast(x if g.rank == 0 else None, 0, tag=tag),
    "all_gather": lambda g, x, tag=None: g.all_gather(x, tag=tag),
    "all_to_all": lambda g, x, tag=None: g.all_to_all([x] * g.size, tag=tag),
    "reduce_scatter": lambda g, x, tag=None: g.reduce_scatter(x.base, tag=tag),
}
"""Operations that are called without a tag and with one, in `SIZES`: of each slot, where there are
several."""
KINDS: dict[str, Start] = {
    "broadcast": lambda g, x: g.broadcast(x if g.rank == 0 else None, 0),
    "broadcast in place": lambda g, x: g.broadcast(x, 0),
    "all_gather": lambda g, x: g.all_gather(x),
    "reduce": lambda g, x: g.reduce(x, 0),
    "barrier": lambda g, x: g.barrier(),
    "reduce_scatter": lambda g, x: g.reduce_scatter(x.base),
    "gather": lambda g, x: g.gather(x, 0),
    "scatter": lambda g, x: g.scatter([x] * g.size if g.rank == 0 else None, 0),
    "all_to_all": lambda g, x: g.all_to_all([x] * g.size),
    "all_reduce of a number": lambda g, x: g.all_reduce(1.0),
    "broadcast of a small tree": lambda g, x: g.broadcast(
        {"a": x, "b": 3} if g.rank == 0 else None, 0
    ),
}


async def small(rank: Rank, rounds: int) -> dict[str, dict[str, float]]:
    """By case: "wall", seconds of one operation, and "cpu", processor time of this rank for it."""
    group = rank.group
    cases: dict[str, tuple[Callable[[], Awaitable[None]], int]] = {}

    def add(name: str, start: Start, nbytes: int, count: int = CALLS, at_once: int = 1) -> None:
        x = slot(nbytes, group.size)
        arrays = [np.zeros(nbytes // 8) for _ in range(at_once if at_once > 1 else 0)]

        async def run() -> None:
            for _ in range(0 if arrays else count):
                await start(group, x)
            if arrays:
                await asyncio.gather(*[start(group, each) for each in arrays])
                # What it gathers is held by the step of the task that it has woken, and freed with
                # the next turn of the loop, which calls that are done within themselves do not ask
                # for. A thousand take 0.2 ms for that: a third of the 100 calls that come next.
                await asyncio.sleep(0)

        cases[name] = run, at_once if arrays else count

    # Small ones first: what is large, or a thousand, leaves caches in which nothing of them is.
    tags = iter(range(1 << 60))
    for name, nbytes in SIZES.items():
        count = max(4, CALLS // (1 + nbytes // 8192))
        for op, start in TAGGED.items():
            add(f"{op} {name}", start, nbytes, count)
            add(f"{op} {name}, tagged", partial(start, tag="t"), nbytes, count)
        if nbytes > 8:
            continue
        for op, start in KINDS.items():
            add(op, start, 8)
        for many in (100, 1000):
            case = f"all_reduce 8 B, {many} at once"
            add(case, lambda g, x: g.all_reduce(x), 8, at_once=many)
            add(f"{case}, tagged", lambda g, x: g.all_reduce(x, tag=f"t{next(tags) % 1000}"), 8,
                at_once=many)  # fmt: skip
    found: dict[str, dict[str, float]] = {}
    first, _ = next(iter(cases.values()))
    for turn in range(rounds + 1):
        await first()  # not timed: it comes behind a thousand at once, which take the caches
        for name, (run, count) in list(cases.items())[:: -1 if turn % 2 else 1]:
            await group.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            await run()
            now = {
                "wall": (time.perf_counter() - wall) / count,
                "cpu": (time.process_time() - cpu) / count,
            }
            if turn:  # the first one prepares
                best = found.setdefault(name, now)
                found[name] = {key: min(best[key], now[key]) for key in now}
    return found
