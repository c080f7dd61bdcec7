"""Names of network namespaces that tell their owner.

Namespaces outlive the process that made them, and a killed process cannot remove its own. So each
process that makes some first removes those whose owner is gone (`remove_left_over`).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

_NAMES = Path("/run/netns")
"""The directory in which `ip` keeps the names of namespaces."""
_OWNED = re.compile(r"aiodist-[a-z]+-(\d+)\.(\d+)\.(\d+)-[a-z0-9]+")


class Owner(NamedTuple):
    """A process, unlike any other, even a later one with the same number.

    `start` is when it began, in ticks since the system did. `numbers` is its pid namespace, because
    containers have others.
    """

    pid: int
    start: int
    numbers: int

    def names(self, kind: str, suffixes: Iterable[object]) -> list[str]:
        """Return names of namespaces that it owns."""
        return [f"aiodist-{kind}-{'.'.join(map(str, self))}-{suffix}" for suffix in suffixes]


def this_process() -> Owner:
    """Return the owner of namespaces that are made here."""
    start = start_of(os.getpid())
    assert start is not None
    return Owner(os.getpid(), start, os.stat("/proc/self/ns/pid").st_ino)


def start_of(pid: int) -> int | None:
    """Return when a process began; None if it does not live."""
    try:
        # The program's name comes second, in brackets, and may itself contain brackets.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def left_over(
    names: Iterable[str], numbers: int, start_of: Callable[[int], int | None]
) -> list[str]:
    """Return those of `names` whose owner is gone.

    `numbers` is the pid namespace of the caller, and `start_of` tells when a process began.
    """
    found = []
    for name in names:
        owned = _OWNED.fullmatch(name)
        if owned is not None:
            owner = Owner(*map(int, owned.groups()))
            if owner.numbers == numbers and start_of(owner.pid) != owner.start:
                found.append(name)
    return found


def remove(names: Iterable[str]) -> None:
    """Remove namespaces, and what belongs to them, if they exist."""
    for name in names:
        subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
        shutil.rmtree(f"/etc/netns/{name}", ignore_errors=True)


def remove_left_over() -> None:
    """Remove what killed processes have left.

    A process that still runs in such a namespace keeps it, without a name, until it ends.
    """
    names = sorted(os.listdir(_NAMES)) if _NAMES.is_dir() else []
    remove(left_over(names, this_process().numbers, start_of))
