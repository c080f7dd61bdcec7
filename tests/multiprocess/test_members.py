"""`make members`, in short."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def test_it_measures(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "benchmarks.members"),
            *("--counts", "20,40", "--lease", "2", "--json", file),
        ],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        check=False,
        text=True,
        timeout=55,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text())
    assert [one["members"] for one in found] == [20, 40]
    assert all(one["joins"] > 0 and one["traffic"] > 0 for one in found)
