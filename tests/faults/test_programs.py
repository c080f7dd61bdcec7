"""A short run of `make programs`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.skipif(sys.platform != "linux", reason="Linux shares memory")
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("seed", "size", "transports"), [(1, 2, "shm"), (2, 3, "shm"), (3, 3, "tcp")]
)
def test_random_programs_of_processes(seed: int, size: int, transports: str) -> None:
    program = Path(__file__).with_name("programs.py")
    options = ["--seed", seed, "--size", size, "--transports", transports, "--batches", 6]
    done = subprocess.run(
        [sys.executable, program, "-n", "1", *map(str, options)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "'programs': 1" in done.stdout and "failed: []" in done.stdout
