"""A matrix that four ranks hold by rows, three others want by columns: `reshard`, beside what
programs do today with Gloo: gather it on one rank, broadcast it, and let everybody take a part."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

import aiodist
from aiodist_cli.bench_cases import format_seconds, turn
from aiodist_cli.bench_rank import Rank
from aiodist_cli.bench_report import Fact, Report
from aiodist_cli.bench_run import Progress
from aiodist_cli.bench_team import Team
from aiodist_cli.bench_worker import Library

HOLDERS, TAKERS = 4, 3
ROWS, COLUMNS = 8192, 16 * 1024
"""512 MiB of float32."""
TIMES = 3
RATIO = 3.0
"""Of Gloo's time to that of aiodist."""


async def measure(report: Report, teams: Sequence[Team], progress: Progress) -> None:
    """Add the times, and the bytes that aiodist moves, to `report`. The first team is that of
    aiodist, the second that of Gloo. Raises OrderError, TeamError."""
    times: dict[str, list[float]] = {team.contender.name: [] for team in teams}
    for number in range(report.effort.rounds):
        for team in turn(teams, number):
            name = team.contender.name
            progress(f"{name}, round {number + 1} of {report.effort.rounds}")
            function = "resharded" if name == "aiodist" else "gathered"
            answers = await team.order(f"benchmarks.resharding:{function}")
            # Nobody has it before the last one has.
            times[name] += [
                max(runs) for runs in zip(*(a["seconds"] for a in answers), strict=True)
            ]
    own, gloo = (statistics.median(times[team.contender.name]) for team in teams)
    what = f"{ROWS * COLUMNS * 4 >> 20} MiB from {HOLDERS} ranks by rows to {TAKERS} by columns"
    text = f"{format_seconds(own)}, Gloo's gather and broadcast {format_seconds(gloo)}"
    report.facts += [
        Fact(f"{what}: ratio", f"{gloo / own:.1f} ({text})", f"{RATIO:g}", gloo / own >= RATIO),
    ]


def _part(rank: int, size: int, length: int) -> slice:
    return slice(rank * length // size, (rank + 1) * length // size)


def _held(rank: int) -> np.ndarray[Any, Any]:
    """The rows of a rank: each element is the number of its row, and of its column."""
    rows = np.arange(ROWS)[_part(rank, HOLDERS, ROWS)]
    return (rows[:, None] % 1000 + np.arange(COLUMNS) / COLUMNS).astype(np.float32)


def _check(part: np.ndarray[Any, Any], columns: slice) -> None:
    expected = np.arange(ROWS)[:, None] % 1000 + np.arange(COLUMNS)[columns] / COLUMNS
    if not np.array_equal(part, expected.astype(np.float32)):
        raise ValueError("wrong elements arrived")


async def resharded(rank: Rank) -> dict[str, Any]:
    """One rank of aiodist."""
    group, shape, seconds = rank.group, (ROWS, COLUMNS), []
    x = out = None
    if group.rank < HOLDERS:
        x = aiodist.Shard(_held(group.rank), (_part(group.rank, HOLDERS, ROWS),), shape)
    else:
        columns = _part(group.rank - HOLDERS, TAKERS, COLUMNS)
        empty = np.zeros((ROWS, columns.stop - columns.start), np.float32)
        out = aiodist.Shard(empty, (slice(None), columns), shape)
    for _ in range(1 + TIMES):
        await group.barrier()
        begin = time.perf_counter()
        await group.reshard(x, out)
        seconds.append(time.perf_counter() - begin)
    if out is not None:
        _check(out.array, out.index[1])
    return {"seconds": seconds[1:]}


def gathered(library: Library) -> dict[str, Any]:
    """One rank of torch.distributed: the holders gather, and the first broadcasts to the takers."""
    import torch
    import torch.distributed as dist

    holders = dist.new_group(list(range(HOLDERS)))
    takers = dist.new_group([0, *range(HOLDERS, HOLDERS + TAKERS)])
    rank, seconds, part = library.rank, [], None
    held = torch.from_numpy(_held(rank)) if rank < HOLDERS else None
    whole = torch.zeros(ROWS, COLUMNS) if rank == 0 or rank >= HOLDERS else None
    for _ in range(1 + TIMES):
        dist.barrier()
        begin = time.perf_counter()
        if held is not None:
            slots = None
            if whole is not None:
                slots = [whole[_part(holder, HOLDERS, ROWS)] for holder in range(HOLDERS)]
            dist.gather(held, slots, dst=0, group=holders)
        if whole is not None:
            dist.broadcast(whole, 0, group=takers)
        if rank >= HOLDERS:
            assert whole is not None
            part = whole[:, _part(rank - HOLDERS, TAKERS, COLUMNS)].contiguous()
        seconds.append(time.perf_counter() - begin)
    if part is not None:
        _check(part.numpy(), _part(rank - HOLDERS, TAKERS, COLUMNS))
    return {"seconds": seconds[1:]}
