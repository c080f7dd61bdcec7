"""``python -m benchmarks.gpu``: a table of all_reduce on one GPU. Needs torch and a GPU.

Columns: median time of aiodist and of Gloo on the same CUDA tensors; the time that the bytes moved
take at the bandwidth of the device's own copies; and how much later than asked a timer of the loop
comes meanwhile, at the 99th percentile. Data are random, times are after warm-up.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import math
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import aiodist

SIZES = tuple(8 << shift for shift in range(0, 28, 3))
GLOO_MOST = 256 << 20
"""Gloo goes through the host: beyond this it takes minutes."""
PERIOD = 0.001


class Row(NamedTuple):
    """One size. Seconds; NaN where nothing was measured."""

    nbytes: int
    aiodist: float
    gloo: float
    copies: float
    lateness: float


def median(times: list[float]) -> float:
    return sorted(times)[len(times) // 2]


def rounds(nbytes: int) -> int:
    """How often a size is measured."""
    return max(5, min(200, (1 << 30) // max(nbytes, 1)))


async def lateness(times: list[float]) -> None:
    """How much later than asked the loop comes back, until cancelled."""
    while True:
        due = time.perf_counter() + PERIOD
        await asyncio.sleep(PERIOD)
        times.append(time.perf_counter() - due)


def bandwidth(torch: Any) -> float:
    """Bytes a second that the device reads and writes when it copies."""
    x = torch.rand(1 << 28, device="cuda")
    y = torch.empty_like(x)
    for _ in range(3):
        y.copy_(x)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(10):
        y.copy_(x)
    torch.cuda.synchronize()
    return float(20 * x.nbytes / (time.perf_counter() - start))


def moved(nbytes: int, size: int) -> float:
    """Bytes that all ranks together read and write: each reduces a slice of all, and copies those
    of the others."""
    return nbytes * (size + 1 + 2 * (size - 1))


def gloo_of(torch: Any, group: aiodist.Group, path: str) -> Any:
    dist = torch.distributed
    dist.init_process_group(
        "gloo", init_method=f"file://{path}", rank=group.rank, world_size=group.size
    )
    return dist


async def measure(group: aiodist.Group, path: str) -> list[Row]:
    """The rows of one number of ranks."""
    torch: Any = importlib.import_module("torch")
    torch.cuda.set_device(0)
    speed = await group.broadcast(bandwidth(torch) if group.rank == 0 else None)
    dist = gloo_of(torch, group, path)
    rows: list[Row] = []
    for nbytes in SIZES:
        x = torch.rand(nbytes // 4, device="cuda")
        late: list[float] = []
        watcher = asyncio.get_running_loop().create_task(lateness(late))
        ours, theirs = [], []
        for turn in range(rounds(nbytes) + 3):
            await group.barrier()
            start = time.perf_counter()
            await group.all_reduce(x, aiodist.ReduceOp.MAX)
            if turn >= 3:
                ours.append(time.perf_counter() - start)
        watcher.cancel()
        for turn in range(min(10, rounds(nbytes)) + 2 if nbytes <= GLOO_MOST else 0):
            await group.barrier()
            start = time.perf_counter()
            dist.all_reduce(x, dist.ReduceOp.MAX)
            torch.cuda.synchronize()
            if turn >= 2:
                theirs.append(time.perf_counter() - start)
        late.sort()
        p99 = late[int(0.99 * (len(late) - 1))] if late else math.nan
        copies = moved(nbytes, group.size) / speed
        rows.append(Row(nbytes, median(ours), median(theirs) if theirs else math.nan, copies, p99))
    dist.destroy_process_group()
    return rows


def table(size: int, rows: list[Row]) -> str:
    """The rows as Markdown."""
    lines = [
        f"{size} processes on one GPU",
        "",
        "| bytes | aiodist, µs | Gloo, µs | times Gloo | of the limit | loop late, p99 µs |",
        "| ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    lines += [
        f"| {row.nbytes} | {row.aiodist * 1e6:.0f} | {row.gloo * 1e6:.0f} "
        f"| {row.gloo / row.aiodist:.1f} | {row.copies / row.aiodist:.0%} "
        f"| {row.lateness * 1e6:.0f} |"
        for row in rows
    ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    ranks = parser.parse_args().ranks
    try:
        torch: Any = importlib.import_module("torch")
    except ImportError:
        print("torch is not installed: nothing to measure", file=sys.stderr)
        return 1
    if not torch.cuda.is_available():
        print(
            f"torch {torch.__version__} finds no CUDA device: nothing to measure", file=sys.stderr
        )
        return 1
    for size in ranks:
        with tempfile.TemporaryDirectory() as folder:
            path = os.fspath(Path(folder) / "gloo")
            results = aiodist.run(measure, size, (path,))
        print(table(size, results[0]), end="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
