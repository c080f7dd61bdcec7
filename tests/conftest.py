"""What every test gets: loops of both kinds, an end to what hangs in them, and a check that nothing
was left behind."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import os
import signal
import sys
import threading
import traceback
import zlib
from collections.abc import Callable, Coroutine, Generator, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
import uvloop
from hypothesis import HealthCheck, settings
from idle_time import IdleTime

pytest.register_assert_rewrite("plans", "processes", "survey")

# The same examples in every run, however long each takes: other processes share the processors.
# Others: `pytest --hypothesis-profile=default`.
settings.register_profile(
    "replayed", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("replayed")

# Else each rank that a test starts would compile the library anew, and each run these tests.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# A shell that starts the tests in the background has them, and what they start, ignore it.
signal.signal(signal.SIGINT, signal.default_int_handler)

T = TypeVar("T")
Run = Callable[[Coroutine[Any, Any, T]], T]

LOOPS = ("asyncio", "uvloop")
FACTORIES: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
    "idle time": IdleTime,
}

ABOVE_THE_LOOP = tuple(
    f"{Path(__file__).parent / name}{os.sep}"
    for name in (
        *("averaging", "channels", "collectives", "faults", "multiprocess", "scenarios"),
        *("unit/blocking", "unit/collectives", "unit/control", "unit/prepared", "unit/p2p"),
    )
)
"""Where tests are about what is above the event loop. What depends on it is tested on both kinds:
the transports, and what they share."""


@pytest.fixture
def no_turn_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    """No call waits for a turn of the loop, however slow the machine is."""
    monkeypatch.setattr("aiodist.transports.polling.LOOP_DUE", 3600.0)


@pytest.fixture
def patience(request: pytest.FixtureRequest) -> float:
    """Seconds after which `run` gives up: shortly before pytest's timeout, an exception in a signal
    handler, which uvloop only reports. 0, as with ``pytest --timeout 0``: never."""
    seconds = _timeout(request.node)
    return seconds - min(5.0, seconds / 4)


@pytest.fixture(params=LOOPS)
def run(request: pytest.FixtureRequest, patience: float) -> Iterator[Run[Any]]:
    """``run(coroutine)`` in a loop of either kind, or one that `on_idle_time` gives; fails if a
    task is left over, and if it, or the end of the loop, takes longer than `patience`."""
    stuck: list[str] = []

    async def checked(coroutine: Coroutine[Any, Any, T]) -> T:
        loop, main = asyncio.get_running_loop(), asyncio.current_task()
        assert main is not None

        def give_up() -> None:
            if stuck:  # cancelling did not help, or ending the tasks that are left hangs
                loop.stop()
            else:
                stuck.append(_stacks(loop))
                main.cancel()
            loop.call_later(1.0, give_up)

        if patience:
            loop.call_later(patience, give_up)
        result = await coroutine
        left = asyncio.all_tasks() - {main}
        assert not left, f"tasks left over: {left}"
        return result

    def within(coroutine: Coroutine[Any, Any, T]) -> T:
        try:
            result = runner.run(checked(coroutine))
        except BaseException as error:
            if stuck:
                raise _Hangs(patience, stuck[0]) from error
            raise
        if stuck:
            raise _Hangs(patience, stuck[0])
        return result

    runner = asyncio.Runner(loop_factory=FACTORIES[request.param])
    try:
        with runner:
            yield within
    except RuntimeError as error:
        if stuck:  # `give_up` has stopped the loop amid the runner's clean-up
            raise _Hangs(patience, stuck[0]) from error
        raise


class _Hangs(AssertionError):
    def __init__(self, seconds: float, stacks: str) -> None:
        super().__init__(f"not done after {seconds:g} s; what still waited then:\n{stacks}")


def _timeout(item: pytest.Item) -> float:
    """Seconds that pytest-timeout gives a test; 0: no end to them."""
    marker = item.get_closest_marker("timeout")
    if marker is not None:
        return float(marker.args[0])
    given = item.config.getoption("timeout")
    return float(item.config.getini("timeout") if given is None else given)


def _stacks(loop: asyncio.AbstractEventLoop) -> str:
    """Where each task waits: `Task.print_stack` would show the outermost frame alone."""
    lines = []
    for task in asyncio.all_tasks(loop):
        lines.append(f"{task.get_name()}:\n")
        inner: Any = task.get_coro()
        while inner is not None and getattr(inner, "cr_frame", None) is not None:
            lines += traceback.format_stack(inner.cr_frame, limit=1)
            inner = inner.cr_await
        lines.append(f"    {inner!r}\n")
    return "".join(lines) or "no task: the loop did not turn"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all-combinations", action="store_true", help="also what `long` and `strength` leave out"
    )
    parser.addoption("--long", action="store_true", help="also what `long` leaves out")
    parser.addoption("--left-out", action="store_true", help="only that, and no other test")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Tests are no garbage. Looking for some among ever more of them takes seconds."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_itemcollected(item: pytest.Item) -> None:
    """As if each of these tests were marked so."""
    if str(item.path).startswith(ABOVE_THE_LOOP):
        item.add_marker("one_loop")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out, unless they are named, tests that are marked `long`, most of those that are marked
    `sample(n)`, and what `in_turn` does not want of those that are marked `one_loop`; thin what is
    left of those that are marked `strength(t)`: see `covering`."""
    out: set[pytest.Item] = set()
    everything = config.getoption("all_combinations")
    if not everything and not any("::" in argument for argument in config.args):
        out.update(item for item in items if not in_turn(item))
        if not config.getoption("long"):
            out.update(item for item in items if item.get_closest_marker("long"))
            for marker, group in marked("sample", items, out):
                (count,) = marker.args
                kept = {at * len(group) // count for at in range(count)}
                out.update(item for at, item in enumerate(group) if at not in kept)
    for marker, group in marked("strength", items, out):
        if hasattr(group[0], "callspec") and not everything:
            values = [item.callspec.params.items() for item in group]
            rows = [{name: id(value) for name, value in params} for params in values]
            kept = covering(rows, *marker.args)
            out.update(item for at, item in enumerate(group) if at not in kept)
    if config.getoption("left_out"):
        out = set(items) - out
    if out:
        items[:] = [item for item in items if item not in out]
        config.hook.pytest_deselected(items=sorted(out, key=lambda item: item.nodeid))


def marked(
    name: str, items: list[pytest.Item], out: set[pytest.Item]
) -> list[tuple[pytest.Mark, list[pytest.Function]]]:
    """By test function with this mark: the mark, and all cases that are not left out."""
    found: dict[tuple[Any, ...], tuple[pytest.Mark, list[pytest.Function]]] = {}
    for item in items:
        mark = item.get_closest_marker(name)
        if mark is not None and item not in out and isinstance(item, pytest.Function):
            found.setdefault((item.path, item.cls, item.originalname), (mark, []))[1].append(item)
    return list(found.values())


def in_turn(item: pytest.Item) -> bool:
    """Whether a test is on its kind of event loop, of those that are marked `one_loop`. Which one
    that is goes by its name and its other parameters, so about half of them are on each."""
    if not isinstance(item, pytest.Function) or not item.get_closest_marker("one_loop"):
        return True
    loop = item.callspec.params.get("run") if hasattr(item, "callspec") else None
    if loop not in LOOPS:
        return True
    name = f"{item.originalname} {item.callspec.id.replace(loop, '', 1)}"
    return LOOPS[zlib.crc32(name.encode()) % len(LOOPS)] == loop


def covering(rows: list[dict[str, int]], strength: int) -> set[int]:
    """Which of `rows` together hold every combination of values that any `strength` parameters
    have in one of them: a covering array, chosen greedily (as AETG does)."""
    missing = [
        set(itertools.combinations(sorted(row.items()), min(strength, len(row)))) for row in rows
    ]
    kept: set[int] = set()
    while any(missing):
        best = max(range(len(rows)), key=lambda at: len(missing[at]))
        kept.add(best)
        found = set(missing[best])
        for each in missing:
            each -= found
    return kept


class _Mapped:
    """Shared memory that is mapped, by where it lies. To have the system list all that is mapped
    takes milliseconds once torch is there. So it is asked only where the size of it all has
    changed, as it does when anything more is mapped."""

    def __init__(self) -> None:
        self._size = b""
        self._found: dict[str, str] = {}

    def now(self) -> dict[str, str]:
        size = Path("/proc/self/statm").read_bytes().partition(b" ")[0]
        if size != self._size:
            maps = Path("/proc/self/maps").read_text().splitlines()
            self._found = {one.split()[0]: one.split()[5] for one in maps if " /memfd:" in one}
            self._size = size
        return self._found


_mapped = _Mapped()


def _held() -> dict[str, str]:
    """Sockets and other files that are open, by number, and shared memory that is mapped, by where
    it lies: what they are."""
    found = {**_mapped.now()}
    for fd in os.listdir("/proc/self/fd"):
        try:
            name = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue  # the listing's own
        if name.startswith(("socket:", "/memfd:", "anon_inode:")):
            found[fd] = name
    return found


def _children() -> set[str]:
    found: set[str] = set()
    for task in Path("/proc/self/task").iterdir():
        try:
            found |= set((task / "children").read_text().split())
        except OSError:
            continue  # a thread that has just ended
    return found


def _shared_files() -> set[str]:
    """Those of the library alone: torch, Ray, MPI and multiprocessing make others, for tests that
    run beside this one, or for whoever else is on this machine."""
    return {name for name in os.listdir("/dev/shm") if "aiodist" in name}


@pytest.fixture
def no_shared_files() -> Iterator[None]:
    """Nothing is in /dev/shm that was not there before the test."""
    before = _shared_files()
    yield
    assert _shared_files() <= before


@pytest.fixture(scope="module", autouse=True)
def little_to_collect() -> None:
    """What is there now (modules, thousands of tests) is nobody's garbage: the collections of
    `no_leaks` and of simulations need not go through it each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    """Nothing that the test opened or started is there when it has ended."""
    if not Path("/proc/self/fd").exists():
        yield
        return
    threads, files, children = set(threading.enumerate()), _held(), _children()
    yield
    late = [t for t in threading.enumerate() if t not in threads and not _pooled(t)]
    for thread in late:
        thread.join(30)
    alive = [thread for thread in late if thread.is_alive()]
    assert not alive, f"threads left over: {alive}"
    if (held := _held()) != files:
        gc.collect()  # what only a cycle kept open is no leak
        held = _held()
    left = {fd: name for fd, name in held.items() if files.get(fd) != name}
    assert not left, f"files or memory left over: {left}"
    orphans = _children() - children
    _end(orphans)
    assert not orphans, f"processes left over, which were killed: {orphans}"


def _end(processes: set[str]) -> None:
    """They may hold what the run waits for: its pipes, or a lock that the next test needs."""
    for pid in map(int, processes):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):  # somebody else has waited for it
            os.waitpid(pid, 0)


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_pyfunc_call() -> Generator[None, object, object]:
    """What a forked child raises ends the child: else two would go on with the run."""
    process = os.getpid()
    try:
        return (yield)
    finally:
        if os.getpid() != process:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)


def _pooled(thread: threading.Thread) -> bool:
    return thread.name.startswith(("asyncio_", "ThreadPoolExecutor"))
