"""The demo's job: it learns, and the ranks get what a single process gets."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

DIGITS = Path(__file__).parents[2] / "examples" / "digits"

pytestmark = pytest.mark.timeout(300)

Environment = Callable[..., dict[str, str]]


def test_training_equals_that_of_one_process(tmp_path: Path, environment: Environment) -> None:
    report = tmp_path / "report.json"
    run = [sys.executable, "-m", "aiodist_cli", "run", "-n", "2", str(DIGITS / "train.py")]
    done = subprocess.run(
        [*run, "--report", str(report)],
        env=environment(),
        capture_output=True,
        check=False,
        text=True,
        timeout=250,
    )
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(report.read_text())
    assert found["ranks"] == 2
    assert found["accuracy"] > 0.95
    assert 0 < found["difference"] < 1e-4  # 0 would mean that it compared the model with itself
    assert found["steps"] == 350
    assert "[0] step 350/350 loss 0.0" in done.stdout
    # The gradients went to and fro: with two ranks, each sends about as much as it has of them.
    assert found["sent"] >= found["steps"] * found["parameters"] * 4


def test_demo_shows_the_result(environment: Environment) -> None:
    done = subprocess.run(
        [sys.executable, str(DIGITS / "demo.py")],
        env=environment(COLUMNS="100"),
        capture_output=True,
        check=False,
        text=True,
        timeout=250,
    )
    assert (done.returncode, done.stderr) == (0, "")
    for text in ("350/350", "test accuracy", "largest difference to a single process", "steps/s"):
        assert text in done.stdout
    assert "The weights equal those of a single process" in done.stdout
