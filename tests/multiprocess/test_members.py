"""`make members`, in short."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import groups, scale


def measured(file: Path, *arguments: str) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-m", *arguments, "--json", file],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        check=False,
        text=True,
        timeout=55,
    )
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(file.read_text())
    return found


def test_it_measures(tmp_path: Path) -> None:
    found = measured(
        tmp_path / "figures.json", "benchmarks.members", "--counts", "20,40", "--lease", "2"
    )
    assert [one["members"] for one in found] == [20, 40]
    assert all(one["joins"] > 0 and one["traffic"] > 0 for one in found)


@pytest.mark.long
def test_groups_that_form_lose_a_member_and_have_a_barrier(tmp_path: Path) -> None:
    found = measured(
        tmp_path / "figures.json",
        "benchmarks.groups",
        *("--single", "20", "--many", "40", "--sizes", "10"),
        *("--simulated", "60", "--simulated-size", "30"),
    )
    formed, gone_on, many, simulated = found
    # Less is told of a loss to all than of a view to all.
    assert 0 < gone_on["sent"] < formed["sent"]
    assert many["sent"] > 0
    assert (simulated["members"], simulated["seconds"] > 0) == (60, True)


@pytest.mark.parametrize(
    ("main", "arguments"),
    [
        (groups.main, ["--many", "15", "--sizes", "5,10"]),
        (groups.main, ["--simulated", "50", "--simulated-size", "30"]),
        (scale.main, ["members", "--members", "20,25"]),
    ],
)
def test_members_that_do_not_fill_their_groups_are_refused(
    main: Callable[[list[str]], int], arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert "members are a multiple of the size of their groups" in capsys.readouterr().err
