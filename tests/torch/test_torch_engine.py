"""The engine: who runs what in which thread, and in which order."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable

import pytest

import aiodist
from aiodist_torch.engine import Engine, engine


class Blocked:
    """The engine's thread, kept busy in a `with` block."""

    def __init__(self) -> None:
        self.started, self.go = threading.Event(), threading.Event()

    def __enter__(self) -> Blocked:
        def block() -> None:
            self.started.set()
            self.go.wait(10)

        engine()._loop.call_soon_threadsafe(block)
        assert self.started.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self.go.set()


def settled() -> None:
    """Return when the engine has done what it was given."""
    engine().wait_for(asyncio.sleep(0))


def calm() -> None:
    """Return when the engine waits for events."""
    settled()
    while not (engine()._loop._waiting.idle and not engine()._lock.locked()):
        threading.Event().wait(0.001)


def test_a_call_is_made_in_the_callers_thread_on_the_engines_loop() -> None:
    calm()
    seen: list[object] = []

    def call() -> None:
        seen.extend((threading.get_ident(), asyncio.get_running_loop()))

    engine().submit(call)
    assert seen == [threading.get_ident(), engine()._loop]
    with pytest.raises(RuntimeError, match="no running event loop"):
        asyncio.get_running_loop()


async def test_a_thread_with_a_loop_of_its_own_gets_it_back() -> None:
    calm()
    seen: list[object] = []
    engine().submit(lambda: seen.append(asyncio.get_running_loop()))
    assert seen == [engine()._loop]
    assert asyncio.get_running_loop() is not engine()._loop


def test_calls_keep_their_order_while_the_engine_is_busy() -> None:
    seen: list[str] = []
    with Blocked():
        engine().submit(lambda: seen.append("a"), later=lambda: seen.append("later"))
        engine().submit(lambda: seen.append("b"))
        assert seen == ["later"]
    engine().submit(lambda: seen.append("c"))
    settled()
    assert seen == ["later", "a", "b", "c"]


def test_what_is_to_be_called_soon_is_called_by_the_visitor() -> None:
    calm()
    seen: list[int] = []

    def step(left: int) -> None:
        seen.append(threading.get_ident())
        if left:
            asyncio.get_running_loop().call_soon(step, left - 1)

    engine().submit(lambda: step(3), until=lambda: len(seen) == 3)
    assert seen[:3] == [threading.get_ident()] * 3
    settled()
    assert len(seen) == 4


def test_what_was_cancelled_is_not_called() -> None:
    calm()
    seen: list[str] = []

    def call() -> None:
        loop = asyncio.get_running_loop()
        for name in "abc":
            handle = loop.call_soon(seen.append, name)
            if name == "b":
                handle.cancel()

    engine().submit(call)
    settled()
    assert seen == ["a", "c"]


def test_timers_of_visitors_wake_the_loop() -> None:
    calm()
    rang = threading.Event()
    engine().submit(lambda: asyncio.get_running_loop().call_later(0.01, rang.set) and None)
    assert rang.wait(10)


def test_interrupted_calls_let_go_of_the_engine() -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    calm()
    with pytest.raises(KeyboardInterrupt):
        engine().submit(interrupted)
    settled()


def test_one_engine_however_many_threads_ask() -> None:
    found: list[Engine] = []
    threads = [threading.Thread(target=lambda: found.append(engine())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(found) == {engine()}


def test_endings_are_awaited_the_latest_first() -> None:
    seen: list[str] = []

    def ending(name: str) -> Callable[[], object]:
        async def end() -> None:
            seen.append(name)

        return end

    first, second, third = ending("first"), ending("second"), ending("third")
    for each in (first, second, third):
        engine().at_exit(each)  # type: ignore[arg-type]
    engine().forget(second)  # type: ignore[arg-type]
    engine().end()
    engine().end()
    assert seen == ["third", "first"]


def test_a_forked_child_has_no_part_in_the_parents_engine() -> None:
    mine = engine()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            mine.submit(lambda: None)
        except aiodist.GroupClosedError as error:
            mine.end()
            other = engine()
            seen: list[str] = []
            other.submit(lambda: seen.append("x"))
            other.wait_for(asyncio.sleep(0))
            os.write(write, f"{other is mine} {seen} {error}".encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        told = pipe.read()
    os.waitpid(child, 0)
    assert told.startswith("False ['x'] this process was forked")
    settled()
