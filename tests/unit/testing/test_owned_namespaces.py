"""Names of network namespaces say whose they are."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import NamedTuple

import pytest

from aiodist.testing import owned_namespaces
from aiodist.testing.owned_namespaces import Owner, left_over

NUMBERS = 4026531836


class Case(NamedTuple):
    what: str
    name: str
    is_left: bool


LIVING = {10: 500, 11: 600}
"""Processes, and when they began."""
CASES = [
    Case("its owner lives", f"aiodist-bench-10.500.{NUMBERS}-0", False),
    Case("its owner is gone", f"aiodist-bench-12.500.{NUMBERS}-0", True),
    Case("another has its number now", f"aiodist-bench-10.499.{NUMBERS}-switch", True),
    Case("of a test", f"aiodist-test-12.500.{NUMBERS}-a", True),
    Case("of another container", "aiodist-bench-12.500.7-0", False),
    Case("of somebody else", "aiodist-bench-12-0", False),
    Case("of somebody else", f"other-12.500.{NUMBERS}-0", False),
    Case("of somebody else", f"aiodist-bench-12.500.{NUMBERS}-0-more words", False),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.what}: {case.name}")
def test_what_is_left_over(case: Case) -> None:
    assert left_over([case.name], NUMBERS, LIVING.get) == [case.name] * case.is_left


def test_names_say_who_made_them() -> None:
    names = Owner(12, 500, NUMBERS).names("bench", [0, 1, "switch"])
    assert left_over(names, NUMBERS, LIVING.get) == names
    assert left_over(names, NUMBERS, {12: 500}.get) == []


@pytest.mark.skipif(sys.platform != "linux", reason="processes are looked up in /proc")
def test_who_is_gone_has_no_beginning() -> None:
    own = owned_namespaces.this_process()
    assert (own.pid, own.start) == (os.getpid(), owned_namespaces.start_of(os.getpid()))
    with subprocess.Popen(["sleep", "60"]) as child:
        try:
            start = owned_namespaces.start_of(child.pid)
            assert start is not None
            assert start >= own.start
        finally:
            child.kill()
        # Dead, though its parent has not asked for it yet; and then.
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert owned_namespaces.start_of(child.pid) is None
        child.wait()
        assert owned_namespaces.start_of(child.pid) is None
