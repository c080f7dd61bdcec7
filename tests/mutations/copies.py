"""A copy of the tree, in which one file at a time is faulty, and tests that are run there."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import executed
import psutil

ROOT = Path(__file__).parents[2]
COPIED = ("aiodist", "server", "clients", "tests", "docs", "examples", "benchmarks", "typings")


class Copy:
    """A copy of the tree, in which one file at a time is faulty."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in COPIED:
            shutil.copytree(
                ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__")
            )
        for path in ROOT.glob("*.*"):
            if path.is_file():
                shutil.copy(path, folder)
        path = [str(folder), str(folder / "server"), str(folder / "clients"), executed.HERE]
        path += filter(None, [os.environ.get("PYTHONPATH")])
        self.env = os.environ | {"PYTHONPATH": os.pathsep.join(path)}

    def write(self, file: str, source: str) -> None:
        path = self.folder / file
        path.write_text(source)
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
            compiled.unlink()  # it is not seen to be old where size and second are the same

    def test_in_turn(self, tests: Sequence[str], options: Sequence[str], seconds: float) -> str:
        """The first of `tests` that fails, in this order."""
        if not tests:
            return ""
        chosen = self.folder / "chosen_tests"
        chosen.write_text("\n".join(tests))
        files = sorted({test.partition("::")[0] for test in tests})
        return self.test([*options, "-p", "executed", f"--only-in={chosen}", *files], seconds)

    def test(self, what: Sequence[str], seconds: float) -> str:
        """The first test that fails in there; empty: none did."""
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
        command += ["-p", "no:xdist", "-o", "timeout=30", *what]
        process = subprocess.Popen(
            command, cwd=self.folder, env=self.env, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True,
        )  # fmt: skip
        try:
            output, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            return "out of time"
        finally:
            _end(process)
        if process.returncode in (0, 5):  # 5: no test was selected
            return ""
        lines = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))]
        return lines[0][:200] if lines else f"pytest ended with status {process.returncode}"


def _end(process: subprocess.Popen[str]) -> None:
    """End it, and what it has started."""
    family: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        family = psutil.Process(process.pid).children(recursive=True)
    for one in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # what a test that has ended left behind
    process.wait()
