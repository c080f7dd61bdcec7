"""all_reduce of aiodist and of Gloo, in the same processes and one run.

Blocks of both alternate, so that whatever else the machine does hits both alike. Times are wall
clock, per operation, of rank 0: median, 99th percentile and mean. The ratio is of medians, Gloo's
over aiodist's: 2 means that aiodist takes half the time. A second table shows the memory that a
rank needs beyond its tensors.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import aiodist

SIZES = {
    "8 B": (8, 1000),
    "64 KiB": (64 << 10, 200),
    "1 MiB": (1 << 20, 60),
    "16 MiB": (16 << 20, 10),
    "64 MiB": (64 << 20, 5),
}
"""Label → (bytes of float32, operations in a block)."""

MEMORY_BYTES = 256 << 20


async def measure(group: aiodist.Group, rounds: int, sizes: list[str]) -> dict[str, Any]:
    """What one rank does."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=group.rank, world_size=group.size)
    times: dict[str, dict[str, list[float]]] = {}
    for label in sizes:
        nbytes, count = SIZES[label]
        tensor = torch.ones(nbytes // 4)
        mine: list[float] = []
        gloo: list[float] = []
        for number in range(rounds + 1):
            await group.barrier()
            ours = []
            for _ in range(count):
                start = time.perf_counter()
                await group.all_reduce(tensor)
                ours.append(time.perf_counter() - start)
            tensor.fill_(1)
            dist.barrier()
            theirs = []
            for _ in range(count):
                start = time.perf_counter()
                dist.all_reduce(tensor)
                theirs.append(time.perf_counter() - start)
            tensor.fill_(1)
            if number:  # the first round warms up
                mine += ours
                gloo += theirs
        times[label] = {"aiodist": mine, "gloo": gloo}
    dist.barrier()
    dist.destroy_process_group()
    return {"times": times, "memory": await memory(group)}


async def memory(group: aiodist.Group) -> float:
    """MiB by which the resident set grows beyond the tensors, for an all_reduce of 256 MiB."""
    import torch

    tensor = torch.ones(MEMORY_BYTES // 4)
    await group.barrier()
    _reset_peak()
    before = _peak()
    await group.all_reduce(tensor)
    return (_peak() - before) / 2**20


def _reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _peak() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def summary(times: list[float]) -> dict[str, float]:
    """Median, p99 and mean, in microseconds."""
    ordered = sorted(times)
    return {
        "median": statistics.median(ordered) * 1e6,
        "p99": ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))] * 1e6,
        "mean": statistics.fmean(ordered) * 1e6,
    }


def shown(microseconds: float) -> str:
    if microseconds < 1000:
        return f"{microseconds:.0f} µs"
    return f"{microseconds / 1000:.1f} ms"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("-n", type=int, action="append", help="ranks (default: 2 and 4)")
    parser.add_argument("--rounds", type=int, default=5, help="blocks of each (default: 5)")
    parser.add_argument("--size", action="append", choices=SIZES, help="default: all")
    parser.add_argument(
        "--transport", action="append", help="tcp, unix (the default on one host); default: both"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    sizes = arguments.size or list(SIZES)
    report: dict[str, Any] = {"cores": os.cpu_count()}
    console = Console(width=100)
    for transport in arguments.transport or ["tcp", "unix"]:
        for n in arguments.n or [2, 4]:
            ranks = aiodist.run(measure, n, (arguments.rounds, sizes), transports=(transport,))
            rows = {
                label: {name: summary(values) for name, values in ranks[0]["times"][label].items()}
                for label in sizes
            }
            growth = max(rank["memory"] for rank in ranks)
            report[f"{transport} n={n}"] = {"all_reduce": rows, "memory_mib": growth}
            if not arguments.json:
                console.print(table(n, transport, rows))
                console.print(
                    f"Memory beyond the tensors, all_reduce of 256 MiB at n={n}: "
                    f"{growth:.1f} MiB a rank\n"
                )
    if arguments.json:
        print(json.dumps(report, indent=2))
    return 0


def table(n: int, transport: str, rows: dict[str, Any]) -> Table:
    made = Table(title=f"all_reduce, float32, n={n}, one host, {transport}; median (p99, mean)")
    made.add_column("size")
    made.add_column("aiodist", justify="right")
    made.add_column("Gloo", justify="right")
    made.add_column("Gloo / aiodist", justify="right")
    for label, row in rows.items():
        cells = [
            f"{shown(row[name]['median'])} ({shown(row[name]['p99'])}, {shown(row[name]['mean'])})"
            for name in ("aiodist", "gloo")
        ]
        ratio = row["gloo"]["median"] / row["aiodist"]["median"]
        made.add_row(label, *cells, f"{ratio:.1f} ×")
    return made
