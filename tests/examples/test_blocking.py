"""The example in ordinary code, by the launcher, and a program that forgets to close."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "examples" / "blocking" / "pi.py"

pytestmark = pytest.mark.timeout(120)

FORGETFUL = """
import aiodist
group = aiodist.connect_blocking()
if group.rank:
    group.send("late", 0)
else:
    print(group.recv(), flush=True)
"""


def launch(program: Path, ranks: int) -> list[str]:
    command = [sys.executable, "-m", "aiodist_cli", "run", "-n", str(ranks), str(program)]
    done = subprocess.run(command, capture_output=True, check=False, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")
    return sorted(done.stdout.splitlines())


def test_pi() -> None:
    counts, pi = launch(PROGRAM, 3)
    assert counts.startswith("[0] hits by rank: [157")
    assert pi == "[0] π is about 3.14"


def test_a_group_that_was_not_closed_is_closed_at_the_exit(tmp_path: Path) -> None:
    program = tmp_path / "forgetful.py"
    program.write_text(FORGETFUL)
    assert launch(program, 2) == ["[0] late"]
