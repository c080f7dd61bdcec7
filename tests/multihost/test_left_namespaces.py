"""Network namespaces of who was killed are gone with the next who makes some."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HOLDING = """
import sys
from benchmarks.namespaces import PeerMissing, namespaces
try:
    with namespaces() as sites:
        print(*[site.prefix[-1] for site in sites], flush=True)
        sys.stdin.read()
except PeerMissing as error:
    print("missing:", error, flush=True)
"""


def test_what_was_killed_leaves_nothing_for_long() -> None:
    """One is killed and one lives on, when a third makes some."""
    holding: list[subprocess.Popen[str]] = []
    made: list[set[str]] = []

    def make() -> None:
        process = subprocess.Popen(
            [sys.executable, "-c", HOLDING],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        holding.append(process)
        assert process.stdout is not None
        first, *more = process.stdout.readline().split()
        if first == "missing:":
            pytest.skip(" ".join(more))
        made.append({first, *more})
        assert made[-1] <= {*os.listdir("/run/netns")}

    try:
        make()
        make()
        holding[0].kill()
        holding[0].wait()
        make()
        there = {*os.listdir("/run/netns")}
        assert not made[0] & there
        assert made[1] | made[2] <= there
    finally:
        for process in holding:
            process.communicate("")  # they remove their own
    assert not (made[0] | made[1] | made[2]) & {*os.listdir("/run/netns")}
