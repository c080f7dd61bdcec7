"""Files are replaced as a whole, or stay what they were."""

from __future__ import annotations

import os
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


def test_a_link_leads_to_the_new_contents(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to("target")
    files.replace(link, "new")
    assert link.is_symlink()
    assert (tmp_path / "target").read_text() == "new"


def test_a_pipe_gets_the_text(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    try:
        files.replace(tmp_path / "pipe", "new")
        assert os.read(reader, 10) == b"new"
    finally:
        os.close(reader)
