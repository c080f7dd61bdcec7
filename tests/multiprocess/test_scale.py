"""`make scale`, in short."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from aiodist.schedules.choose_reductions import Shape, choose_all_reduce
from aiodist.schedules.choose_values import choose_share

pytestmark = pytest.mark.timeout(180)

LARGE = (64 << 10) + 8
"""Bytes of an array that does not go whole in one frame."""


def measured(folder: Path, *arguments: str) -> dict[str, Any]:
    file = folder / "figures.json"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.scale", *arguments, "--json", file],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        check=False,
        text=True,
        timeout=170,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(file.read_text())
    return found


@pytest.mark.long
def test_ranks_of_one_process(tmp_path: Path) -> None:
    """Frames and connections are those of the plans, exactly."""
    cases = f"all_reduce:{LARGE},barrier"
    found = measured(tmp_path, "ranks", "--ranks", "2,5,8", "--cases", cases)
    for column, ranks in zip(found["ranks"], (2, 5, 8), strict=True):
        large, barrier = column["cells"]
        tally = choose_all_reduce(Shape(LARGE // 8, 8, 8), ranks).tally
        assert large["frames"] == tally.frames + tally.grants
        assert large["connections"] == tally.connections
        tally = choose_share(ranks).tally
        assert barrier["frames"] == tally.frames
        assert barrier["connections"] == tally.connections
        assert min(large["seconds"], barrier["seconds"], column["memory"]) > 0


@pytest.mark.long
def test_processes_of_one_host(tmp_path: Path) -> None:
    """Ranks that share memory exchange no data in frames."""
    found = measured(tmp_path, "processes", "--processes", "2", "--cases", "all_reduce:8")
    (column,) = found["processes"]
    (cell,) = column["cells"]
    assert cell["seconds"] > 0
    assert cell["frames"] <= 1  # that which wakes a rank that sleeps
    assert column["files"] > 0


@pytest.mark.long
def test_members(tmp_path: Path) -> None:
    found = measured(tmp_path, "members", "--members", "20", "--lease", "10", "--group-size", "4")
    many, formed, gone_on = found["members"]
    assert many["members"] == 20
    # A connection for each member, and at most one file that they have in common.
    assert 0 <= (many["files"] - 1) * 20 < 1.5
    assert 0 < gone_on["sent"] < formed["sent"]


@pytest.mark.long
def test_hosts(tmp_path: Path) -> None:
    """Where they can be made: what goes between two hosts goes by frames."""
    found = measured(tmp_path, "hosts", "--hosts", "2x1", "--cases", "all_reduce:8")
    if not found["hosts"]:
        pytest.skip(found["hosts that are missing"])
    (column,) = found["hosts"]
    (cell,) = column["cells"]
    assert (cell["frames"], cell["connections"]) == (1, 1)


@pytest.mark.parametrize("arguments", [("planets",), ("ranks", "--cases", "all_reduse:8")])
def test_what_there_is_not_to_measure(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    with pytest.raises(AssertionError, match=r"error: .*(planets|all_reduse).*expected"):
        measured(tmp_path, *arguments)
