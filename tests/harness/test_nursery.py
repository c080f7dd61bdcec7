"""The process that forks ranks for tests, so that these need not import anything."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from nursery import Born, Nursery

PROGRAM = """
import os, sys
print(__name__, sys.argv[1:], sys.path[0], os.environ["WORD"], "colorsys" in sys.modules)
print("a word", file=sys.stderr)
sys.exit(7)
"""


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    made = Nursery(["colorsys"], os.environ)
    yield made
    made.close()


def started(nursery: Nursery, folder: Path, program: str) -> Born:
    path = folder / "program.py"
    path.write_text(program)
    return nursery.start(path, ["one", "two"], {"WORD": "kept"})


def test_a_process_runs_as_if_it_were_begun_anew(nursery: Nursery, tmp_path: Path) -> None:
    born = started(nursery, tmp_path, PROGRAM)
    out, err = born.communicate(timeout=30)
    assert out == f"__main__ ['one', 'two'] {tmp_path} kept True\n"
    assert (born.returncode, err) == (7, "a word\n")
    born.close()


def test_one_that_does_not_end_is_killed(nursery: Nursery, tmp_path: Path) -> None:
    born = started(nursery, tmp_path, "import signal\nprint(1, flush=True)\nsignal.pause()\n")
    with pytest.raises(subprocess.TimeoutExpired):
        born.communicate(timeout=0.01)
    born.kill()
    born.communicate(timeout=30)
    assert born.returncode == -9
    born.close()


def test_all_end_with_it(tmp_path: Path) -> None:
    nursery = Nursery([], os.environ)
    born = started(nursery, tmp_path, "import signal\nsignal.pause()\n")
    nursery.close()
    with pytest.raises(AssertionError, match="the nursery has ended"):
        born.communicate(timeout=30)
    born.close()
