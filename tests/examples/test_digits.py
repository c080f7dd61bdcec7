"""The demo's job: it learns, and the ranks get what a single process gets."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

DIGITS = Path(__file__).parents[2] / "examples" / "digits"

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

Environment = Callable[..., dict[str, str]]


def test_it_learns_what_one_process_learns(environment: Environment) -> None:
    done = subprocess.run(
        [sys.executable, str(DIGITS / "demo.py")],
        env=environment(COLUMNS="100"),
        capture_output=True,
        check=False,
        text=True,
        timeout=250,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "The weights equal those of a single process" in done.stdout
    shown = dict(re.findall(r"│ (\S.*?) +│ +(\S.*?) │", done.stdout))
    assert shown["ranks"] == "4"
    assert float(shown["test accuracy"].rstrip("%")) > 95
    # 0 would mean that it compared the model with itself.
    assert 0 < float(shown["largest difference to a single process"]) < 1e-4
    assert re.search(r"loss 0\.0\d* .* 350/350", done.stdout)
    # The gradients went to and fro: each rank sends at least as much as it has of them.
    parameters = int(shown["parameters"].replace(",", ""))
    assert float(shown["sent by rank 0"].removesuffix(" MiB")) * 2**20 >= 350 * parameters * 4
    assert float(shown["steps/s"]) > 0
