"""A test that hangs fails, whatever it hangs in, and the run goes on."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(300)

TESTS = """
import asyncio

import pytest

@pytest.fixture
def patience(request):
    return 30.0 if "after_all" in request.node.name else 0.2


async def never():
    await asyncio.Event().wait()


async def stubborn():
    while True:
        try:
            await never()
        except asyncio.CancelledError:
            pass


def test_waits(run):
    run(never())


def test_another_task_waits(run):
    async def main():
        await asyncio.create_task(never(), name="the other one")

    run(main())


def test_cannot_be_cancelled(run):
    run(stubborn())


def test_what_is_left_cannot_be_cancelled(run):
    async def main():
        task = asyncio.create_task(stubborn())
        await asyncio.sleep(0)
        raise ValueError("the test's own failure")

    run(main())


def test_takes_the_cancellation_for_a_success(run):
    async def main():
        try:
            await never()
        except asyncio.CancelledError:
            pass

    run(main())


@pytest.mark.timeout(2)
def test_does_not_turn_the_loop(run):
    async def main():
        while True:
            pass

    run(main())


def test_whose_loop_does_not_end(run):
    async def main():
        async def endless():
            try:
                yield 1
            finally:
                await never()

        made = endless()
        assert await anext(made) == 1
        return made

    run(main())


def test_after_all_these(run):
    async def main():
        return 1

    assert run(main()) == 1
"""


DEAF = """
import asyncio

import pytest
import uvloop


@pytest.mark.timeout(1)
def test_a_loop_of_its_own():
    uvloop.run(asyncio.sleep(10_000))
"""


Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory, tried: Run) -> str:
    """What pytest says of them, in loops that swallow what signal handlers raise."""
    folder = tmp_path_factory.mktemp("hanging")
    done = tried(folder, "-v", "--tb=short", "-k", "uvloop", tests=TESTS)
    return done.stdout + done.stderr


def failure(report: str, test: str) -> str:
    """The part of the report that is about one test."""
    assert f" {test}[uvloop] ___" in report, report
    return re.split(r"\n_{3,} ", report.rsplit(f" {test}[uvloop] ___", 1)[1], maxsplit=1)[0]


def test_the_run_goes_on(report: str) -> None:
    verdicts = re.findall(r"::(test_\w+)\[uvloop\] ([A-Z]+)", report)
    assert verdicts[-1] == ("test_after_all_these", "PASSED"), report
    assert verdicts[-2] == ("test_whose_loop_does_not_end", "ERROR"), report
    failed = [name for name, verdict in verdicts if verdict == "FAILED"]
    assert len(failed) == len(set(failed)) == 6, report


def test_it_says_what_still_waited(report: str) -> None:
    text = failure(report, "test_waits")
    assert "not done after 0.2 s; what still waited then:" in text
    assert "await asyncio.Event().wait()" in text.partition("what still waited then:")[2]
    assert "the other one:" in failure(report, "test_another_task_waits")


@pytest.mark.parametrize(
    "test", ["test_cannot_be_cancelled", "test_takes_the_cancellation_for_a_success"]
)
def test_whatever_a_task_makes_of_its_cancellation(report: str, test: str) -> None:
    assert "what still waited then:" in failure(report, test)


def test_the_error_of_the_test_itself_comes_first(report: str) -> None:
    text = failure(report, "test_what_is_left_cannot_be_cancelled")
    assert "ValueError: the test's own failure" in text


def test_a_loop_that_does_not_turn(report: str) -> None:
    text = failure(report, "test_does_not_turn_the_loop")
    assert "while True:" in text
    assert "Timeout (>2.0s) from pytest-timeout" in text


SHORT = ("-o", "faulthandler_timeout=8")


def test_the_last_resort_ends_the_run(tmp_path: Path, tried: Run) -> None:
    done = tried(tmp_path, *SHORT, tests=DEAF)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "in test_a_loop_of_its_own" in done.stderr


@pytest.mark.long
def test_among_workers_the_last_resort_ends_one_of_them(tmp_path: Path, tried: Run) -> None:
    tests = DEAF + "\n\ndef test_another():\n    pass\n"
    done = tried(tmp_path, *SHORT, "-n", "1", tests=tests)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "in test_a_loop_of_its_own" in done.stderr
    assert "crashed while running 'test_written.py::test_a_loop_of_its_own'" in done.stdout
    assert done.stdout.splitlines()[-1].strip("= ").startswith("1 failed, 1 passed")


@pytest.mark.long
def test_a_worker_that_dies_names_its_test(tmp_path: Path, tried: Run) -> None:
    tests = "import os\n\n\ndef test_dies():\n    os.abort()\n\n\ndef test_another():\n    pass\n"
    done = tried(tmp_path, "-n", "1", tests=tests)
    assert "crashed while running 'test_written.py::test_dies'" in done.stdout, done.stderr
    assert done.stdout.splitlines()[-1].strip("= ").startswith("1 failed, 1 passed")
