"""Starting `aiodist` as a user does, and making sure that nothing of it stays."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

Start = Callable[..., "subprocess.Popen[str]"]
Gone = Callable[[int], bool]

COMMAND = """
import signal

signal.signal(signal.SIGINT, signal.default_int_handler)  # the tests may run with nohup
signal.signal(signal.SIGHUP, signal.SIG_DFL)
{before}
from aiodist_cli import command

command.main()
"""
"""The command, which does something before."""

PATIENT = """
from aiodist.launching import spawn
from aiodist_cli import tracebacks

spawn.SETTLE = tracebacks.PATIENCE = 3600.0
"""
"""Lets the command wait until a rank that has begun to fail, or is the cause of it, has ended. On a
slow machine that takes a Python process longer than the command waits."""


@pytest.fixture
def aiodist(tmp_path: Path) -> Iterator[Start]:
    """``aiodist("run", "-n", 2, …)`` starts the command with its output piped (`patient`: see
    `PATIENT`; `ignored`: a signal, as with nohup); what still runs at the end of the test is
    killed."""
    started: list[subprocess.Popen[str]] = []

    def start(
        *arguments: object,
        more_env: dict[str, str] | None = None,
        patient: bool = False,
        ignored: signal.Signals | None = None,
    ) -> subprocess.Popen[str]:
        before = PATIENT if patient else ""
        if ignored is not None:
            before += f"signal.signal({ignored:d}, signal.SIG_IGN)\n"
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("AIODIST_")}
        process = subprocess.Popen(
            [sys.executable, "-c", COMMAND.format(before=before), *map(str, arguments)],
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
