"""One real cluster of Ray for all tests that want it, and what every test here needs.

`make integrations` runs these tests, in an environment of their own: see requirements.txt.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"

Play = Callable[..., list[str]]


@pytest.fixture(autouse=True)
def no_leaks() -> None:
    """Not test by test, as elsewhere: a cluster starts processes and threads when it likes. What is
    left when it has ended is seen by `ray_cluster`."""


def _shared_files() -> set[str]:
    """Those of Ray and of the library: others have theirs, in all the time that a cluster lives."""
    names = os.listdir("/dev/shm")
    return {name for name in names if any(whose in name for whose in ("aiodist", "plasma", "ray"))}


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[str]:
    """The address of a cluster of this host, which this process is connected to."""
    import ray

    # A token of its own, else Ray makes one in the home directory; and nobody is told that it runs.
    settings = {"RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0"}
    before = {name: os.environ.get(name) for name in settings}
    shared = _shared_files()
    os.environ.update(settings)
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # names of sockets in it have to be short
    try:
        context = ray.init(
            num_cpus=4,
            include_dashboard=False,
            object_store_memory=100 << 20,
            log_to_driver=False,
            namespace="tests",
            _temp_dir=folder,
        )
        yield context.address_info["gcs_address"]
    finally:
        ray.shutdown()
        shutil.rmtree(folder)
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
    assert _shared_files() <= shared


@pytest.fixture
def play() -> Play:
    """``play("ray/average.py", *arguments, **environment)``: the lines that an example prints."""

    def run(name: str, *arguments: str, **environment: str) -> list[str]:
        done = subprocess.run(
            [sys.executable, str(EXAMPLES / name), *arguments],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            check=False,
            timeout=200,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.splitlines()

    return run
