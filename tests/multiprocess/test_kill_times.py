"""`make kill-times`, in short."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.long
def test_it_measures() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.kill_times", "--rounds", "1", "--size", "3"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        check=False,
        text=True,
        timeout=55,
    )
    found = re.findall(r"^(\w+) +(error|gone on) +median +([\d.]+) ms", done.stdout, re.MULTILINE)
    assert [(transport, what) for transport, what, _ in found] == [
        ("shm", "error"), ("shm", "gone on"), ("tcp", "error"), ("tcp", "gone on"),
    ], done.stderr  # fmt: skip
    for (_, _, error), (_, _, gone_on) in zip(found[::2], found[1::2], strict=True):
        assert 0 < float(error) < float(gone_on)
