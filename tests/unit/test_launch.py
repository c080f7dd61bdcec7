"""How the ranks of `aiodist.run` get their work."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import aiodist
from aiodist import launch


def test_all_of_the_work_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """One read gives 2 GiB at most."""
    monkeypatch.setattr(os, "pread", lambda *_: b"a part of it")
    with tempfile.TemporaryFile() as file:
        file.write(pickle.dumps(["all", "of it"]))
        file.flush()
        assert launch._read(os.dup(file.fileno())) == ["all", "of it"]


async def its_rank(group: aiodist.Group) -> int:
    return group.rank


def test_ranks_import_from_where_the_program_does(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "secrets.py").write_text("raise ValueError('not the module of Python')")
    monkeypatch.chdir(tmp_path)
    assert aiodist.run(its_rank, 1) == [0]


def test_ranks_have_the_flags_of_the_interpreter(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import sys\n"
        "import aiodist\n"
        "async def main(group):\n"
        "    return sys.flags.optimize, sys.flags.utf8_mode, sys.warnoptions\n"
        "if __name__ == '__main__':\n"
        "    print(*aiodist.run(main, 1))\n"
    )
    flags = ["-O", "-X", "utf8", "-W", "error::BytesWarning"]
    said = subprocess.check_output([sys.executable, *flags, program], timeout=60)
    assert said.decode().strip() == "(1, 1, ['error::BytesWarning'])"
