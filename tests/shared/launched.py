"""What tests of launchers need: the programs of their pages, and network namespaces."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOREIGN = re.compile(
    r"(AIODIST|MASTER|SLURM|OMPI|PMIX?|PRTE|MPI|TORCHELASTIC)_|(LOCAL_)?(RANK|WORLD_SIZE)$|"
    r"JOB_COMPLETION_INDEX$|PYTHONUNBUFFERED$"
)
"""Variables that tell of whatever has started the tests. With the last one, print would write a
line in two parts, between which those of others come."""


def clean_environment() -> dict[str, str]:
    """The variables of this process, without those that launchers set; `python` and `aiodist` are
    those that run the tests."""
    clean = {name: value for name, value in os.environ.items() if not FOREIGN.match(name)}
    return clean | {"PATH": f"{Path(sys.executable).parent}:{clean['PATH']}:/usr/sbin:/sbin"}


def programs_of(page: str) -> dict[str, str]:
    """The programs and scripts that a page of docs/launchers/ tells its reader to save, by name."""
    text = (ROOT / "docs" / "launchers" / page).read_text()
    return dict(re.findall(r"^```\w+ file=(\S+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))


def average(size: int = 4) -> list[str]:
    """The sorted lines of the pages' average.py."""
    mean = (size - 1) / 2
    return [f"rank {rank} of {size}: [0.  {mean} {2 * mean:g}. ]" for rank in range(size)]


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=10)


@contextmanager
def namespace(name: str) -> Iterator[str]:
    """A network namespace with its loopback interface, as long as the block lasts: its name. What
    is still in it then is ended. Skips where none can be made."""
    space = f"aiodist-{os.getpid()}-{name}"
    try:
        ip("netns", "add", space)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"network namespaces cannot be made here: {error}")
    try:
        ip("-n", space, "link", "set", "lo", "up")
        yield space
    finally:
        asking = ["ip", "netns", "pids", space]
        found = subprocess.run(asking, check=False, capture_output=True, text=True, timeout=10)
        for pid in map(int, found.stdout.split()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        ip("netns", "del", space)


def inside(space: str, hosts: Path, *command: str) -> list[str]:
    """`command` in that namespace, with `hosts` for /etc/hosts. Unlike `ip netns exec`, this leaves
    /sys as it is, with the cgroups that slurmd looks for."""
    bind = f'mount --bind {hosts} /etc/hosts && exec "$@"'
    enter = ["nsenter", f"--net=/run/netns/{space}", "unshare", "--mount"]
    return [*enter, "sh", "-c", bind, "sh", *command]
