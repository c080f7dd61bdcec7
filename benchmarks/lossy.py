"""Two hosts on a line that loses packets, where the system does not allow BBR: one connection
between them, and a bundle.

    python -m benchmarks.lossy --delay 0.01 --loss 0.001 --control cubic
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence

import numpy as np

import aiodist
from aiodist.testing.long_links import FarHost, LongLine, far_hosts
from aiodist.transports import tcp

RATE = 50e6
NBYTES = 16 << 20
WAYS = ("bundle", "one")


async def rank(way: str, control: str, times: int) -> None:
    """One of the two ranks: rank 0 prints the shares of the line that were used."""

    def choose(sock: socket.socket, *, near: bool) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, control.encode())

    tcp._choose_congestion_control = choose
    if way == "one":
        tcp.BUNDLED = float("inf")
    async with aiodist.connect(timeout=60, op_timeout=100) as group:
        x = np.zeros(NBYTES // 4, np.float32)
        shares: dict[str, list[float]] = {"all_reduce": [], "send": []}
        for _ in range(times):
            for op, found in shares.items():
                await group.barrier()
                start = time.monotonic()
                if op == "all_reduce":
                    await group.all_reduce(x)
                elif group.rank == 0:
                    await group.send(x, 1)
                    await group.recv(src=1)
                else:
                    await group.recv(src=0, out=x)
                    await group.send(x[:1], 0)
                found.append(NBYTES / RATE / (time.monotonic() - start))
        if group.rank == 0:
            print(json.dumps(shares))
        await group.barrier()


def measure(hosts: Sequence[FarHost], way: str, control: str, times: int) -> dict[str, list[float]]:
    """Both ranks, each in its host."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("AIODIST_", "MASTER_"))}
    command = [sys.executable, "-m", "benchmarks.lossy", "--rank", way, "--control", control]
    ranks = [
        subprocess.Popen(
            [*host.prefix, *command, "--times", str(times)],
            env=clean
            | {"MASTER_ADDR": hosts[0].address, "MASTER_PORT": "29500"}
            | {"RANK": str(number), "WORLD_SIZE": "2"},
            stdout=subprocess.PIPE,
        )
        for number, host in enumerate(hosts)
    ]
    try:
        out = [process.communicate(timeout=100)[0] for process in ranks]
        return dict(json.loads(out[0]))
    finally:
        for process in ranks:
            process.kill()
            process.wait()


def main() -> None:
    """Measure both ways in turns, and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--delay", type=float, default=0.01, help="seconds from host to host")
    parser.add_argument("--loss", type=float, default=0.001, help="the share that is lost")
    parser.add_argument("--control", default="cubic", help="congestion control")
    parser.add_argument("--times", type=int, default=8, help="operations of each kind in a run")
    parser.add_argument("--runs", type=int, default=2, help="runs of each way, in turns")
    parser.add_argument("--rank", choices=WAYS, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.rank:
        asyncio.run(rank(asked.rank, asked.control, asked.times))
        return
    found: dict[str, list[float]] = {}
    with far_hosts(2, LongLine(RATE, asked.delay, loss=asked.loss)) as (hosts, _):
        for _ in range(asked.runs):
            for way in WAYS:
                for op, shares in measure(hosts, way, asked.control, asked.times).items():
                    found.setdefault(f"{op}, {way}", []).extend(shares)
    for what, shares in sorted(found.items()):
        median, worst, best = statistics.median(shares), min(shares), max(shares)
        print(f"{what}: {median:.0%} of the line ({worst:.0%} to {best:.0%})", flush=True)


if __name__ == "__main__":
    main()
