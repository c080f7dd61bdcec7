"""Copies between two processes through shared memory: plain and streaming stores, to one place and
to others.

Each of two ranks, on cores of their own, copies an array into shared memory, and the other one out
of it. ``python -m benchmarks.shared_copies``
"""

from __future__ import annotations

import argparse
import mmap
import os
import statistics
import time
from typing import Any

import numpy as np

from aiodist.compiled import core, reason

SIZES = (4096, 16 * 1024, 64 * 1024, 256 * 1024, 1024 * 1024)
ROOM = 4 * 1024 * 1024
ROUND = 2 * 1024 * 1024
WAYS = ("plain", "elsewhere", "streaming", "chosen")
"""How to copy. `elsewhere`: by plain stores, each time to the place behind the last one, round in
`ROUND`. `chosen`: as the compiled part does, which measures what is faster."""


def copy(way: str, into: memoryview, data: memoryview) -> None:
    if way in ("plain", "elsewhere"):
        into[:] = data
    else:
        assert core is not None  # `main` has checked it
        core.copy_to_shared(into, data, way == "streaming")


def wait(words: memoryview, at: int, turn: int) -> None:
    """Look until the other rank has written `turn`. Raises TimeoutError if it seems to be gone."""
    until = time.perf_counter() + 30
    while words[at] != turn:
        if time.perf_counter() > until:
            raise TimeoutError("the other process does not answer")


def rank(number: int, memory: memoryview, cases: list[tuple[str, int]], rounds: int) -> list[float]:
    """Take turns with the other rank. Return the median time of each case, there and back."""
    words = memory[:4096].cast("Q")
    areas = [memory[4096:ROOM], memory[4096 + ROOM : 2 * ROOM]]
    areas[number][:] = bytes(areas[1 - number])  # the system maps all pages now
    turn, medians = 0, []
    for way, nbytes in cases:
        x: Any = np.zeros(nbytes, np.uint8)
        data, seconds = memoryview(x), []
        for at in range(rounds):
            place = at % (ROUND // nbytes) * nbytes if way == "elsewhere" else 0
            x.fill(number)  # the data is new each time, as in programs
            started = time.perf_counter()
            for writer in (0, 1):
                turn += 1
                if writer == number:
                    copy(way, areas[writer][place : place + nbytes], data)
                    words[128 * number] = turn
                else:
                    wait(words, 128 * writer, turn)
                    data[:] = areas[writer][place : place + nbytes]
            seconds.append(time.perf_counter() - started)
        medians.append(statistics.median(seconds))
    return medians


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=500, help="of each case")
    rounds: int = parser.parse_args().rounds
    cores = sorted(os.sched_getaffinity(0))
    if core is None or len(cores) < 2:
        raise SystemExit(f"needs two cores and the compiled part ({reason or 'it is there'})")
    memory = memoryview(mmap.mmap(-1, 2 * ROOM))
    cases = [(way, nbytes) for nbytes in SIZES for way in WAYS]
    child = os.fork()
    os.sched_setaffinity(0, {cores[0 if child else 1]})
    found = rank(0 if child else 1, memory, cases, rounds)
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
    print(f"{'bytes':>10} " + " ".join(f"{way:>10}" for way in WAYS) + "  microseconds")
    for at, nbytes in enumerate(SIZES):
        times = found[at * len(WAYS) : (at + 1) * len(WAYS)]
        print(f"{nbytes:>10} " + " ".join(f"{seconds * 1e6:>10.1f}" for seconds in times))


if __name__ == "__main__":
    main()
