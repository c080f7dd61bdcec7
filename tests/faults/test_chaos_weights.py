"""A short run of `make chaos-weights`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.long
@pytest.mark.timeout(420)
def test_all_get_new_versions_after_every_fault() -> None:
    program = Path(__file__).with_name("chaos_weights.py")
    done = subprocess.run(
        [sys.executable, program, "-n", "12", "--seed", "4", "--channels", "2"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert '"versions"' in done.stdout
