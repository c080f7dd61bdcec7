"""A short run of `make chaos`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.timeout(300)
def test_everybody_gets_on_after_every_fault() -> None:
    program = Path(__file__).with_name("chaos.py")
    done = subprocess.run(
        [sys.executable, program, "-n", "10", "--seed", "2"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "'transports': 'tcp'" in done.stdout
