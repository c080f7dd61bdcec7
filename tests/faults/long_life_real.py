"""A long life of real processes: `make long-life-real MINUTES=60`. Does anything grow?

The processes of `long_life.py` run on this host, 200 times as often as there: 20 requests a second,
each with a tag of its own, 3 groups, and a guest, a version and an average every 1.5 s. Every five
minutes the coordinator is killed and started again.

Once a minute it counts what all processes have: open files, threads, mappings of aiodist's shared
memory, tasks, objects of Python, and memory of their own.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import logging
import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import NamedTuple

from long_life import PROCESSES, Roles
from restarts import Daemon

PACE = 1 / 200
RESTART = 300.0
"""Seconds between two restarts of the coordinator."""
PATIENCE = 120.0
"""Seconds within which a process has to say what it has, and to end."""


class Count(NamedTuple):
    """What processes have. `memory`: MiB that they do not share with others."""

    files: int
    threads: int
    maps: int
    tasks: int
    objects: int
    memory: float
    requests: int = 0


def memory(pid: int | str) -> float:
    with open(f"/proc/{pid}/smaps_rollup") as lines:
        return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) / 1024


def maps(pid: int | str) -> int:
    with open(f"/proc/{pid}/maps") as lines:
        return sum("memfd:aiodist" in line for line in lines)


def of_process(pid: int) -> Count:
    """Of a process that does not say it itself."""
    files, threads = (len(os.listdir(f"/proc/{pid}/{kind}")) for kind in ("fd", "task"))
    return Count(files, threads, maps(pid), 0, 0, memory(pid))


def own(requests: int) -> Count:
    gc.collect()
    files = len(os.listdir("/proc/self/fd")) - 1  # without that of the listing
    return Count(
        files,
        threading.active_count(),
        maps("self"),
        len(asyncio.all_tasks()),
        len(gc.get_objects()),
        memory("self"),
        requests,
    )


async def member(number: int, address: str, every: float, times: int) -> None:
    """Play the role of that number, and say `times` times what there is."""
    begun = time.monotonic()
    end = begun + every * times
    roles = Roles(address, lambda: time.monotonic() >= end, PACE, token="secret")

    async def count() -> None:
        for turn in range(times):
            # In the middle of a minute, because the coordinator is restarted at its beginning.
            await asyncio.sleep(begun + every * (turn + 0.5) - time.monotonic())
            print(json.dumps(own(roles.requests)), flush=True)

    await asyncio.gather(roles.play(number), count())


class Life:
    """All processes. `counts`: the sum of what they have, each `every` seconds."""

    def __init__(self, every: float, times: int, restart: float) -> None:
        self.counts: list[Count] = []
        self.restarts = 0
        self._every, self._times, self._restart = every, times, restart

    async def run(self, folder: Path) -> None:
        """Raises AssertionError if a process fails."""
        daemon = Daemon(folder / "state")
        others: list[asyncio.subprocess.Process] = []
        try:
            await daemon.start()
            for number in range(PROCESSES):
                words = map(str, (number, daemon.address, self._every, self._times))
                others.append(
                    await asyncio.create_subprocess_exec(
                        *(sys.executable, __file__, "member", *words),
                        stdout=asyncio.subprocess.PIPE,
                    )
                )
            restarting = asyncio.create_task(self._restart_it(daemon))
            for _ in range(self._times):
                await self._count(daemon, others)
            restarting.cancel()
            await asyncio.wait([restarting])
            if not restarting.cancelled():
                restarting.result()
            if daemon.pid is None:
                await daemon.start()
            for one in others:
                assert await asyncio.wait_for(one.wait(), PATIENCE) == 0
        finally:
            for one in others:
                if one.returncode is None:
                    one.kill()
                await one.communicate()
            await daemon.kill()

    async def _restart_it(self, daemon: Daemon) -> None:
        while self._restart:
            await asyncio.sleep(self._restart)
            await daemon.kill()
            await daemon.start()
            self.restarts += 1

    async def _count(self, daemon: Daemon, others: list[asyncio.subprocess.Process]) -> None:
        said = []
        for one in others:
            assert one.stdout is not None
            line = await asyncio.wait_for(one.stdout.readline(), self._every + PATIENCE)
            assert line, f"process {one.pid} has ended"
            said.append(Count(*json.loads(line)))
        assert daemon.pid is not None
        served = of_process(daemon.pid)
        counts = [sum(column) for column in zip(*said, served, strict=True)]
        self.counts.append(Count(*counts)._replace(requests=said[0].requests))


def plot(counts: list[Count], every: float, path: Path) -> None:
    """Each kind by time, as a share of what it was at the end of the first tenth."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.5), layout="constrained")
    axes = figure.subplots()
    first = counts[len(counts) // 10]
    at = [(turn + 0.5) * every / 60 for turn in range(len(counts))]
    for kind in ("files", "threads", "maps", "tasks", "objects", "memory"):
        share = [getattr(one, kind) / getattr(first, kind) for one in counts]
        axes.plot(at, share, label=kind, linewidth=1)
    axes.set(xlabel="minutes", ylabel="share of the first minutes", ylim=(0, 1.5))
    axes.legend(loc="lower right", ncols=6, fontsize=8)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=int, default=60)
    parser.add_argument("--plot", type=Path)
    given = parser.parse_args()
    life = Life(60.0, given.minutes, RESTART)
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(life.run(Path(folder)))
    heads = ("files", "threads", "maps", "tasks", "objects", "MiB", "requests")
    print("minute" + "".join(f"{head:>10}" for head in heads))
    for minute, one in enumerate(life.counts):
        print(
            f"{minute:6}{one.files:10}{one.threads:10}{one.maps:10}{one.tasks:10}{one.objects:10}"
            f"{one.memory:10.1f}{one.requests:10}"
        )
    print(f"{life.restarts} restarts of the coordinator")
    if given.plot:
        plot(life.counts, 60.0, given.plot)


if __name__ == "__main__":
    if sys.argv[1:2] == ["member"]:
        logging.getLogger("aiodist").setLevel(logging.ERROR)  # that the coordinator is away
        number, address, every, times = sys.argv[2:]
        asyncio.run(member(int(number), address, float(every), int(times)))
    else:
        main()
