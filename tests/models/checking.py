"""Runs Spin on a model: a file of Promela beside this one."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

IS_HERE = shutil.which("spin") is not None and shutil.which("gcc") is not None
FOLDER = Path(__file__).parent


class Size(Protocol):
    """How many there are in a model of each kind, and how often what fails."""

    def defines(self) -> list[str]:
        """The options of Spin for it."""
        ...


@dataclass(frozen=True)
class Model:
    """`sizes`: those for which every state is looked at. `faults`: rules that are left out of the
    model: what each means, and a size in which that is found."""

    file: str
    sizes: Sequence[Size]
    faults: Mapping[str, tuple[str, Size]]

    @property
    def text(self) -> str:
        return (FOLDER / self.file).read_text()


@dataclass(frozen=True)
class Verdict:
    """`error`: what Spin has found, in its words; None if the model holds. `states`: how many
    there are, or were looked at until then."""

    states: int
    error: str | None


def check(model: Model, size: Size, folder: Path, fault: str | None = None) -> Verdict:
    """Look at every state of the model. `folder` is for files of Spin.

    Raises RuntimeError if Spin does not get through, and CalledProcessError if it cannot begin.
    """
    defines = size.defines() + ([f"-DFAULT_{fault}"] if fault else [])
    shutil.copy(FOLDER / model.file, folder / "model.pml")
    options = ["-O0", "-w", "-DSAFETY", "-DCOLLAPSE", "-DVECTORSZ=2048"]
    for command in (
        ["spin", "-a", *defines, "model.pml"],
        ["gcc", *options, "-o", "search", "pan.c"],
    ):
        subprocess.run(command, cwd=folder, check=True, capture_output=True)
    command = ["./search", "-m100000", "-w22"]
    found = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout
    states = re.search(r"(\d+) states, stored", found)
    error = re.search(r"pan:1: (.*) \(at depth", found)
    is_whole = "Search not completed" not in found and "max search depth" not in found
    if states is None or not (error or (is_whole and "errors: 0" in found)):
        raise RuntimeError(f"Spin has not looked at all states:\n{found}")
    return Verdict(int(states[1]), error[1] if error else None)
