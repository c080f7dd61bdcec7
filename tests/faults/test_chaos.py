"""A short run of `make chaos`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.timeout(300)
@pytest.mark.parametrize("faults", [6, pytest.param(16, marks=pytest.mark.long)])
def test_everybody_gets_on_after_every_fault(faults: int) -> None:
    program = Path(__file__).with_name("chaos.py")
    done = subprocess.run(
        [sys.executable, program, "-n", str(faults), "--seed", "2"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "'transports': 'tcp'" in done.stdout
