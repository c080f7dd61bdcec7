"""Signals to the ranks of a node."""

from __future__ import annotations

import concurrent.futures
import signal
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from aiodist_cli.ranks import Ranks


@pytest.mark.parametrize(("group", "ended"), [(None, 0), (0, -signal.SIGUSR1)])
def test_a_rank_is_told_once_it_has_a_group_of_its_own(group: int | None, ended: int) -> None:
    """Before that, a signal would end it, because it ignores none."""
    writer: Any = None
    ranks: Any = Ranks(writer, grace=0)
    waits = [sys.executable, "-I", "-S", "-c", "input()"]
    with subprocess.Popen(waits, stdin=subprocess.PIPE, process_group=group) as process:
        ranks._tasks[concurrent.futures.Future()] = SimpleNamespace(process=process)
        ranks.tell(signal.SIGUSR1)
        process.communicate(b"\n", timeout=50)
    assert process.returncode == ended
