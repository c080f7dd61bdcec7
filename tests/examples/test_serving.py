"""Servers (digits_server.py) answer while a trainer publishes, and some are killed and added."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "examples" / "digits" / "serving.py"


@pytest.mark.long
@pytest.mark.timeout(420)
def test_no_request_fails_while_weights_are_swapped(
    environment: Callable[..., dict[str, str]],
) -> None:
    """The program fails by itself where a request does, or answers of one version differ."""
    done = subprocess.run(
        [sys.executable, str(PROGRAM)],
        env=environment(),
        capture_output=True,
        check=False,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr
    right = dict(re.findall(r"version (\d+): ([\d.]+)% right", done.stdout))
    assert float(right["0"]) < 50 < 90 < float(right["25"])
    found = re.search(r"(\d+) answers of (\d+) versions by 6 servers, of which 2", done.stdout)
    assert found, done.stdout
    answers, versions = map(int, found.groups())
    assert answers >= versions >= 2
