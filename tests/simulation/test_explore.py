"""What `explore` takes for a failure, and what it says of it; the plugin of pytest."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import pickle
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aiodist
from aiodist.testing import FoundError, explore, exploring

Program = Callable[[aiodist.Group], Awaitable[Any]]


async def raises(group: aiodist.Group) -> None:
    raise KeyError("lost")


async def hangs(group: aiodist.Group) -> None:
    await asyncio.Event().wait()


async def fails_by_pytest(group: aiodist.Group) -> None:
    with pytest.raises(KeyError):
        await group.barrier()


async def cancels_itself(group: aiodist.Group) -> None:
    raise asyncio.CancelledError


async def leaves_a_task(group: aiodist.Group) -> None:
    group.left = asyncio.create_task(asyncio.sleep(1e6))  # type: ignore[attr-defined]


async def forgets_a_coroutine(group: aiodist.Group) -> None:
    asyncio.sleep(1.0)  # type: ignore[unused-coroutine]


async def exits(group: aiodist.Group) -> None:
    sys.exit(0)


async def exits_in_a_task(group: aiodist.Group) -> None:
    asyncio.create_task(exits(group))  # noqa: RUF006
    await asyncio.sleep(1.0)


async def fails_in_a_group_of_tasks(group: aiodist.Group) -> None:
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(group.recv(src=group.rank, timeout=1.0).wait())
        async with asyncio.TaskGroup() as inner:
            inner.create_task(raises(group))


class HasNoText(Exception):
    def __str__(self) -> str:
        raise KeyError


async def raises_what_has_no_text(group: aiodist.Group) -> None:
    raise HasNoText


async def dies_of_a_loss(group: aiodist.Group) -> None:
    await asyncio.sleep(1.0)
    await group.barrier()


@pytest.mark.parametrize(
    ("program", "faults", "said", "plan"),
    [
        (raises, "", "rank 0 ends with KeyError: 'lost'", "ranks 1, seed 0, even network"),
        (
            fails_in_a_group_of_tasks,
            "",
            f"KeyError: 'lost'  (test_explore.py:{raises.__code__.co_firstlineno + 1})",
            "ranks 1, seed 0, even network",
        ),
        (raises_what_has_no_text, "", "KeyError in str", "ranks 1, seed 0, even network"),
        (fails_by_pytest, "", "Failed: DID NOT RAISE", "ranks 1, seed 0, even network"),
        (cancels_itself, "", "CancelledError", "ranks 1, seed 0, even network"),
        (exits, "", "rank 0 ends with SystemExit: 0", "ranks 1, seed 0, even network"),
        (exits_in_a_task, "", "task ends with SystemExit(0)", "ranks 1, seed 0, even network"),
        (hangs, "", "never ends", "ranks 1, seed 0, even network"),
        (leaves_a_task, "", "left a task over", "ranks 1, seed 0, even network"),
        (forgets_a_coroutine, "", "'sleep' was never awaited", "ranks 1, seed 0, even network"),
        (dies_of_a_loss, "kill", "PeerLostError", "ranks 2, seed 0, even network, kill 0 at 1"),
        (
            dies_of_a_loss,
            "cut",
            "PeerLostError",
            "ranks 2, seed 0, even network, cut 0 at 1 for 40",
        ),
    ],
)
def test_a_failure_is_made_smaller(program: Program, faults: str, said: str, plan: str) -> None:
    with pytest.raises(FoundError) as found:
        explore(program, faults=faults)
    assert said in found.value.failure
    assert found.value.plan == plan
    assert f'explore({program.__name__}, replay="{plan}")' in str(found.value)
    other = pickle.loads(pickle.dumps(found.value))  # as a pool of processes does
    assert (str(other), vars(other)) == (str(found.value), vars(found.value))


@pytest.mark.parametrize("options", [{}, {"limit": 50.0, "lease": 2.0, "op_timeout": 9.0}], ids=str)
def test_the_last_line_repeats_the_failure(options: dict[str, Any]) -> None:
    async def program(group: aiodist.Group) -> int:
        return group.rank

    def check(results: dict[int, int]) -> None:
        assert sum(results.values()) < 3

    with pytest.raises(FoundError) as found:
        explore(program, seeds=1, check=check, **options)
    last = str(found.value).splitlines()[-1]
    given = "".join(f"{name}={value!r}, " for name, value in options.items())
    line = f'explore(program, check=check, {given}replay="ranks 3, seed 0, even network")'
    assert last == f"Run it again: {line}"
    with pytest.raises(FoundError) as again:
        eval(line, {"explore": explore, "program": program, "check": check})
    assert again.value.failure == found.value.failure


@pytest.mark.parametrize("fault", ["kill 1 at 1", "restart 0 at 1 for 0.1"])
@pytest.mark.parametrize(
    ("forgotten", "said"),
    [
        (lambda group: asyncio.create_task(raises(group)), "never retrieved: KeyError"),
        (lambda group: asyncio.sleep(1.0), "'sleep' was never awaited"),
        (lambda group: group.agree(True), "looked at it"),
    ],
    ids=["error", "coroutine", "Work"],
)
def test_what_a_rank_forgets_is_found_though_another_process_died(
    fault: str, forgotten: Callable[[aiodist.Group], object], said: str
) -> None:
    async def program(group: aiodist.Group) -> None:
        await asyncio.sleep(1.0)
        forgotten(group)
        await asyncio.sleep(1.0)

    with pytest.raises(FoundError, match=said):
        explore(program, replay=f"ranks 2, seed 0, even network, {fault}")


def test_a_killed_rank_has_forgotten_nothing() -> None:
    async def program(group: aiodist.Group) -> None:
        task, coroutine = asyncio.create_task(raises(group)), asyncio.sleep(1.0)
        works = [group.barrier(), group.agree(True), group.all_reduce(1)]
        await asyncio.sleep(1.0)  # here it is killed
        await asyncio.gather(task, coroutine, *works, return_exceptions=True)

    explore(program, replay="ranks 3, seed 0, even network, kill 1 at 1")


def test_what_a_killed_rank_has_left_is_not_collected_in_the_turn_of_another() -> None:
    async def nothing() -> None:
        pass

    async def part() -> None:
        later = nothing()
        await asyncio.sleep(1.0)  # here it is killed
        await later

    async def program(group: aiodist.Group) -> None:
        await asyncio.sleep(1.0)
        if group.rank == 1:
            asyncio.create_task(part())  # noqa: RUF006
        await asyncio.sleep(5.0)
        gc.collect()

    explore(program, replay="ranks 2, seed 0, even network, kill 1 at 2")


class Silent(Exception):
    """An error that cannot be shown."""

    def __repr__(self) -> str:
        raise ValueError("no text")


def test_an_error_that_cannot_be_shown_is_found() -> None:
    async def fails() -> None:
        raise Silent

    async def program(group: aiodist.Group) -> None:
        asyncio.create_task(fails())  # noqa: RUF006
        await asyncio.sleep(1.0)

    with pytest.raises(FoundError, match="never retrieved: Silent"):
        explore(program, ranks=1, seeds=1)


def test_a_check_may_explore() -> None:
    async def program(group: aiodist.Group) -> None:
        pass

    def check(results: object) -> None:
        assert explore(program, ranks=1, seeds=1).seeds == 1

    assert explore(program, ranks=1, seeds=1, check=check).seeds == 1


def test_an_error_is_lost_though_an_operation_has_failed() -> None:
    async def program(group: aiodist.Group) -> None:
        task = asyncio.create_task(raises(group))  # its frame is kept by the error of the receive
        with pytest.raises(aiodist.CollectiveTimeoutError):
            await group.recv(src=0, timeout=1.0)
        assert task.done()

    with pytest.raises(FoundError, match="never retrieved: KeyError"):
        explore(program, ranks=1)


def test_a_check_that_would_never_run_is_refused() -> None:
    async def program(group: aiodist.Group) -> None:
        pass

    async def check(results: object) -> None:
        pass

    with pytest.raises(TypeError, match="check is a plain function"):
        explore(program, check=check)
    with pytest.raises(FoundError, match="TypeError: it returns a coroutine"):
        explore(program, check=lambda _: check({}))


def test_a_story_has_lines_values_and_faults_in_one_clock() -> None:
    async def program(group: aiodist.Group) -> None:
        total = await group.all_reduce(1)
        await asyncio.sleep(total)
        work = group.send("done", 0)
        await work
        assert await group.all_reduce(1) == 2

    with pytest.raises(FoundError) as found:
        explore(program, replay="ranks 2, seed 0, even network, delay 0 at 1 for 1, kill 1 at 2")
    first, delay, *others = found.value.events
    line = program.__code__.co_firstlineno + 1
    text = "total = await group.all_reduce(1)"
    assert first.split(maxsplit=5) == [
        *("0.0", "ms", "ranks", "0,", "1"),
        f"test_explore.py:{line}  {text}  -> total = 2",
    ]
    assert "rank 0" in delay
    assert "FAULT delay" in delay
    assert [line for line in others if "rank 1" in line and "FAULT kill" in line]
    assert [line for line in others if "rank 0" in line and 'work = group.send("done", 0)' in line]
    assert "ends with PeerLostError" in others[-1]


def test_a_seed_decides_what_random_modules_give() -> None:
    seen: list[tuple[float, float]] = []

    async def program(group: aiodist.Group) -> None:
        seen.append((random.random(), float(np.random.random())))

    before = random.getstate()
    explore(program, ranks=1, seeds=[5, 6, 5])
    assert seen[1] == seen[3] != seen[2]
    assert random.getstate() == before


def test_a_program_that_is_not_only_simulated_is_told_so() -> None:
    times = iter(range(1000))

    async def program(group: aiodist.Group) -> None:
        assert next(times) != 7

    with pytest.raises(FoundError, match="depends on something that is not simulated"):
        explore(program, ranks=1)


@pytest.mark.parametrize(
    ("longer", "shorter", "seconds"),
    [
        ("cut 0 at 1 for 5", "cut 1 at 1 for 0.5", 5.0),
        ("delay 0 at 1 for 5", "delay 0 at 1 after 0.01 for 0.05", 5.0),
    ],
)
def test_a_fault_lasts_however_soon_another_is_over(
    longer: str, shorter: str, seconds: float
) -> None:
    async def program(group: aiodist.Group) -> float:
        await asyncio.sleep(0.001)
        await group.barrier()
        return asyncio.get_running_loop().time()

    def check(ended: dict[int, float]) -> None:
        assert max(ended.values()) > seconds

    explore(program, replay=f"ranks 2, seed 0, even network, {longer}, {shorter}", check=check)


class AlarmOver(BaseException):
    """As pytest-timeout raises it in a handler of a signal."""


@pytest.mark.parametrize("number", [signal.SIGALRM, signal.SIGINT])
def test_an_exception_of_a_signal_handler_ends_it_at_once(number: signal.Signals) -> None:
    began: list[int] = []

    async def program(group: aiodist.Group) -> None:
        began.append(group.rank)
        signal.raise_signal(number)

    def over(number: int, frame: object) -> None:
        raise AlarmOver

    before = signal.signal(number, over)
    try:
        with pytest.raises(AlarmOver):
            explore(program)
        assert signal.getsignal(number) is over
    finally:
        signal.signal(number, before)
    assert len(began) == 1  # no other rank goes on, because it might never yield


def test_two_threads_explore_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    asked, lock = threading.Event(), exploring._alone

    class Asked:
        def __enter__(self) -> None:
            asked.set()
            lock.acquire()

        def __exit__(self, *error: object) -> None:
            lock.release()

    async def second(group: aiodist.Group) -> None:
        ran.append("second")

    thread = threading.Thread(target=explore, args=(second,), kwargs={"ranks": 1, "seeds": 1})

    async def first(group: aiodist.Group) -> None:
        if not ran:
            monkeypatch.setattr(exploring, "_alone", Asked())
            thread.start()
            assert asked.wait(30)
        ran.append("first")

    before = logging.root.manager.disable
    explore(first, ranks=1, seeds=3)
    thread.join(30)
    assert ran == ["first"] * 4 + ["second"] * 2
    assert logging.root.manager.disable == before


def test_what_a_killed_rank_raises_in_the_end_is_its_own() -> None:
    async def program(group: aiodist.Group) -> None:
        try:
            await asyncio.sleep(1.0)
        except BaseException:
            sys.exit(7)

    explore(program, replay="ranks 2, seed 0, even network, kill 1 at 1")


def test_what_a_rank_raised_before_it_was_killed_counts() -> None:
    async def program(group: aiodist.Group) -> None:
        if group.rank == 1:
            await asyncio.sleep(1.0)
            raise KeyError("early")
        with contextlib.suppress(aiodist.AiodistError):
            await group.barrier()

    plan = "ranks 2, seed 0, even network, kill 1 at 1 after"
    explore(program, replay=f"{plan} 0.5")
    with pytest.raises(FoundError, match="rank 1 ends with KeyError: 'early'"):
        explore(program, replay=f"{plan} 1.0005")


def test_what_happened_is_counted() -> None:
    async def program(group: aiodist.Group) -> None:
        await asyncio.sleep(1.0)

    explored = explore(program, faults="delay, break", seeds=range(3, 20))
    assert explored.seeds == 17
    assert explored.faults.keys() == {"delay", "break"}


@pytest.mark.parametrize("faults", ["kill", "cut", "delay", "break", "restart"])
def test_a_program_that_expects_all_faults_passes(faults: str) -> None:
    async def program(group: aiodist.Group) -> None:
        try:
            for _ in range(3):
                await group.all_reduce(1)
        except aiodist.AiodistError:
            pass

    assert explore(program, faults=faults, seeds=4).seeds == 4


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"faults": "kil"}, "faults are some of"),
        ({"faults": ["kill"]}, "faults is a text"),
        ({"seeds": 0}, "seeds has no seed"),
        ({"seeds": []}, "seeds has no seed"),
        ({"seeds": 2.5}, "seeds is an int, or ints, not 2.5"),
        ({"seeds": [1, "a"]}, "each of seeds is an int, not 'a'"),
        ({"seeds": [True]}, "each of seeds is an int, not True"),
        ({"seeds": (-1,)}, "each of seeds is from 0 to 2\\*\\*32 - 1, not -1"),
        ({"ranks": 0}, "at least 1"),
        ({"ranks": "3"}, "ranks is an int, not '3'"),
        ({"limit": -1}, "limit is more than 0 seconds, not -1"),
        ({"limit": "x"}, "limit is a number of seconds, not 'x'"),
        ({"check": 3}, "check is a plain function of the results by rank, not 3"),
        ({"limit": float("inf")}, "limit is a finite number of seconds"),
        ({"conditions": None}, "conditions= means nothing here"),
        ({"replay": "seed 3"}, "a plan reads like"),
        ({"replay": "ranks 0, seed 3"}, "a plan reads like"),
        ({"replay": "ranks 2, seed 3, kill 1 at 1 after 1.2.3"}, "a plan reads like"),
        ({"replay": f"ranks 2, seed {2**32}"}, "the seed of replay is from 0 to"),
        ({"lease": -1.0}, "lease is more than 0"),
        ({"transports": ("pigeon",)}, "no transport 'pigeon'"),
        ({"rank": 2}, "the number of ranks is ranks="),
        ({"nonsense": 3}, "unexpected keyword argument"),
        ({"min_size": 2}, "size=3 makes a fixed group"),
    ],
    ids=str,
)
def test_arguments_that_mean_nothing_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises((ValueError, TypeError), match=said):
        explore(aiodist.Group.barrier, **options)


@pytest.mark.parametrize("fault", ["kill 1 at 9", "cut 1 at 1 after 5 for 0.5"])
def test_a_fault_of_a_replay_that_does_not_happen_is_told(fault: str) -> None:
    async def meets(group: aiodist.Group) -> None:
        await group.barrier()

    plan = f"ranks 2, seed 0, even network, {fault}"
    said = f"{fault} did not happen: rank 1 waited "
    with pytest.raises(ValueError, match=f"^replay: {said}1 times, so this run"):
        explore(meets, replay=plan)
    with pytest.raises(FoundError, match=rf"^This run fails \({said}0 times\): 2 ranks"):
        explore(raises, replay=plan)


async def is_not_read(group: aiodist.Group) -> None:
    if group.rank == 0:
        await group.send(b"a message", 1)
    else:
        await asyncio.sleep(30.0)


@pytest.mark.parametrize(
    ("program", "options", "said"),
    [
        (hangs, {"timeout": 1e-6}, "JoinTimeoutError"),
        (
            is_not_read,
            {"replay": "ranks 2, seed 0, even network, delay 1 at 1 for 20", "op_timeout": 2.0},
            "rank 0 ends with CollectiveTimeoutError: left, but not all",
        ),
    ],
    ids=["join", "close"],
)
def test_joining_and_leaving_may_fail(program: Program, options: dict[str, Any], said: str) -> None:
    with pytest.raises(FoundError, match=said):
        explore(program, **{"replay": "ranks 3, seed 0", **options})


TESTS = """
import asyncio
import os
from unittest import mock

import aiodist
import pytest


@pytest.fixture
def expected():
    return 1


@pytest.mark.simulate(ranks=2, seeds=3)
async def test_passes(group, expected):
    assert await group.all_reduce(expected) == group.size


@pytest.mark.simulate(ranks=2, seeds=1)
@mock.patch.object(os, "sep", "patched")
async def test_keeps_its_decorators(group):
    assert os.sep == "patched"


@pytest.mark.simulate(ranks=3, faults="kill", seeds=4)
async def test_fails(group):
    await asyncio.sleep(1.0)
    await group.barrier()


@pytest.mark.simulate(replay="ranks 1, seed 0")
async def test_has_a_plan_of_its_own(group):
    assert group.size == 1


@pytest.mark.simulate(ranks=1, seeds=1)
async def test_is_skipped(group):
    pytest.skip("not here")


@pytest.mark.simulate(3)
async def test_has_a_marker_that_means_nothing(group):
    pass


@pytest.mark.simulate(faults="kil")
async def test_has_a_fault_that_means_nothing(group):
    pass


class TestMethods:
    @staticmethod
    @pytest.mark.simulate(ranks=2, seeds=3)
    async def test_is_static(group, expected, factor=3):
        assert await group.all_reduce(expected * factor) == 6

    @pytest.mark.simulate(ranks=2, seeds=3)
    @pytest.mark.parametrize("value", [1, 2])
    async def test_passes(self, ranks, value):
        assert await ranks.all_reduce(value) == value * ranks.size
"""
REAL = """

async def test_without_the_marker():
    await asyncio.sleep(0)
"""


@pytest.mark.parametrize(
    "beside", ["pytest-asyncio", pytest.param("nothing", marks=pytest.mark.long)]
)
def test_the_plugin_of_pytest(beside: str, tmp_path: Path) -> None:
    alone = beside == "nothing"
    (tmp_path / "test_it.py").write_text(TESTS if alone else TESTS + REAL)
    options = (
        ["-p", "no:asyncio"]
        if alone
        else ["-o", "asyncio_mode=auto", "-o", "asyncio_default_fixture_loop_scope=function"]
    )

    def run(*more: str) -> str:
        command = [sys.executable, "-m", "pytest", "-p", "aiodist_pytest", "-p", "no:cacheprovider"]
        command += ["-q", "--strict-markers", "-W", "error", "-c", "/dev/null", *options, *more]
        done = subprocess.run(
            command, cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            check=False, timeout=50,
        )  # fmt: skip
        return done.stdout + done.stderr

    found = run("test_it.py")
    assert f"3 failed, {6 if alone else 7} passed, 1 skipped" in found
    assert "too many positional arguments" in found
    assert "faults are some of 'kill cut delay break restart', not 'kil'" in found
    assert "For example" not in found  # the docstring of `explore`, which a traceback would show
    again = (
        'pytest "test_it.py::test_fails" --simulate "ranks 2, seed 0, even network, kill 0 at 1"'
    )
    assert again in found
    failures, _, _ = found.partition("short test summary info")  # which some versions cut short
    assert failures.count("Run it again") == 1
    assert "await asyncio.sleep(1.0)  -> killed meanwhile" in found
    if not alone:
        calm = "ranks 2, seed 0, even network"
        assert "1 passed" in run("test_it.py::test_fails", "--simulate", calm)
        assert run("test_it.py", "--simulate", "seed 3").startswith("ERROR: --simulate: a plan")
