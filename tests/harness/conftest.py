"""pytest on tests of a test's own, set up as it is here."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

Tried = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def tried() -> Tried:
    """``tried(folder, *arguments, tests=…)``: `tests` are written into a file of the folder,
    and run with `tests/conftest.py` and the settings of `pyproject.toml`."""

    def run(folder: Path, *arguments: str, tests: str = "") -> subprocess.CompletedProcess[str]:
        (folder / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text())
        if tests:
            (folder / "test_written.py").write_text(tests)
        return subprocess.run(
            [sys.executable, "-m", "pytest", "-c", ROOT / "pyproject.toml", "--rootdir", folder,
             "-p", "no:cacheprovider", "-o", "testpaths=.", *arguments],
            cwd=folder, capture_output=True, text=True, timeout=280, check=False,
        )  # fmt: skip

    return run
