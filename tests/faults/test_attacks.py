"""Short runs of `make fuzz` and `make crowd`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["fuzz", "-n", "2000", "--seed", "3"], "'connections': "),
        pytest.param(
            ["fuzz", "-n", "5000", "--seed", "4"], "'connections': ", marks=pytest.mark.long
        ),
        (["crowd", "-n", "150"], "'connections': 450"),
    ],
    ids=["fuzz", "fuzz more", "crowd"],
)
def test_the_group_works_and_memory_is_bounded(arguments: list[str], text: str) -> None:
    program = Path(__file__).with_name("attack.py")
    done = subprocess.run(
        [sys.executable, program, *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert text in done.stdout
