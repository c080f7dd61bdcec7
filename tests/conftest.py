"""What every test gets: loops of both kinds, and a check that nothing was left behind."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
import uvloop
from hypothesis import settings

# The same examples in every run. Others: `pytest --hypothesis-profile=default`.
settings.register_profile("replayed", derandomize=True)
settings.load_profile("replayed")

T = TypeVar("T")
Run = Callable[[Coroutine[Any, Any, T]], T]

FACTORIES = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@pytest.fixture(params=sorted(FACTORIES))
def run(request: pytest.FixtureRequest) -> Iterator[Run[Any]]:
    """``run(coroutine)`` in a loop of either kind; fails if a task is left over."""
    with asyncio.Runner(loop_factory=FACTORIES[request.param]) as runner:

        async def checked(coroutine: Coroutine[Any, Any, T]) -> T:
            result = await coroutine
            left = asyncio.all_tasks() - {asyncio.current_task()}
            assert not left, f"tasks left over: {left}"
            return result

        yield lambda coroutine: runner.run(checked(coroutine))


def _sockets() -> dict[str, str]:
    found = {}
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


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    """Nothing that the test opened or started is there when it has ended."""
    if not Path("/proc/self/fd").exists():
        yield
        return
    threads, files, children = set(threading.enumerate()), _sockets(), _children()
    yield
    late = [t for t in threading.enumerate() if t not in threads and not _pooled(t)]
    for thread in late:
        thread.join(5)
    alive = [thread for thread in late if thread.is_alive()]
    assert not alive, f"threads left over: {alive}"
    if _sockets() != files:
        gc.collect()  # what only a cycle kept open is no leak
    left = {fd: name for fd, name in _sockets().items() if files.get(fd) != name}
    assert not left, f"file descriptors left over: {left}"
    assert not _children() - children, f"processes left over: {_children() - children}"


def _pooled(thread: threading.Thread) -> bool:
    return thread.name.startswith(("asyncio_", "ThreadPoolExecutor"))
