"""Whole programs: how ranks meet, and what happens when one of them dies."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import aiodist
from aiodist.launching.spawn import free_port

pytestmark = pytest.mark.timeout(300)

Start = Callable[..., Any]


@pytest.mark.long
def test_ways_to_meet(job: Start, tmp_path: Path) -> None:
    assert job("meeting.py", 3, str(tmp_path)).finish() == ["met\n"] * 3


def test_a_forked_child_meets_others_anew(job: Start, tmp_path: Path) -> None:
    assert job("forked.py", 2, str(tmp_path)).finish() == ["forked\n"] * 2


def test_public_calls(job: Start) -> None:
    assert job("public.py", 3).finish() == ["called\n"] * 3


def test_calls_of_methods(job: Start) -> None:
    assert job("direct.py", 2).finish(quiet=False) == ["called\n"] * 2


@pytest.mark.long
def test_compiled_functions(job: Start) -> None:
    assert job("compiled.py", 2).finish(quiet=False) == ["compiled\n"] * 2


def test_works_that_torch_keeps(job: Start) -> None:
    assert job("kept.py", 2).finish(quiet=False) == ["kept\n"] * 2


@pytest.mark.parametrize("victim", [0, pytest.param(2, marks=pytest.mark.long)])
def test_a_killed_rank(job: Start, victim: int) -> None:
    """The others hear of it by its links, not by its lease; what that takes is printed."""
    running = job("lost.py", 3, str(victim), f"tcp://127.0.0.1:{free_port()}")
    ends = [
        (*process.communicate(timeout=280), process.returncode) for process in running.processes
    ]
    assert ends.pop(victim)[2] == -signal.SIGKILL
    assert [code for _, _, code in ends] == [0, 0], ends
    assert all(out.startswith("recovered ") for out, _, _ in ends)


@pytest.mark.parametrize(
    ("how", "victim"),
    [
        ("killed", 0),  # and with it the coordinator and torch's store
        pytest.param("killed", 2, marks=pytest.mark.long),
        ("excluded", 1),
        pytest.param("excluded", 0, marks=pytest.mark.long),
    ],
)
def test_a_group_that_shrinks(job: Start, tmp_path: Path, how: str, victim: int) -> None:
    running = job("shrunk.py", 3, how, str(victim), f"file://{tmp_path}/meeting")
    ends = [
        (*process.communicate(timeout=280), process.returncode) for process in running.processes
    ]
    if how == "killed":
        assert ends.pop(victim)[2] == -signal.SIGKILL
    assert [(out, code) for out, _, code in ends] == [("shrunk\n", 0)] * len(ends), ends
    # Nothing is said but that the victim, or the coordinator in its process, is lost.
    said = [line for _, err, _ in ends for line in err.splitlines()]
    assert [line for line in said if "lost: " not in line and "is gone for good" not in line] == []


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.long)])
def test_training(job: Start, size: int) -> None:
    assert job("training.py", size).finish(quiet=False) == ["trained\n"] * size


@pytest.mark.long
def test_training_with_coded_gradients(job: Start) -> None:
    assert job("coded.py", 2).finish(quiet=False) == ["trained\n"] * 2


@pytest.mark.long
def test_accelerate(job: Start) -> None:
    running = job("accelerated.py", 2, LOCAL_RANK="0")
    assert running.finish(quiet=False) == ["accelerated\n"] * 2


@pytest.mark.long
async def test_a_store_of_a_coordinator(job: Start) -> None:
    async with aiodist.Coordinator("tcp://127.0.0.1:0") as coordinator:
        running = job("stored.py", 2, coordinator.address)
        assert await asyncio.to_thread(running.finish) == ["stored\n"] * 2


@pytest.mark.long
def test_interrupt(job: Start) -> None:
    assert job("interrupted.py", 2).finish() == ["interrupted\n"] * 2


def said(program: str, env: dict[str, str]) -> str:
    """What a program prints; it must say nothing else."""
    command = [sys.executable, "-c", program]
    done = subprocess.run(
        command, check=False, env=env, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.parametrize(
    "first",
    ["torch", *(pytest.param(n, marks=pytest.mark.long) for n in ("aiodist_torch", "aiodist"))],
)
def test_torch_knows_the_backend(installed: dict[str, str], first: str) -> None:
    program = f"import {first}, torch.distributed as d; print(d.is_backend_available('aiodist'))"
    assert said(program, installed) == "True\n"


@pytest.mark.long
def test_making_a_group_does_not_import_dynamo(installed: dict[str, str]) -> None:
    program = "import sys, aiodist_torch.process_group; print('torch._dynamo' in sys.modules)"
    assert said(program, installed) == "False\n"


def test_importing_torch_brings_in_no_engine(installed: dict[str, str]) -> None:
    program = "import sys, torch; print([m for m in sys.modules if m.split('.')[0] == 'aiodist'])"
    assert said(program, installed) == "[]\n"
