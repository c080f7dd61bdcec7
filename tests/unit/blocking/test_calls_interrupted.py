"""A signal handler raises at any place of a blocking call.

After that nothing hangs. Either the group works, and no message is lost, or all groups have been
aborted, and calls raise GroupClosedError.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from interrupts import Interrupt

import aiodist
from aiodist import BlockingGroup, BlockingWork
from aiodist.threads.engine import engine

WATCHED = (
    *("blocking/calls.py", "blocking/group.py"),
    *("threads/engine.py", "threads/loop.py", "threads/outcome.py"),
    *("selectors.py", "asyncio/base_events.py"),
)
"""Where interrupts come: all that runs in the interrupted thread, but for what the loop runs."""

PATIENCE = 60.0

# An interrupt between two callbacks of the loop may lose one, such as the first step of a task.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


class Ranks:
    """Both ranks of a group on the engine's loop. They are made anew after they were aborted."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._numbers = itertools.count()
        self.aborted = 0
        self.join()

    def join(self) -> None:
        name = f"g{next(self._numbers)}"
        found: dict[int, BlockingGroup] = {}

        def joined(rank: int) -> None:
            found[rank] = aiodist.connect_blocking(
                self._address, group=name, rank=rank, size=2, transports="inproc"
            )

        beside(lambda: joined(1))(lambda: joined(0))
        self.one, self.two = found[0], found[1]

    def close(self) -> None:
        beside(self.two.close)(self.one.close)


def beside(other: Callable[[], object]) -> Callable[[Callable[[], object]], None]:
    """Have a thread make a call while this one makes another. Both have to end."""

    def run(mine: Callable[[], object]) -> None:
        errors: list[BaseException] = []

        def main() -> None:
            try:
                other()
            except (aiodist.GroupClosedError, aiodist.PeerLostError):
                pass
            except aiodist.CollectiveAbortedError:
                pass
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=main)
        thread.start()
        try:
            mine()
        finally:
            thread.join(PATIENCE)
            assert not thread.is_alive(), "a call of another thread hangs"
        assert errors == []

    return run


@pytest.fixture
def address(no_leaks: None) -> Iterator[str]:
    """Where a coordinator listens, on a loop that is not interrupted."""
    coordinator = aiodist.Coordinator()
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    asyncio.run_coroutine_threadsafe(coordinator.start(), loop).result(PATIENCE)
    yield coordinator.address
    asyncio.run_coroutine_threadsafe(coordinator.stop(), loop).result(PATIENCE)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.fixture
def both(address: str) -> Iterator[Ranks]:
    made = Ranks(address)
    yield made
    made.close()
    gc.collect()  # what was lost is told of here


class Calls:
    """What rank 0 calls, and what it got."""

    def __init__(self, group: BlockingGroup) -> None:
        self.group = group
        self.got: Any = None
        self.work: BlockingWork[Any] | None = None

    # Each keeps its result without another call, because an interrupt may come after that.

    def recv(self) -> None:
        self.got = self.group.recv(src=1)

    def irecv(self) -> None:
        self.work = self.group.irecv(src=1)
        self.got = self.work.wait()

    def messages(self) -> None:
        for item in self.group.messages(src=1):
            self.got = item[0]
            break

    def sendrecv(self) -> None:
        self.got = self.group.sendrecv("x", 1, src=1)

    def again(self) -> Any:
        """What a program gets that calls again."""
        if self.work is not None:
            with contextlib.suppress(asyncio.CancelledError):
                return self.work.wait(PATIENCE)
        return self.group.recv(src=1, timeout=PATIENCE)


def at_every_place(both: Ranks, attempt: Callable[[Interrupt, int], None]) -> None:
    """Make an attempt for each place of an interrupt. Some end well, and some by an abort."""
    aborted = 0
    for number in itertools.count():
        interrupt = Interrupt(WATCHED, number)
        try:
            attempt(interrupt, number)
        except aiodist.GroupClosedError:
            aborted += 1
            for group in (both.one, both.two):
                with pytest.raises(aiodist.GroupClosedError):
                    group.barrier()
                engine().wait_for(group._behind._actor.gone())
            both.join()
        if not interrupt.came:
            break
    assert 0 < aborted < number


@pytest.mark.parametrize("is_there", [True, False], ids=["is there", "comes"])
@pytest.mark.parametrize("name", ["recv", "irecv", "messages", "sendrecv"])
@pytest.mark.timeout(240)  # it interrupts a call at each of some hundred places
def test_no_message_is_lost(both: Ranks, name: str, is_there: bool) -> None:
    def attempt(interrupt: Interrupt, number: int) -> None:
        def send() -> None:
            both.two.send(number, 0)

        def receive() -> None:
            with contextlib.suppress(KeyboardInterrupt):
                interrupt.of(getattr(calls, name))

        calls = Calls(both.one)
        if is_there:
            send()
            receive()
        else:
            beside(send)(receive)
        assert (calls.again() if calls.got is None else calls.got) == number

    at_every_place(both, attempt)


def test_an_array_is_not_written_after_that(both: Ranks) -> None:
    def attempt(interrupt: Interrupt, number: int) -> None:
        x, left = np.ones(3), np.zeros(0)
        theirs = both.two.start(both.two.all_reduce, np.ones(3), tag=f"{number}")
        try:
            interrupt.of(lambda: both.one.all_reduce(x, tag=f"{number}"))
        except KeyboardInterrupt:
            left = x.copy()
        with contextlib.suppress(aiodist.CollectiveAbortedError, asyncio.CancelledError):
            theirs.cancel()
            theirs.wait()
        beside(both.two.barrier)(both.one.barrier)
        assert x.tolist() == (left.tolist() if interrupt.came else [2.0] * 3)

    at_every_place(both, attempt)


def test_another_thread_that_waits_hears_of_it(both: Ranks) -> None:
    def attempt(interrupt: Interrupt, number: int) -> None:
        works = [both.one.irecv(src=1, tag="other") for _ in range(2)]

        def wait() -> None:
            got.append(works[0].wait())

        def receive() -> None:
            with contextlib.suppress(KeyboardInterrupt):
                interrupt.of(Calls(both.one).recv)
            for _ in works:
                both.two.send(number, 0, tag="other")

        got: list[Any] = []
        both.two.send(number, 0)
        beside(wait)(receive)
        assert got + [work.wait(PATIENCE) for work in works] == [number] * 3

    at_every_place(both, attempt)
