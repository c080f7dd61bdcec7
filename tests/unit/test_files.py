"""Files are replaced as a whole, or stay what they were."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from full_disk import full_disk

from aiodist import files


def test_a_full_disk_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text("old")
    with full_disk(), pytest.raises(OSError, match="File too large"):
        files.replace(path, "new" * 10)
    assert [path.read_text(), *tmp_path.iterdir()] == ["old", path]


def test_a_signal_may_have_the_same_file_written_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "dump.txt"
    write = Path.write_text

    def interrupted(new: Path, text: str, **options: Any) -> int:
        monkeypatch.setattr(Path, "write_text", write)
        written = write(new, text, **options)
        files.replace(path, "of the signal")
        return written

    monkeypatch.setattr(Path, "write_text", interrupted)
    files.replace(path, "of the error")
    assert [path.read_text(), *tmp_path.iterdir()] == ["of the error", path]


def test_the_name_of_a_group_in_a_file_name_is_quoted_and_reads_back() -> None:
    assert files.quoted("a/b é") == "a%2Fb%20%C3%A9"
    for name in ("x" * 100, "測" * 11):
        assert len(files.quoted(name)) <= 100
        assert unquote(files.quoted(name)) == name


@pytest.mark.parametrize("shift", range(9))
def test_long_names_of_groups_that_begin_alike_make_different_file_names(shift: int) -> None:
    start = "x" * shift + "測" * 12
    names = [files.quoted(start + end) for end in ("", "1", "2", "試", "験")]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"([\w-]|%[0-9A-F]{2}){1,100}", name) for name in names)
