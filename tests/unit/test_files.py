"""Files are replaced as a whole, or stay what they were."""

from __future__ import annotations

from pathlib import Path

import pytest
from full_disk import full_disk

from aiodist import files


def test_a_full_disk_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text("old")
    with full_disk(), pytest.raises(OSError, match="File too large"):
        files.replace(path, "new" * 10)
    assert [path.read_text(), *tmp_path.iterdir()] == ["old", path]
