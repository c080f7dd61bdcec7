"""Names of network namespaces that say whose they are.

Namespaces outlive who made them, and a process that is killed cannot remove its own. So whoever
makes some removes those first whose owner is gone (`remove_left_over`).
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
"""Where `ip` keeps the names of namespaces."""
_OWNED = re.compile(r"aiodist-[a-z]+-(\d+)\.(\d+)\.(\d+)-[a-z0-9]+")


class Owner(NamedTuple):
    """A process: no other one is it, not even one that gets its number later. `start`: when it
    began, in ticks since the system did; `numbers`: the space that its number is of, for a
    container may have others."""

    pid: int
    start: int
    numbers: int

    def names(self, kind: str, suffixes: Iterable[object]) -> list[str]:
        """Names of namespaces that it owns."""
        return [f"aiodist-{kind}-{'.'.join(map(str, self))}-{suffix}" for suffix in suffixes]


def this_process() -> Owner:
    """Who makes namespaces here."""
    start = start_of(os.getpid())
    assert start is not None
    return Owner(os.getpid(), start, os.stat("/proc/self/ns/pid").st_ino)


def start_of(pid: int) -> int | None:
    """When a process began; None where none of that number lives."""
    try:
        # The name of the program comes second, in brackets, and may have any in it.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def left_over(
    names: Iterable[str], numbers: int, start_of: Callable[[int], int | None]
) -> list[str]:
    """Those of `names` whose owner is gone, as far as that can be said by who sees the processes
    with these `numbers`, and their beginnings by `start_of`."""
    found = []
    for name in names:
        owned = _OWNED.fullmatch(name)
        if owned is not None:
            owner = Owner(*map(int, owned.groups()))
            if owner.numbers == numbers and start_of(owner.pid) != owner.start:
                found.append(name)
    return found


def remove(names: Iterable[str]) -> None:
    """Remove namespaces, and what belongs to them, as far as they are there."""
    for name in names:
        subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
        shutil.rmtree(f"/etc/netns/{name}", ignore_errors=True)


def remove_left_over() -> None:
    """Remove what those have left that were killed. What lives on in there keeps its namespace,
    without a name, until it ends."""
    names = sorted(os.listdir(_NAMES)) if _NAMES.is_dir() else []
    remove(left_over(names, this_process().numbers, start_of))
