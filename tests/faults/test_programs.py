"""A short run of `make programs`."""

from __future__ import annotations

import sys

import pytest
from fault_programs import ran


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="Linux shares memory")
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("seed", "size", "transports"), [(1, 2, "shm"), (2, 3, "shm"), (3, 3, "tcp")]
)
def test_random_programs_of_processes(seed: int, size: int, transports: str) -> None:
    options = ["--seed", seed, "--size", size, "--transports", transports, "--batches", 6]
    said = ran("programs.py", "-n", 1, *options)
    assert "'programs': 1" in said and "failed: []" in said
