"""Network namespaces of who was killed are gone with the next who makes some."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from benchmarks import namespaces
from benchmarks.namespaces import Owner, left_over

ROOT = Path(__file__).parents[2]
NUMBERS = 4026531836
HOLDING = """
import sys
from benchmarks.namespaces import PeerMissing, namespaces
try:
    with namespaces() as sites:
        print(*[site.prefix[-1] for site in sites], flush=True)
        sys.stdin.read()
except PeerMissing as error:
    print("missing:", error, flush=True)
"""


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
    own = namespaces.this_process()
    assert (own.pid, own.start) == (os.getpid(), namespaces.start_of(os.getpid()))
    with subprocess.Popen(["sleep", "60"]) as child:
        try:
            start = namespaces.start_of(child.pid)
            assert start is not None
            assert start >= own.start
        finally:
            child.kill()
        # Dead, though its parent has not asked for it yet; and then.
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert namespaces.start_of(child.pid) is None
        child.wait()
        assert namespaces.start_of(child.pid) is None


def test_what_was_killed_leaves_nothing_for_long() -> None:
    """One is killed and one lives on, when a third makes some."""
    holding: list[subprocess.Popen[str]] = []
    made: list[set[str]] = []

    def make() -> None:
        process = subprocess.Popen(
            [sys.executable, "-c", HOLDING],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        holding.append(process)
        assert process.stdout is not None
        first, *more = process.stdout.readline().split()
        if first == "missing:":
            pytest.skip(" ".join(more))
        made.append({first, *more})
        assert made[-1] <= {*os.listdir("/run/netns")}

    try:
        make()
        make()
        holding[0].kill()
        holding[0].wait()
        make()
        there = {*os.listdir("/run/netns")}
        assert not made[0] & there
        assert made[1] | made[2] <= there
    finally:
        for process in holding:
            process.communicate("")  # they remove their own
    assert not (made[0] | made[1] | made[2]) & {*os.listdir("/run/netns")}
