"""The engine: who runs what in which thread, and in which order."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar, copy_context

import pytest

import aiodist
from aiodist.threads.engine import Engine, engine


class Blocked:
    """The engine's thread, kept busy in a `with` block."""

    def __init__(self) -> None:
        self.started, self.go = threading.Event(), threading.Event()

    def __enter__(self) -> Blocked:
        def block() -> None:
            self.started.set()
            self.go.wait(10)

        engine().loop.call_soon_threadsafe(block)
        assert self.started.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self.go.set()


def settled() -> None:
    """Return when the engine has done what it was given."""
    engine().wait_for(asyncio.sleep(0))


def is_busy() -> bool:
    """Whether another thread has the engine's lock."""
    if engine()._lock.acquire(blocking=False):
        engine()._lock.release()
        return False
    return True


def calm() -> None:
    """Return when the engine waits for events."""
    settled()
    while not engine().loop.waiting._is_idle or is_busy():
        threading.Event().wait(0.001)


def test_a_call_is_made_in_the_callers_thread_on_the_engines_loop() -> None:
    calm()
    seen: list[object] = []

    def call() -> None:
        seen.extend((threading.get_ident(), asyncio.get_running_loop()))

    engine().submit(call)
    assert seen == [threading.get_ident(), engine().loop]
    with pytest.raises(RuntimeError, match="no running event loop"):
        asyncio.get_running_loop()


async def test_a_thread_with_a_loop_of_its_own_gets_it_back() -> None:
    calm()
    seen: list[object] = []
    engine().submit(lambda: seen.append(asyncio.get_running_loop()))
    assert seen == [engine().loop]
    assert asyncio.get_running_loop() is not engine().loop


def test_calls_keep_their_order_while_the_engine_is_busy() -> None:
    seen: list[str] = []
    with Blocked():
        engine().submit(lambda: seen.append("a"), later=lambda: seen.append("later"))
        engine().submit(lambda: seen.append("b"))
        assert seen == ["later"]
    engine().submit(lambda: seen.append("c"))
    settled()
    assert seen == ["later", "a", "b", "c"]


def test_a_call_is_made_in_the_context_of_its_thread() -> None:
    calm()
    caller = ContextVar("caller", default="nobody")
    seen: list[str] = []

    def submit(name: str) -> None:
        caller.set(name)
        engine().submit(lambda: seen.append(caller.get()))

    copy_context().run(submit, "a")
    with Blocked():
        copy_context().run(submit, "b")
        copy_context().run(submit, "c")
    settled()
    assert seen == ["a", "b", "c"]


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
        engine().at_exit(each)
    engine().forget(second)
    engine().end()
    engine().end()
    assert seen == ["third", "first"]


class Ends:
    """A group, and an ending, that raises or never ends if it is named so."""

    closed = False

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return self.name

    async def close(self) -> None:
        if self.name == "never ends":
            await asyncio.get_running_loop().create_future()
        await asyncio.sleep(0)
        self.closed = True
        if self.name == "raises":
            raise ValueError("not taken")

    __call__ = close

    def abort(self, reason: str = "") -> None: ...


def test_what_is_not_left_in_good_order_keeps_nothing_else_from_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("aiodist.threads.engine.EXIT_PATIENCE", 1.5)
    names = ("ends", "raises", "never ends")  # as endings, the last is awaited first
    groups, endings = [Ends(name) for name in names], [Ends(name) for name in names]
    for group, ending in zip(groups, endings, strict=True):
        engine().adopt(group)
        engine().at_exit(ending)
    engine().end()
    assert [each.closed for each in groups + endings] == [True, True, False] * 2
    warnings = [record.message for record in caplog.records if record.levelname == "WARNING"]
    told = "{} was not left in good order within {} s: {}".format
    assert warnings[0] == told("never ends", 0.5, "TimeoutError")
    assert sorted(re.sub("in [0-9.]+ s", "in 1.5 s", one) for one in warnings) == sorted(
        [told("raises", 1.5, "ValueError: not taken"), told("never ends", 1.5, "TimeoutError")] * 2
    )


def test_a_forked_child_has_no_part_in_the_parents_engine() -> None:
    mine = engine()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            with contextlib.suppress(aiodist.GroupClosedError):
                mine.submit(lambda: None)
                os._exit(0)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(60)  # the test ends even if the child does not
            mine.wait_for(asyncio.sleep(0))
        except aiodist.GroupClosedError as error:
            mine.end()
            other = engine()
            seen: list[str] = []
            other.submit(lambda: seen.append("x"))
            other.wait_for(asyncio.sleep(0))
            os.write(write, f"{other is mine} {seen} {error}".encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        told = pipe.read()
    os.waitpid(child, 0)
    assert told.startswith("False ['x'] this process was forked")
    settled()


class Result:
    """What a thread waits for; comes through the loop."""

    def __init__(self) -> None:
        self.is_there = False
        self.brought_by: int | None = None

    def __call__(self) -> bool:
        return self.is_there

    def bring(self) -> None:
        self.is_there, self.brought_by = True, threading.get_ident()


def watched(read: int, results: list[Result]) -> None:
    """Have each byte that comes through a pipe bring the next result."""

    def readable() -> None:
        with contextlib.suppress(BlockingIOError):  # two threads can hear of one event
            for _ in os.read(read, 100):
                results.pop(0).bring()

    engine().loop.add_reader(read, readable)


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    read, write = os.pipe()
    os.set_blocking(read, False)
    yield read, write
    engine().wait_for(removed(read))
    os.close(read)
    os.close(write)


async def removed(read: int) -> None:
    asyncio.get_running_loop().remove_reader(read)


def when_driven(write: int) -> threading.Thread:
    """A thread that writes a byte as soon as somebody drives."""

    def main() -> None:
        while engine().loop.waiting.driver is None:
            threading.Event().wait(0.001)
        os.write(write, b"x")

    thread = threading.Thread(target=main)
    thread.start()
    return thread


def test_who_waits_does_the_work(pipe: tuple[int, int]) -> None:
    results = [Result() for _ in range(100)]
    engine().submit(lambda: watched(pipe[0], list(results)))
    for result in results[:-1]:
        writer = when_driven(pipe[1])
        while not result():
            engine().drive(result, 10)
        writer.join()
        if result.brought_by == threading.get_ident():
            break  # now and then the engine's own thread looks, too, and may have been first
    else:
        pytest.fail("the engine's own thread has brought everything")


def test_the_engine_does_the_work_when_nobody_waits(pipe: tuple[int, int]) -> None:
    result = Result()
    engine().submit(lambda: watched(pipe[0], [result]))
    os.write(pipe[1], b"x")
    while not result():
        threading.Event().wait(0.001)
    assert result.brought_by == engine()._thread.ident


def test_the_engine_stands_by_for_a_driver() -> None:
    calm()
    stood_by: list[bool] = []

    def look() -> bool:
        stood_by.append(engine().loop.waiting._stands_by)
        return any(stood_by)

    def main() -> None:
        while not any(stood_by):
            engine().loop.call_soon_threadsafe(lambda: None)
            threading.Event().wait(0.001)

    thread = threading.Thread(target=main)
    thread.start()
    while not any(stood_by):
        engine().drive(look, 10)
    thread.join()
    settled()


def test_a_driver_hears_of_what_others_bring_about() -> None:
    for _ in range(100):
        calm()
        result = Result()

        def main(bring: Callable[[], None] = result.bring) -> None:
            # Who drives has the lock until it waits, and would find the call in the queue.
            while engine().loop.waiting.driver is None or is_busy():
                threading.Event().wait(0.001)
            engine().submit(bring)

        thread = threading.Thread(target=main)
        thread.start()
        while not result():
            engine().drive(result, 10)
        thread.join()
        if result.brought_by == thread.ident:
            break  # now and then the engine's own thread looks just then, and has the lock
    else:
        pytest.fail("another thread has brought everything")


def test_one_drives_and_the_others_wait() -> None:
    calm()
    result = Result()
    others: list[bool] = []

    def main() -> None:
        while engine().loop.waiting.driver is None:
            threading.Event().wait(0.001)
        engine().drive(result, 10)
        others.append(result())
        engine().submit(result.bring)

    thread = threading.Thread(target=main)
    thread.start()
    while not result():
        engine().drive(result, 10)
    thread.join()
    assert others == [False]


def test_the_engine_takes_over_from_who_waits_long() -> None:
    calm()
    result = Result()
    engine().drive(result, 0.001)
    engine().drive(result, 1000)
    assert not result()
    settled()


def test_nobody_drives_beside_a_loop_of_his_own() -> None:
    async def main() -> None:
        engine().drive(Result(), 1000)

    asyncio.run(main())


def test_an_interrupt_in_the_midst_of_work_aborts_all_groups() -> None:
    class Group:
        aborted = ""

        def abort(self, reason: str) -> None:
            self.aborted = reason

    def interrupted() -> None:
        if threading.get_ident() == engine()._thread.ident:
            engine().loop.call_soon(interrupted)  # until it is the driver's turn
        else:
            raise KeyboardInterrupt

    calm()
    groups = [Group(), Group()]
    for group in groups:
        engine().adopt(group)
    engine().loop.call_soon_threadsafe(interrupted)
    with pytest.raises(KeyboardInterrupt):
        while True:
            engine().drive(Result(), 10)
    told = "KeyboardInterrupt in the midst of an operation"
    assert [group.aborted for group in groups] == [told, told]
    settled()


class Group:
    """A group that is told to end."""

    def __init__(self) -> None:
        self.aborted = threading.Event()
        self.closed = False

    def abort(self, reason: str) -> None:
        self.aborted.set()

    async def close(self) -> None: ...


def exits() -> None:
    raise SystemExit


def fails_by_an_interrupt() -> None:
    try:
        raise KeyboardInterrupt
    finally:
        raise KeyError("half done")


@pytest.mark.parametrize("callback", [exits, fails_by_an_interrupt])
def test_the_engine_goes_on_after_a_callback_that_ends_half_way(
    callback: Callable[[], None],
) -> None:
    group = Group()
    engine().adopt(group)
    engine().loop.call_soon_threadsafe(callback)
    assert group.aborted.wait(10)
    settled()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_calls_of_an_engine_that_has_ended_raise() -> None:
    mine = Engine()

    def fail() -> None:
        raise ValueError("a fault of the loop itself")

    async def break_the_loop() -> None:
        mine.loop._run_once = fail  # type: ignore[method-assign]
        await asyncio.sleep(0)

    def calls() -> Iterator[Callable[[], object]]:
        yield lambda: mine.wait_for(break_the_loop())  # the thread ends meanwhile
        yield lambda: mine.wait_for(asyncio.sleep(0))
        yield lambda: mine.submit(lambda: None)
        yield lambda: mine.drive(Result(), 10)

    for call in calls():
        with pytest.raises(aiodist.GroupClosedError, match="has ended by an error"):
            call()
    mine.end()
    mine._thread.join()
    mine.loop.close()


@pytest.mark.parametrize("is_inside", [False, True])
def test_an_interrupt_that_came_before_the_call_does_no_harm(is_inside: bool) -> None:
    """Errors of operations that the program starts while it handles an interrupt carry it."""
    one, reported = engine(), threading.Event()
    disorders = one.loop.disorders
    one.loop.set_exception_handler(lambda loop, context: reported.set())
    failed: list[asyncio.Future[None]] = []

    def fail() -> None:
        work = one.loop.create_future()
        try:
            raise ValueError("an operator of the program")
        except ValueError as error:
            work.set_exception(error)
        failed.append(work)

    try:
        raise KeyboardInterrupt  # as of input()
    except KeyboardInterrupt:
        one.submit(fail)
    error = failed[0]._exception
    assert error is not None
    assert isinstance(error.__context__, KeyboardInterrupt)
    del error

    def drop() -> None:
        failed.clear()
        gc.collect()  # asyncio reports it

    if is_inside:
        one.submit(drop)
    else:
        drop()
    assert reported.wait(10)
    one.wait_for(asyncio.sleep(0))
    one.loop.set_exception_handler(None)
    assert one.loop.disorders == disorders
