"""Random programs of ranks that are real processes: `make programs N=100`.

Each program is drawn from its seed, alike on all ranks (see `program_rank`): operations, sizes
around every border at which another way is taken, dtypes, tags, several at once, ranks that are
late, cancel or give what is wrong, groups made of the group, and ranks that die. Every result is
compared with numpy. At the end of a program no process, file, mapping or task may be left. What
fails is said with the seed that replays it: ``python tests/faults/programs.py -n 1 --seed SEED``.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import random
import signal
import sys
import time
from collections import Counter
from importlib.util import find_spec
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from program_start import start

import aiodist

PATIENCE = 30.0
"""Seconds that an operation may take: far more than any does."""
MOST_SECONDS = 240.0
"""That a program may take."""
MOST_MEMORY = 900 << 20
"""Bytes that a rank may take in the end."""


def plan(seed: int, batches: int, **fixed: Any) -> dict[str, Any]:
    """What all ranks of a program are told."""
    chooser = random.Random(seed)
    size = chooser.choice([2, 2, 2, 3, 3, 4, 4, 5, 8])
    torch = chooser.random() < 0.2
    transports = chooser.choice([None, None, None, ["shm"], ["tcp"]])
    troubles = chooser.choice([0.0, 0.0, 0.05, 0.3])
    dies = size > 2 and chooser.random() < 0.3
    drawn: dict[str, Any] = {
        "seed": seed,
        "batches": batches,
        "patience": PATIENCE,
        "size": size,
        "torch": torch,
        "transports": transports,
        "troubles": troubles,
    }
    drawn.update((name, value) for name, value in fixed.items() if value is not None)
    victim = chooser.randrange(1, max(2, drawn["size"]))
    drawn["victims"] = [None, victim, None] if dies and drawn["size"] > 2 else [None]
    # Ranks with and without the compiled part share a group.
    share = chooser.choice([0.0, 0.5, 1.0])
    drawn["python"] = [rank for rank in range(drawn["size"]) if chooser.random() < share]
    return drawn


async def run(it: dict[str, Any]) -> Counter[str]:
    """Run it: what its ranks counted. Raises AssertionError for whatever must not happen."""
    context = multiprocessing.get_context("forkserver")
    ranks: list[ForkServerProcess] = []
    ends: list[Connection] = []
    try:
        async with aiodist.Coordinator("tcp://127.0.0.1:0", token="secret") as coordinator:
            for rank in range(it["size"]):
                end, says = context.Pipe(duplex=False)
                process = context.Process(target=start, args=(it, coordinator.address, rank, says))
                process.start()
                says.close()
                ranks.append(process)
                ends.append(end)
            said = await asyncio.to_thread(heard, ends)
            for process in ranks:
                await asyncio.to_thread(process.join, PATIENCE)
            hangs = [rank for rank, process in enumerate(ranks) if process.is_alive()]
    finally:
        for process in ranks:
            process.kill()
            process.join()
    victims = sum(victim is not None for victim in it["victims"])
    codes = sorted(process.exitcode or 0 for process in ranks)
    assert not hangs, ("still running", hangs, said)
    assert codes == [-signal.SIGKILL] * victims + [0] * (len(ranks) - victims), (codes, said)
    counts: Counter[str] = Counter()
    for over in said:
        if over is not None:
            assert not (over["tasks"] or over["mapped"] or over["files"]), f"left: {over}"
            assert over["memory"] < MOST_MEMORY, over
            counts.update(over["counts"])
    return counts


def heard(ends: list[Connection]) -> list[Any]:
    """Return what each rank says before it ends, None for one that is killed. Returns when all have
    ended, or after MOST_SECONDS."""
    said = dict.fromkeys(ends)
    reading, until = set(ends), time.monotonic() + MOST_SECONDS
    while reading and (ready := wait(reading, until - time.monotonic())):
        for end in ready:
            assert isinstance(end, Connection)
            try:
                said[end] = end.recv()
            except EOFError:
                reading.remove(end)
                end.close()
    return list(said.values())


def left_over() -> set[str]:
    """Files that would be left behind."""
    return {name for name in os.listdir("/dev/shm") if "aiodist" in name}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-n", type=int, default=100, help="how many programs")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32),
                        help="of the first; each next one has the next number")  # fmt: skip
    parser.add_argument("--batches", type=int, default=60, help="in each program")
    parser.add_argument("--size", type=int, help="ranks")
    parser.add_argument("--transports", nargs="*")
    parser.add_argument("--troubles", type=float, help="the share of calls with something wrong")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin none after")
    given = parser.parse_args()
    fixed = {name: getattr(given, name) for name in ("size", "transports", "troubles")}
    # For the warm process that forks ranks: to import these takes longer than most programs.
    clean = {name: value for name, value in os.environ.items() if not name.startswith("AIODIST_")}
    os.environ.clear()
    os.environ.update(clean, PYTHONPATH=str(Path(__file__).parent))
    warm = [name for name in ("numpy", "msgpack", "torch") if find_spec(name)]
    multiprocessing.get_context("forkserver").set_forkserver_preload(warm)
    counts: Counter[str] = Counter()
    failed, began, before = [], time.monotonic(), left_over()
    for seed in range(given.seed, given.seed + given.n):
        if time.monotonic() - began > given.seconds:
            break
        it = plan(seed, given.batches, **fixed)
        counts["programs"] += 1
        try:
            counts += asyncio.run(run(it))
        except AssertionError as error:
            failed.append(seed)
            print(f"FAILED {it}: {error}".replace("\\n", "\n"), flush=True)
    left = left_over() - before
    print(f"from seed {given.seed}: {dict(counts)}; failed: {failed}; left: {left}", flush=True)
    return bool(failed or left)


if __name__ == "__main__":
    sys.exit(main())
