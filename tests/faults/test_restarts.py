"""A short run of `make restarts`: the coordinator is killed and started again under load."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.timeout(120)
def test_nothing_is_lost_when_the_coordinator_is_killed() -> None:
    program = Path(__file__).with_name("restarts.py")
    done = subprocess.run(
        [sys.executable, program, "-n", "3", "--ranks", "2", "--seed", "5"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "'restarts': 3" in done.stdout
