"""A test that leaves something behind fails, and the run goes on."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(300)

TESTS = """
import os
import signal

from aiodist.buffers.segment import Segment

kept = []


def test_memory():
    segment = Segment.create(8192, "left")
    kept.append(segment.memory)
    segment.close()


def test_a_process():
    if not os.fork():
        signal.pause()


def test_a_child_that_fails():
    child = os.fork()
    if not child:
        raise ValueError("in the child")
    assert os.waitpid(child, 0)[1] == 0


def test_after_all_these():
    pass
"""


def test_the_run_goes_on(
    tmp_path: Path, tried: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    done = tried(tmp_path, "-v", "--tb=short", tests=TESTS)
    assert done.stdout.splitlines()[-1].strip("= ").startswith("1 failed, 3 passed, 2 errors")
    for words in (
        "ERROR at teardown of test_memory",
        "AssertionError: files or memory left over: {",
        "ERROR at teardown of test_a_process",
        "AssertionError: processes left over, which were killed: {",
        "ValueError: in the child",
    ):
        assert words in done.stdout, words
