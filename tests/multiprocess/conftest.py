"""Starting `aiodist` as a user does, and making sure that nothing of it stays."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

Start = Callable[..., "subprocess.Popen[str]"]
Gone = Callable[[int], bool]

PATIENT = """
from aiodist.launching import spawn
from aiodist_cli import command, tracebacks

spawn.SETTLE = tracebacks.PATIENCE = 3600.0
command.main()
"""
"""The command, which waits for whatever a rank that has begun to fail, or is the cause of it, has
to do until it has ended: on a slow machine that takes a Python process longer than it waits."""


@pytest.fixture
def aiodist(tmp_path: Path) -> Iterator[Start]:
    """``aiodist("run", "-n", 2, …)`` starts the command with its output piped (`patient`: see
    `PATIENT`); what still runs at the end of the test is killed."""
    started: list[subprocess.Popen[str]] = []

    def start(
        *arguments: object, more_env: dict[str, str] | None = None, patient: bool = False
    ) -> subprocess.Popen[str]:
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("AIODIST_")}
        command = ("-c", PATIENT) if patient else ("-m", "aiodist_cli")
        process = subprocess.Popen(
            [sys.executable, *command, *map(str, arguments)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="surrogateescape",
            cwd=tmp_path,
            env=inherited | {"COLUMNS": "100", "NO_COLOR": "1"} | (more_env or {}),
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def gone() -> Gone:
    """``gone(pid)`` waits until the process has ended (whoever reaps it)."""

    def wait(pid: int) -> bool:
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            return True
        try:
            poll = select.poll()
            poll.register(fd, select.POLLIN)
            return bool(poll.poll(50_000))
        finally:
            os.close(fd)

    return wait


def pytest_itemcollected(item: pytest.Item) -> None:
    """It starts processes, which on a slow machine takes far longer than all that they do."""
    item.add_marker(pytest.mark.timeout(240))
