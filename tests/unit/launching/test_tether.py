"""What ties a process to its parent."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from aiodist.launching import tether

pytestmark = pytest.mark.skipif(os.name != "posix", reason="there are no process groups")


def run(parent: int, *program: str) -> subprocess.CompletedProcess[str]:
    command = tether.command([sys.executable, *program])
    command[command.index(str(os.getpid()))] = str(parent)
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=50)


def test_the_program_takes_its_place_in_a_group_of_its_own() -> None:
    found = run(os.getpid(), "-c", "import os; print(os.getpgid(0) == os.getpid(), os.getppid())")
    assert (found.returncode, found.stdout) == (0, f"True {os.getpid()}\n")


def test_a_process_whose_parent_is_gone_ends_before_the_program_begins() -> None:
    found = run(1 if os.getpid() != 1 else 2, "-c", "print('began')")
    assert (found.returncode, found.stdout) == (-9, "")


def test_a_process_with_a_group_of_its_own_can_be_asked_for_a_dump() -> None:
    """Until it is ready, it ignores the signal."""
    shows = (
        "import os, signal; from aiodist.launching import tether\n"
        "os.setpgid = lambda *_: print(signal.getsignal(signal.SIGUSR1).name)\n"
        "tether._tie(os.getppid())"
    )
    env = os.environ | {"AIODIST_FLIGHT_RECORDER": "stderr"}
    found = subprocess.check_output([sys.executable, "-c", shows], env=env, text=True, timeout=50)
    assert found == "SIG_IGN\n"
