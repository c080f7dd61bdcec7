"""What aiodist alone is asked: how its loop turns while the group works, and what waiting costs.

These are orders of `aiodist_cli.bench_rank`: called in each rank, from inside of its loop.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

from aiodist_cli import bench_worker
from aiodist_cli.bench_rank import Rank
from aiodist_cli.bench_worker import FLOAT, layout


async def late(
    rank: Rank, period: float, seconds: float, op: str, nbytes: int, iterations: int
) -> dict[str, Any]:
    """How late a timer is, in ns, while the loop is idle for `seconds`, or busy with iterations."""
    prepared = await rank.prepare(op, nbytes)  # before the ticker: it blocks the loop
    stop = asyncio.Event()
    ticks = asyncio.create_task(ticker(period, stop))
    if iterations:
        await rank.repeat(prepared, iterations)
    else:
        await asyncio.sleep(seconds)
    stop.set()
    return {"late": await ticks}


async def idle(rank: Rank, seconds: float) -> dict[str, Any]:
    """The share of a core that a pending `recv` takes."""
    group = rank.group
    await group.barrier()
    message = group.recv(src=(group.rank - 1) % group.size)
    cpu, wall = time.process_time(), time.perf_counter()
    await asyncio.sleep(seconds)
    share = (time.process_time() - cpu) / (time.perf_counter() - wall)
    await group.send(0, (group.rank + 1) % group.size)
    await message
    return {"share": share}


async def memory(rank: Rank, nbytes: int) -> dict[str, Any]:
    """Bytes by which the resident set grows beyond the array during an all_reduce."""
    group, library = rank.group, rank.library
    x = library.empty(nbytes // FLOAT)
    library.view(x).fill(group.rank + 1)
    await group.barrier()
    _reset_peak()
    before = _status("VmRSS")
    await group.all_reduce(x)
    growth = _status("VmHWM") - before
    bench_worker.check("all_reduce", library.view(x), layout("all_reduce", 4, 0, group.size).result)
    return {"growth": growth}


async def ticker(period: float, stop: asyncio.Event) -> list[int]:
    """How late, in ns, each tick of a fixed schedule was, until `stop` and one tick more.

    Ticks that a busy loop missed are late as well, each by its own due time, so that one long
    stall counts as often as a timer would have hit it.
    """
    late: list[int] = []
    clock, step = time.perf_counter_ns, int(period * 1e9)
    due = clock() + step
    while True:
        last = stop.is_set()
        await asyncio.sleep(max(0, due - clock()) / 1e9)
        late.append(clock() - due)
        due += step
        if last:
            return late


def _reset_peak() -> None:
    """Let VmHWM start anew, see proc(5)."""
    Path("/proc/self/clear_refs").write_text("5")


def _status(field: str) -> int:
    """Bytes of a field of /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}: memory is measured on Linux only")
