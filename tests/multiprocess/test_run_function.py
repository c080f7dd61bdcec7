"""`aiodist.run`: results, failures, and that nothing stays."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest

import aiodist
from aiodist import launch
from aiodist.launching import reports, spawn


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    threads = set(threading.enumerate())
    yield
    after = {child.pid for child in psutil.Process().children(recursive=True)}
    assert after <= before
    assert set(threading.enumerate()) <= threads


async def sum_of_ranks(group: aiodist.Group, factor: int) -> tuple[int, int]:
    return group.rank, await group.all_reduce(factor * group.rank)


def test_results_come_by_rank() -> None:
    assert aiodist.run(sum_of_ranks, 3, (10,)) == [(0, 30), (1, 30), (2, 30)]


async def large_result(group: aiodist.Group) -> np.ndarray[Any, Any]:
    return np.full(300_000, group.rank)


def test_large_results() -> None:
    results = aiodist.run(large_result, 2)
    assert [(len(result), result[-1]) for result in results] == [(300_000, 0), (300_000, 1)]


async def environment(group: aiodist.Group) -> dict[str, str | None]:
    names = ("AIODIST_RANK", "WORLD_SIZE", "LOCAL_RANK", "OMP_NUM_THREADS")
    loop = type(asyncio.get_running_loop()).__module__
    return {"loop": loop} | {name: os.environ.get(name) for name in names}


def test_ranks_have_uvloop_and_the_variables_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert aiodist.run(environment, 1) == [
        {
            "loop": "uvloop",
            "AIODIST_RANK": "0",
            "WORLD_SIZE": "1",
            "LOCAL_RANK": "0",
            "OMP_NUM_THREADS": "3",
        }
    ]


class OwnError(Exception):
    def __init__(self, text: str, number: int) -> None:
        super().__init__(text)
        self.number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return OwnError, (self.args[0], self.number)


async def rank_1_fails(group: aiodist.Group) -> None:
    await group.barrier()
    if group.rank == 1:
        raise OwnError("mine", 7)
    await group.recv()


def test_failure_is_raised_with_its_traceback_and_rank() -> None:
    with pytest.raises(OwnError, match="mine") as caught:
        aiodist.run(rank_1_fails, 3)
    assert caught.value.number == 7
    assert caught.value.__notes__ == ["(in rank 1 of 3)"]
    assert 'raise OwnError("mine", 7)' in str(caught.value.__cause__)


async def rank_0_gives_up(group: aiodist.Group) -> None:
    if group.rank == 0:
        raise aiodist.PeerLostError("rank 1 seems gone", ranks=[1])
    await asyncio.Event().wait()


def test_consequence_without_cause_is_raised_after_a_moment() -> None:
    with pytest.raises(aiodist.PeerLostError, match="rank 1 seems gone"):
        aiodist.run(rank_0_gives_up, 2)


class UnpicklableError(Exception):
    def __init__(self, first: str, second: str) -> None:
        super().__init__(first)


async def rank_0_wraps_its_loss(group: aiodist.Group, error: Callable[[], Exception]) -> None:
    if group.rank == 0:
        try:
            raise aiodist.PeerLostError("rank 1 is gone", ranks=[1])
        except aiodist.PeerLostError as loss:
            raise error() from loss
    with contextlib.suppress(aiodist.PeerLostError):
        await group.recv()
    raise OwnError("the cause", 7)


def unpicklable() -> Exception:
    return UnpicklableError("the step", "failed")


@pytest.mark.parametrize("error", [RuntimeError, unpicklable])
def test_a_cause_is_raised_rather_than_what_was_raised_from_its_consequence(error: Any) -> None:
    with pytest.raises(OwnError, match="the cause"):
        aiodist.run(rank_0_wraps_its_loss, 2, (error,))


async def die(group: aiodist.Group, number: int) -> None:
    await group.barrier()
    if group.rank == 1:
        os.kill(os.getpid(), number)
    await group.recv()


@pytest.mark.parametrize("has_waitid", [True, False], ids=["waitid", "no waitid"])
def test_rank_that_dies_is_named(monkeypatch: pytest.MonkeyPatch, has_waitid: bool) -> None:
    if not has_waitid:  # macOS
        monkeypatch.delattr(os, "waitid")
    with pytest.raises(
        aiodist.PeerLostError, match=r"rank 1 of 2 died \(signal SIGKILL\) before its main returned"
    ) as caught:
        aiodist.run(die, 2, (signal.SIGKILL,))
    assert caught.value.ranks == (1,)


async def leave(group: aiodist.Group) -> None:
    os._exit(3)


def test_rank_that_exits_is_named() -> None:
    with pytest.raises(aiodist.PeerLostError, match=r"rank 0 of 1 died \(exit code 3\)"):
        aiodist.run(leave, 1)


async def end_by(group: aiodist.Group, error: BaseException) -> None:
    raise error


@pytest.mark.parametrize("error", [SystemExit(0), asyncio.CancelledError()])
def test_what_is_no_exception_does_not_end_the_caller(error: BaseException) -> None:
    with pytest.raises(
        aiodist.AiodistError, match=f"rank 0 of 1 ended by {type(error).__name__}"
    ) as caught:
        aiodist.run(end_by, 1, (error,))
    assert "raise error" in str(caught.value.__cause__)


class Unpicklable(Exception):
    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("not this one")


async def fail_unpicklably(group: aiodist.Group) -> None:
    raise Unpicklable("odd")


def test_failure_that_cannot_be_pickled() -> None:
    says = "^rank 0 of 1 raised Unpicklable: odd, which cannot be pickled"
    with pytest.raises(aiodist.AiodistError, match=says) as caught:
        aiodist.run(fail_unpicklably, 1)
    assert "Unpicklable: odd" in str(caught.value.__cause__)


@dataclass(frozen=True)
class Frozen(Exception):
    pass


def test_failure_whose_attributes_are_fixed() -> None:
    says = "^rank 0 of 1 raised Frozen, whose attributes are fixed$"
    with pytest.raises(aiodist.AiodistError, match=says) as caught:
        aiodist.run(end_by, 1, (Frozen(),))
    assert "raise error" in str(caught.value.__cause__)


async def return_unpicklable(group: aiodist.Group) -> object:
    return threading.Lock()  # cloudpickle, which is used where there is no main module, has no way


def test_result_that_cannot_be_pickled() -> None:
    with pytest.raises(
        aiodist.AiodistError, match="what main returned cannot be pickled"
    ) as caught:
        aiodist.run(return_unpicklable, 1)
    assert caught.value.__notes__ == ["(in rank 0 of 1)"]


def refuse(maker: int) -> None:
    if os.getpid() != maker:
        raise ImportError("there is no such thing here")


class Foreign(Exception):
    """Unpickled in no other process than the one that made it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return refuse, (os.getpid(),)


class ForeignError(Exception):
    def __init__(self, maker: int) -> None:
        super().__init__(maker)
        refuse(maker)


async def report_foreign(group: aiodist.Group, how: str) -> object:
    if how == "returns":
        return Foreign()
    raise ForeignError(os.getpid())


@pytest.mark.parametrize("how", ["returns", "raises"])
def test_report_that_cannot_be_unpickled(how: str) -> None:
    with pytest.raises(
        aiodist.AiodistError,
        match="what rank 0 of 1 reported cannot be unpickled here: ImportError: there is no such",
    ) as caught:
        aiodist.run(report_foreign, 1, (how,))
    assert caught.value.__notes__ == ["(in rank 0 of 1)"]
    assert ("raise ForeignError" in str(caught.value.__cause__)) == (how == "raises")


def break_off(then: Callable[[int], None]) -> None:
    """This process gets no further than half of its report."""

    def send(fd: int, report: reports.Report) -> None:
        os.write(fd, b"\0" * 5)
        then(fd)

    reports.send = send


async def report_half(group: aiodist.Group, number: int) -> None:
    if group.rank == group.size - 1:
        break_off(lambda fd: os.kill(os.getpid(), number))


async def report_nothing(group: aiodist.Group) -> None:
    def close(fd: int) -> None:
        os.close(fd)
        signal.pause()

    break_off(close)


async def go_on(group: aiodist.Group) -> None:
    threading.Thread(target=signal.sigwait, args=({signal.SIGUSR2},)).start()


class Clock:
    """Of `aiodist.run`, in this process."""

    def __init__(self) -> None:
        self._late = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self._late

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def pass_timeout(self) -> None:
        self._late = 1e6


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(launch, "time", clock)
    return clock


@pytest.fixture
def half_is_late(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """The timeout passes once a part of a report has come, or its pipe has ended."""
    read = reports.ReportReading.read

    def reading(self: reports.ReportReading) -> None:
        read(self)
        if self.has_begun or self.is_over:
            clock.pass_timeout()

    monkeypatch.setattr(reports.ReportReading, "read", reading)


def test_rank_that_dies_while_it_reports_is_named() -> None:
    with pytest.raises(
        aiodist.PeerLostError, match=r"rank 1 of 2 died \(signal SIGKILL\) while it reported"
    ) as caught:
        aiodist.run(report_half, 2, (signal.SIGKILL,))
    assert caught.value.ranks == (1,)


def test_rank_that_is_stopped_while_it_reports(half_is_late: None) -> None:
    with pytest.raises(TimeoutError, match=r"still ran after 900 s \(rank 0 amid a report: stop"):
        aiodist.run(report_half, 1, (signal.SIGSTOP,), timeout=900)


def test_rank_that_closes_its_pipe_and_stays(half_is_late: None) -> None:
    with pytest.raises(TimeoutError, match="rank 0 of 1 still ran after 900 s"):
        aiodist.run(report_nothing, 1, timeout=900)


def test_rank_that_has_returned_and_stays(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    take = launch._Ranks._take

    def taking(*arguments: Any) -> None:
        take(*arguments)
        clock.pass_timeout()

    monkeypatch.setattr(launch._Ranks, "_take", taking)
    with pytest.raises(TimeoutError, match="rank 0 of 1 had returned, but still ran after 900 s"):
        aiodist.run(go_on, 1, timeout=900)


def fork_a_child(path: str) -> None:
    """It holds the pipe."""
    pid = os.fork()
    if not pid:
        signal.pause()
    Path(path).write_text(str(pid))


async def leave_a_child(group: aiodist.Group, code: int | None, path: str) -> None:
    fork_a_child(path)
    if code is not None:
        os._exit(code)


@pytest.mark.parametrize("code", [None, 3])
def test_child_that_holds_the_pipe(
    code: int | None, tmp_path: Path, gone: Callable[[int], bool]
) -> None:
    path = tmp_path / "pid"
    if code is None:
        assert aiodist.run(leave_a_child, 1, (code, str(path))) == [None]
    else:
        with pytest.raises(aiodist.PeerLostError, match=r"rank 0 of 1 died \(exit code 3\)"):
            aiodist.run(leave_a_child, 1, (code, str(path)))
    assert gone(int(path.read_text()))


class WithoutUvloop:
    """Removes uvloop from the process that reads it, because uvloop crashes in a forked child."""

    def __reduce__(self) -> Any:
        return without_uvloop, ()


def without_uvloop() -> None:
    sys.modules["uvloop"] = None  # type: ignore[assignment]


def exit_code(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


async def exit_in_a_child(group: aiodist.Group, raises: bool, _: object) -> int:
    if (child := os.fork()) == 0:
        signal.alarm(60)  # the test ends even if the child does not
        loop: Any = group._loop
        loop._selector = selectors.DefaultSelector()  # its end changes that of the parent's loop
        if raises:
            sys.exit()
        return -1
    return exit_code(child)


@pytest.mark.parametrize("raises", [True, False])
def test_child_that_ends_in_main(raises: bool) -> None:
    """It reports nothing in the name of its rank."""
    assert aiodist.run(exit_in_a_child, 1, (raises, WithoutUvloop())) == [0]


@pytest.mark.parametrize("dies", [True, False])
def test_ranks_are_signalled_while_their_numbers_are_their_own(
    monkeypatch: pytest.MonkeyPatch, dies: bool
) -> None:
    """A reaped process has no number, so another process group may have it."""
    signal_group, signals = spawn.signal_group, []

    def signalling(pid: int, number: signal.Signals) -> bool:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)  # raises if it was reaped
        signals.append(number)
        return signal_group(pid, number)

    monkeypatch.setattr(spawn, "signal_group", signalling)
    if dies:
        with pytest.raises(aiodist.PeerLostError):
            aiodist.run(die, 2, (signal.SIGKILL,))
    else:
        aiodist.run(sum_of_ranks, 2, (1,))
    assert signals == [
        number for number in (signal.SIGTERM, signal.SIGCONT, signal.SIGKILL) for _ in range(2)
    ]


def test_ctrl_c_while_ranks_are_started(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def start(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        started.append(process := subprocess.Popen(*arguments, **options))
        signal.raise_signal(signal.SIGINT)
        return process

    monkeypatch.setattr(
        launch, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": start})
    )
    with pytest.raises(KeyboardInterrupt):
        aiodist.run(wait_for_ever, 2)
    (first,) = started
    assert first.returncode is not None


async def wait_for_ever(group: aiodist.Group) -> None:
    if group.rank == 0:
        await asyncio.Event().wait()


def test_timeout_names_who_is_late() -> None:
    with pytest.raises(TimeoutError, match=r"of 2 still ran after 0\.2 s"):
        aiodist.run(wait_for_ever, 2, timeout=0.2)


async def size_of_messages(group: aiodist.Group) -> int:
    async with aiodist.connect(group="second"):  # with the token of the environment
        return group._context.max_message_bytes


def without_arguments() -> None:
    pass


def not_async(group: aiodist.Group) -> int:
    return group.rank


@pytest.mark.parametrize("token", ["mine", b"\xff", None])
def test_options_go_to_connect(token: str | bytes | None) -> None:
    options: Any = {"max_message_bytes": 1000, "token": token}
    assert aiodist.run(size_of_messages, 1, **options) == [1000]


def test_a_function_within_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    async def inner(group: aiodist.Group) -> None:
        """Nothing can import it."""

    # Without a file of the main module, as under pytest-xdist, cloudpickle would take it.
    monkeypatch.setattr("aiodist.launch._packs_by_value", lambda main: False)
    with pytest.raises(TypeError, match=r"pickled, .*inner.*: move .* the top level of a module$"):
        aiodist.run(inner, 1)


def test_wrong_calls() -> None:
    with pytest.raises(ValueError, match="at least 1, not 0"):
        aiodist.run(wait_for_ever, 0)
    with pytest.raises(TypeError, match="pickle"):
        aiodist.run(sum_of_ranks, 1, args=(threading.Lock(),))
    start: Any = aiodist.run
    with pytest.raises(TypeError, match=r"run\(\) got an unexpected .*'no_such_option'$"):
        start(wait_for_ever, 1, no_such_option=1)
    with pytest.raises(ValueError, match="zero byte"):
        aiodist.run(wait_for_ever, 1, token=b"\0")
    with pytest.raises(TypeError, match=r"a token is a str or bytes, not .* int$"):
        start(wait_for_ever, 1, token=5)
    for name in ("size", "world_size"):
        with pytest.raises(TypeError, match=rf"run\(\) got an unexpected .*'{name}': use nprocs=$"):
            start(wait_for_ever, 2, **{name: 4})
    with pytest.raises(TypeError, match=r"args is a tuple of .*, such as \(5,\), not 5"):
        start(wait_for_ever, 1, args=5)
    with pytest.raises(TypeError, match="main must be an async function; it returned 0"):
        start(not_async, 1)
    with pytest.raises(ValueError, match="nprocs=4097: a group has at most 4096 ranks"):
        aiodist.run(sum_of_ranks, 4097)
    with pytest.raises(TypeError, match=r"nprocs is the number of processes .*, not '2'$"):
        start(wait_for_ever, "2")


@pytest.mark.parametrize(
    ("main", "why"),
    [(without_arguments, "too many"), (sum_of_ranks, "'factor'"), (5, "not a callable")],
)
def test_a_main_that_cannot_be_called_with_its_arguments(main: Any, why: str) -> None:
    with pytest.raises(TypeError, match=rf"main is called as main\(group, \*args\), .*{why}"):
        aiodist.run(main, 1)


AT_A_PROMPT = """
import aiodist

class Number:
    def __init__(self, value):
        self.value = value

class Odd(Exception):
    pass

FACTOR = 10

async def double(group, number):
    if number.value % 2:
        raise Odd(number)
    return Number(FACTOR * await group.all_reduce(number.value))

print([type(number) is Number and number.value for number in aiodist.run(double, 2, (Number(2),))])
try:
    aiodist.run(double, 1, (Number(3),))
except Odd as error:
    print(type(error.args[0]) is Number, error.__notes__)
"""


@pytest.mark.parametrize("given", [["-c", AT_A_PROMPT], ["-"]], ids=["command", "stdin"])
def test_functions_and_classes_of_a_prompt_travel_as_a_whole(given: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, *given],
        input=AT_A_PROMPT,
        capture_output=True,
        text=True,
        check=False,
        timeout=50,
    )
    printed = "[40, 40]\nTrue ['(in rank 0 of 1)']\n"
    assert (done.stdout, done.stderr) == (printed, "")


def test_a_function_of_a_prompt_without_cloudpickle() -> None:
    program = f"import sys; sys.modules['cloudpickle'] = None\n{AT_A_PROMPT}"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=50
    )
    assert done.stderr.splitlines()[-1].endswith("pip install cloudpickle, or move it to a module")


async def test_blocking_the_running_loop_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"aiodist\.run blocks .* asyncio\.to_thread"):
        aiodist.run(wait_for_ever, 1)


async def test_from_a_thread() -> None:
    assert await asyncio.to_thread(aiodist.run, sum_of_ranks, 2, (1,)) == [(0, 1), (1, 1)]


SCRIPT = """
import asyncio, os, sys
import aiodist

async def main(group):
    os.write(1, b"pid %d\\n" % os.getpid())  # at once, so that two do not mix
    await asyncio.Event().wait()

{guard}aiodist.run(main, 2)
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []

    def run(guard: str) -> subprocess.Popen[str]:
        path = tmp_path / "script.py"
        path.write_text(SCRIPT.format(guard=guard))
        process = subprocess.Popen(
            [sys.executable, str(path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


def watch(process: subprocess.Popen[str]) -> list[int]:
    """Descriptors that become readable when the two ranks are gone."""
    assert process.stdout is not None
    pids = [int(process.stdout.readline().split()[1]) for _ in range(2)]
    return [os.pidfd_open(pid) for pid in pids]


def all_gone(fds: list[int]) -> bool:
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    end = time.monotonic() + 10
    try:
        while len(poll.poll(10_000)) < len(fds) and time.monotonic() < end:
            pass
        return len(poll.poll(0)) == len(fds)
    finally:
        for fd in fds:
            os.close(fd)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_ranks_end_with_the_caller(
    start: Callable[[str], subprocess.Popen[str]], number: signal.Signals
) -> None:
    process = start('if __name__ == "__main__": ')
    ranks = watch(process)
    process.send_signal(number)
    _, err = process.communicate(timeout=200)
    assert process.returncode == -number
    assert all_gone(ranks)
    assert ("KeyboardInterrupt" in err) == (number == signal.SIGINT)


def test_missing_guard_is_explained(start: Callable[[str], subprocess.Popen[str]]) -> None:
    _, err = start("").communicate(timeout=200)
    assert 'call it under if __name__ == "__main__":' in err.splitlines()[-2]


async def fail_beside_a_busy_rank(group: aiodist.Group) -> None:
    await group.barrier()
    if group.rank == 0:
        raise KeyError("mine")
    signal.pause()


def test_ranks_that_are_stopped_are_no_loss_that_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with pytest.raises(KeyError, match="mine"):
        aiodist.run(fail_beside_a_busy_rank, 3)
    lost = [vars(record) for record in caplog.records if vars(record).get("event") == "lost"]
    assert not [one for one in lost if one["rank"] != 0], lost
