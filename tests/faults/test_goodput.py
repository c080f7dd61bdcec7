"""A short run of `make goodput`, and what it would find."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from steps_taken import STEP, lineage


@pytest.mark.skipif(sys.platform != "linux", reason="members are forked")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("task", ["digits", pytest.param("transformer", marks=pytest.mark.long)])
def test_training_goes_on_through_kills_and_a_restart(tmp_path: Path, task: str) -> None:
    program, drawn = Path(__file__).with_name("goodput.py"), tmp_path / "loss.svg"
    options = ["--seconds", "5", "--every", "1", "--restart", "3", "--cut", "2", "--seed", "3"]
    done = subprocess.run(
        [sys.executable, program, "--task", task, *options, "--plot", drawn],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.partition("\n")[2])
    assert found["faults"]["kill"] and found["faults"]["restart"]
    assert all(found["steps"])
    assert "<svg" in drawn.read_text()


def rows(*steps: tuple[int, int, int, int]) -> np.ndarray:
    """Of (epoch, step, size, checksum)."""
    return np.array([(at, *step, 0.5) for at, step in enumerate(steps)], STEP)


def test_a_step_is_counted_once() -> None:
    taken = rows((1, 1, 2, 7), (1, 1, 2, 7), (1, 2, 2, 8), (1, 2, 2, 8))
    assert lineage(taken)["at"].tolist() == [0, 2]


def test_a_step_whose_members_were_all_killed_counts_as_it_was_taken_again() -> None:
    taken = rows((1, 1, 2, 7), (1, 2, 2, 8), (2, 2, 3, 9), (2, 3, 3, 10))
    assert lineage(taken)["crc"].tolist() == [7, 9, 10]


def test_members_that_do_not_agree_are_found() -> None:
    with pytest.raises(AssertionError, match="do not agree"):
        lineage(rows((1, 1, 2, 7), (1, 1, 2, 8)))


def test_a_lost_step_is_found() -> None:
    with pytest.raises(AssertionError, match="a step is missing"):
        lineage(rows((1, 1, 2, 7), (2, 3, 2, 8)))
