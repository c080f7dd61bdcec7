"""Runs the programs of this folder, for tests of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def ran(program: str, *options: object) -> str:
    """Run a program of this folder to its end, and return what it printed. It must not fail."""
    command = [sys.executable, Path(__file__).with_name(program), *map(str, options)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
