"""Whole programs: how ranks meet, and what happens when one of them dies."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aiodist.runtime.spawn import free_port

pytestmark = pytest.mark.timeout(150)

Start = Callable[..., Any]


def test_ways_to_meet(job: Start, tmp_path: Path) -> None:
    assert job("meeting.py", 3, str(tmp_path)).finish() == ["met\n"] * 3


@pytest.mark.parametrize("victim", [0, 2])
def test_a_killed_rank(job: Start, victim: int) -> None:
    """The others hear of it within a second (what they say is checked, what it takes printed)."""
    running = job("lost.py", 3, str(victim), f"tcp://127.0.0.1:{free_port()}")
    ends = [
        (*process.communicate(timeout=100), process.returncode) for process in running.processes
    ]
    assert ends.pop(victim)[2] == -signal.SIGKILL
    assert [code for _, _, code in ends] == [0, 0], ends
    assert all(out.startswith("recovered ") for out, _, _ in ends)


def test_interrupt(job: Start) -> None:
    assert job("interrupted.py", 2).finish() == ["interrupted\n"] * 2


@pytest.mark.parametrize("first", ["torch", "aiodist_torch", "aiodist"])
def test_torch_knows_the_backend(installed: dict[str, str], first: str) -> None:
    program = (
        f"import {first}; import torch.distributed as d; print(d.is_backend_available('aiodist'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=installed, capture_output=True, text=True, timeout=60
    )
    assert (done.stdout, done.stderr) == ("True\n", "")


def test_importing_torch_brings_in_no_aiodist(installed: dict[str, str]) -> None:
    program = "import sys, torch; print([m for m in sys.modules if m.split('.')[0] == 'aiodist'])"
    done = subprocess.run(
        [sys.executable, "-c", program], env=installed, capture_output=True, text=True, timeout=60
    )
    assert (done.stdout, done.stderr) == ("[]\n", "")
