"""Spin, the model checker, as a judge of histories."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from exports import promela
from recording import Op

IS_HERE = shutil.which("spin") is not None and shutil.which("gcc") is not None


def is_linearizable(ops: Sequence[Op], folder: Path) -> bool:
    """Have Spin judge a history. `folder` is for its files.

    Raises RuntimeError if Spin does not search through all states.
    """
    if not ops:
        return True
    (folder / "history.pml").write_text(promela(ops))
    for command in (
        ["spin", "-a", "history.pml"],
        ["gcc", "-O0", "-w", "-DSAFETY", "-DVECTORSZ=4096", "-o", "search", "pan.c"],
    ):
        subprocess.run(command, cwd=folder, check=True, capture_output=True)
    command = ["./search", "-E", "-m100000"]  # -E: that nothing goes on is no error here
    found = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout
    if "assertion violated" in found:
        return True
    if "errors: 0" not in found or "Search not completed" in found:
        raise RuntimeError(f"Spin has not searched through all states:\n{found}")
    return False
