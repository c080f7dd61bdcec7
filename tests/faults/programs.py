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
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiodist

RANK = Path(__file__).with_name("program_rank.py")
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
    clean = {name: value for name, value in os.environ.items() if not name.startswith("AIODIST_")}
    ranks: list[asyncio.subprocess.Process] = []
    try:
        async with aiodist.Coordinator("tcp://127.0.0.1:0", token="secret") as coordinator:
            for rank in range(it["size"]):
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, RANK, json.dumps(it), coordinator.address, str(rank)),
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.PIPE,
                    start_new_session=True,
                    env=clean | ({"AIODIST_CORE": "python"} if rank in it["python"] else {}),
                )
                ranks.append(process)
            said = await ended(ranks)
    finally:
        for process in ranks:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.communicate()
    victims = sum(victim is not None for victim in it["victims"])
    codes = sorted(process.returncode or 0 for process in ranks)
    errors = "".join(error for _, error in said)
    assert codes == [-signal.SIGKILL] * victims + [0] * (len(ranks) - victims), (codes, errors)
    counts: Counter[str] = Counter()
    for out, _ in said:
        if out:
            over = json.loads(out)
            assert not (over["tasks"] or over["mapped"] or over["files"]), f"left: {over}"
            assert over["memory"] < MOST_MEMORY, over
            counts.update(over["counts"])
    return counts


async def ended(ranks: list[asyncio.subprocess.Process]) -> list[tuple[str, str]]:
    """What they wrote. One that fails ends them all soon; who hangs is asked where it is."""
    reading = [asyncio.create_task(process.communicate()) for process in ranks]
    _, late = await asyncio.wait(reading, timeout=MOST_SECONDS)
    for task, process in zip(reading, ranks, strict=True):
        if task in late:
            process.kill()
    texts = [await task for task in reading]
    assert not late, ("still running", [error.decode() for _, error in texts])
    return [(out.decode(), error.decode()) for out, error in texts]


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
    counts: Counter[str] = Counter()
    failed, start, before = [], time.monotonic(), left_over()
    for seed in range(given.seed, given.seed + given.n):
        if time.monotonic() - start > given.seconds:
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
