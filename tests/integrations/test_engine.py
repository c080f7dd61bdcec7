"""examples/engine: an open inference engine answers with each checkpoint that a trainer writes."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

if importlib.util.find_spec("mistralrs") is None:
    pytest.skip("needs mistralrs: make integrations", allow_module_level=True)

DEMO = Path(__file__).parents[2] / "examples" / "engine" / "demo.py"


@pytest.mark.skipif(sys.platform != "linux", reason="`aiodist weights pull` needs Linux")
@pytest.mark.skipif(shutil.which("curl") is None, reason="the command of --exec is curl")
@pytest.mark.timeout(180)
def test_the_engine_answers_with_each_version() -> None:
    done = subprocess.run(
        [sys.executable, DEMO], capture_output=True, text=True, check=False, timeout=170
    )
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("version")]
    assert lines == [
        f"version {version}: 'abc' goes on with {4 * letter!r}"
        for version, letter in enumerate("xyz")
    ]
