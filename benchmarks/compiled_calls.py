"""Calls by the compiled part beside those by Python: ``python -m benchmarks.compiled_calls``

Both run in turns, each in processes of their own. The table has microseconds: the shortest tenth of
the calls, which shows what a call costs, and the median, which shows your machine as it is.
"""

from __future__ import annotations

import argparse
import itertools
import os
import time
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np

import aiodist
from aiodist import Group, compiled

SIZES = {8: 2000, 64 << 10: 1000, 1 << 20: 100}
"""Bytes of an array, and how many calls are measured in a turn."""
CALLS: dict[str, Callable[[Group, Any, str | None], Awaitable[Any]]] = {
    "all_reduce": lambda group, x, tag: group.all_reduce(x, tag=tag),
    "all_gather": lambda group, x, tag: group.all_gather(x, tag=tag),
    "broadcast": lambda group, x, tag: group.broadcast(x, 0, tag=tag),
    "all_to_all": lambda group, x, tag: group.all_to_all([x] * group.size, tag=tag),
    "reduce": lambda group, x, tag: group.reduce(x, 0, tag=tag),
}
MESSAGES = {
    "sendrecv": lambda group, x, tag: group.sendrecv(
        x, (group.rank + 1) % group.size, src=(group.rank - 1) % group.size, out=x
    ),
    "one way": lambda group, x, tag: one_way(group, x),
    "a task each": lambda group, x, tag: a_task_each(group, x),
}
"""Around the ring of all ranks, one message after the other from rank 0 to rank 1, and one task for
each other rank, which asks rank 0 for it."""
ARRAYS = {f"layer {number}": np.ones(100, np.float32) for number in range(100)}
VALUES = {
    "a dict there and back": lambda group, x, tag: there_and_back(group, metrics()),
    "and of an array": lambda group, x, tag: there_and_back(
        group, metrics() | {"x": ARRAYS["layer 0"]}
    ),
    "all_reduce of 100 arrays": lambda group, x, tag: group.all_reduce([*ARRAYS.values()]),
    "broadcast of tokens": lambda group, x, tag: group.broadcast(
        {"step": next(STEPS), "tokens": [*range(next(STEPS) % 999)]} if group.rank == 0 else None
    ),
    "broadcast of 100 arrays": lambda group, x, tag: group.broadcast(
        ARRAYS if group.rank == 0 else None
    ),
}
"""Calls with dicts and lists, of one size."""
METRICS = {
    "all_gather of numbers": lambda group, x, tag: group.all_gather(metrics(), tag=tag),
    "and of a string": lambda group, x, tag: group.all_gather(
        metrics() | {"at": f"{next(STEPS):8}"}, tag=tag
    ),
}
"""Calls with values that change each time."""
STEPS = itertools.count()
CASES = [*((op, None) for op in (*CALLS, *MESSAGES)), ("all_reduce", "loss")]

Case = tuple[str, str | None, int]


def metrics() -> dict[str, float]:
    """What ranks tell each other of a step."""
    return {"loss": 1 / (1 + next(STEPS)), "step": next(STEPS)}


def one_way(group: Group, x: Any) -> Awaitable[Any]:
    """Send `x` to rank 1, and receive it there. The other ranks do nothing."""
    if group.rank == 0:
        return group.send(x, 1)
    return group.recv(src=0, out=x) if group.rank == 1 else nothing()


async def there_and_back(group: Group, value: Any) -> None:
    """Send `value` from rank 0 to rank 1, and what rank 1 has back. The other ranks do nothing."""
    if group.rank == 0:
        await group.send(value, 1)
        await group.recv(src=1)
    elif group.rank == 1:
        await group.recv(src=0)
        await group.send(value, 0)


async def a_task_each(group: Group, x: Any) -> None:
    """Ask rank 0 for a task and receive it, or as rank 0 receive from any rank and answer."""
    if group.rank:
        await group.send(x, 0)
        await group.recv(src=0, out=x)
        return
    for _ in range(group.size - 1):
        request = group.recv(out=x)
        await request
        await group.send(x, request.source)


async def nothing() -> None:
    """Neither send nor receive."""


def cases() -> list[Case]:
    """The calls, with their tags and the bytes of their arrays."""
    each = [(op, tag, nbytes) for op, tag in CASES for nbytes in SIZES]
    return [*each, *((op, None, 8) for op in (*VALUES, *METRICS))]


async def measured(group: Group) -> dict[Case, list[float]]:
    """Seconds of each call on this rank."""
    found: dict[Case, list[float]] = {}
    for op, tag, nbytes in cases():
        call, x = {**CALLS, **MESSAGES, **VALUES, **METRICS}[op], np.ones(nbytes // 8)
        times = found[op, tag, nbytes] = []
        await group.barrier()
        for number in range(SIZES[nbytes] + 20):
            x.fill(1)
            start = time.perf_counter()
            await call(group, x, tag)
            if number >= 20:  # the first ones are prepared
                times.append(time.perf_counter() - start)
    return found


def main() -> None:
    """Measure both, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-n", type=int, default=2, help="ranks")
    parser.add_argument("--turns", type=int, default=3)
    given = parser.parse_args()
    if compiled.core is None:
        raise SystemExit(f"the compiled part is not in use: {compiled.reason}")
    times: dict[tuple[str, Case], list[float]] = {}
    for _ in range(given.turns):
        for how in ("compiled", "python"):
            os.environ["AIODIST_CORE"] = "" if how == "compiled" else how
            first, *_ = aiodist.run(measured, nprocs=given.n)
            for case, seconds in first.items():
                times.setdefault((how, case), []).extend(seconds)
    print(f"{given.n} ranks, microseconds: shortest tenth, median")
    print(f"{'':24}{'bytes':>9}{'compiled':>18}{'python':>18}{'times as fast':>16}")
    for case in cases():
        op, tag, nbytes = case
        both = [np.percentile(times[how, case], [10, 50]) * 1e6 for how in ("compiled", "python")]
        shown = "".join(f"{low:9.1f}{median:9.1f}" for low, median in both)
        ratios = both[1] / both[0]
        name = op if tag is None else f"{op}, tag"
        print(f"{name:24}{nbytes:>9,}{shown}{ratios[0]:8.1f}{ratios[1]:8.1f}")


if __name__ == "__main__":
    main()
