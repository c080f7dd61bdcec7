"""Futures of operations: their values, their failures, and callbacks that communicate."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import aiodist
from aiodist.engine.tags import MANY
from aiodist_torch import completions
from aiodist_torch.completions import Completions
from aiodist_torch.process_group import ProcessGroup

Ranks = Callable[..., list[Any]]


@pytest.fixture
def soon_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads without a job end at once: each test waits for their end."""
    monkeypatch.setattr(completions, "IDLE", 0.0)


@pytest.mark.usefixtures("soon_gone")
def test_value_before_and_after_the_end(ranks: Ranks) -> None:
    def body(group: ProcessGroup) -> None:
        x = torch.ones(2)
        work = group.allreduce([x])
        future = work.get_future()
        assert work.get_future() is future
        assert future.wait()[0] is x
        assert x.tolist() == [2, 2]
        done = group.allreduce([x])
        done.wait()
        assert done.get_future().wait()[0] is x

    ranks(2, body)


def test_an_interrupt_does_not_keep_others_waiting(ranks: Ranks) -> None:
    """It comes just after a thread got the gate."""

    class Gate:
        def __init__(self, gate: threading.Lock) -> None:
            self.release, self.locked = gate.release, gate.locked
            self._acquire = gate.acquire

        def acquire(self, timeout: float) -> bool:
            assert self._acquire(timeout=timeout)
            raise KeyboardInterrupt

    def body(group: ProcessGroup) -> None:
        work: Any = group.recv([torch.empty(1)], 0, 0)
        group.send([torch.ones(1)], 0, 0).wait()
        work._gate = gate = Gate(work._gate)
        with pytest.raises(KeyboardInterrupt):
            work._wait(0)
        assert not gate.locked()

    ranks(1, body)


@pytest.mark.usefixtures("soon_gone")
def test_callbacks_may_wait_for_further_operations_and_futures(ranks: Ranks) -> None:
    def body(group: ProcessGroup) -> float:
        def again(future: torch.futures.Future[Any]) -> torch.Tensor:
            (x,) = future.value()
            group.allreduce([x]).wait()
            inner = group.allreduce([x]).get_future().then(lambda f: f.value()[0] + 1)
            return inner.wait()

        # A message afterwards, so that the first operation is under way when it is chained to.
        return float(group.allreduce([torch.ones(1)]).get_future().then(again).wait())

    assert ranks(2, body) == [9, 9]


@pytest.mark.usefixtures("soon_gone")
def test_a_failure_is_one_for_those_who_chain(ranks: Ranks) -> None:
    def body(group: ProcessGroup) -> None:
        work = group.allreduce([torch.ones(1 + group.rank())])
        chained = work.get_future().then(lambda future: future.value())
        with pytest.raises(RuntimeError, match="MismatchError"):
            chained.wait()
        with pytest.raises(RuntimeError, match="MismatchError"):
            work.get_future().wait()

    ranks(2, body)


@pytest.mark.usefixtures("soon_gone")
def test_jobs_do_not_wait_for_each_other(no_leaks: None) -> None:
    made = Completions()
    inner, outer = threading.Event(), threading.Event()

    def first() -> None:
        made.soon(inner.set)
        if inner.wait(10):
            outer.set()

    made.soon(first)
    assert outer.wait(10)


def test_threads_are_used_again(no_leaks: None) -> None:
    made = Completions()
    names: list[int] = []
    for _ in range(3):
        done = threading.Event()

        def job(done: threading.Event = done) -> None:
            names.append(threading.get_ident())
            done.set()

        made.soon(job)
        assert done.wait(10)
        while not made.idle:  # between the end of a job and the wait for the next
            threading.Event().wait(0.001)
    assert len(set(names)) == 1


@pytest.mark.usefixtures("no_leaks", "soon_gone")
async def test_a_thread_that_cannot_be_started_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start, tries = threading.Thread.start, []

    def starts(thread: threading.Thread) -> None:
        tries.append(thread)
        if len(tries) == 1:
            raise RuntimeError("can't start new thread")
        start(thread)

    loop, done = asyncio.get_running_loop(), asyncio.Event()
    monkeypatch.setattr(threading.Thread, "start", starts)
    Completions().soon(lambda: loop.call_soon_threadsafe(done.set))
    await done.wait()
    assert len(tries) == 2


def attached(
    group: ProcessGroup, work: Any, callback: Callable[[Any], Any], late: bool
) -> torch.futures.Future[Any]:
    """Chain `callback` to the future of `work`: at once, or `late`, when it has ended."""
    if late:
        work.wait()
    future: torch.futures.Future[Any] = work.get_future().then(callback)
    if late:
        assert future.done()  # it ran in this thread
    return future


@pytest.mark.usefixtures("soon_gone")
def test_callbacks_match_whenever_they_run(ranks: Ranks) -> None:
    """In threads of ranks 0 and 1, in another order on each, and among calls of the program."""
    attached = [threading.Event(), threading.Event()]
    ran = [threading.Event(), threading.Event()]

    def body(group: ProcessGroup) -> list[float]:
        rank = group.rank()
        xs = [torch.full((1,), 10.0**i) for i in range(3)]

        def callback(i: int) -> Callable[[Any], Any]:
            def again(future: torch.futures.Future[Any]) -> Any:
                (x,) = future.value()
                if rank == 1 - i:  # not the one that this rank begins with
                    assert ran[rank].wait(10)
                work = group.allreduce([x])
                if rank == i:
                    ran[rank].set()
                return work

            return again

        if rank == 2:  # so the works of the others are not done when they attach
            assert all(event.wait(10) for event in attached)
        futures = [group.allreduce([xs[i]]).get_future().then(callback(i)) for i in range(2)]
        if rank < 2:
            attached[rank].set()
        if rank == 1:  # its own call comes after those of callbacks
            assert ran[1].wait(10)
        group.allreduce([xs[2]]).wait()
        for future in futures:
            future.wait().wait()
        return [float(x) for x in xs]

    assert ranks(3, body) == [[9, 90, 300]] * 3


@pytest.mark.usefixtures("soon_gone")
def test_callbacks_attached_before_and_after_the_end_match(ranks: Ranks) -> None:
    """All collectives; and in nested callbacks, chains and two groups."""

    def body(group: ProcessGroup) -> list[Any]:
        rank, found = group.rank(), []
        other = group.split_group([0, 1])
        assert other is not None

        def every(future: torch.futures.Future[Any]) -> Any:
            (x,) = future.value()
            group.allreduce([x]).wait()
            out = [torch.zeros(1), torch.zeros(1)]
            group.allgather([out], [x[:1] + rank]).wait()
            group.broadcast(x, 1).wait()
            half = torch.zeros(1)
            group.reduce_scatter([half], [[x[:1], x[1:]]]).wait()
            group.barrier().wait()
            with pytest.raises((TypeError, aiodist.CollectiveAbortedError)):  # uses up a turn
                group.allreduce([x] if rank else None).wait()
            return x, [*map(float, out)], float(half)

        def nested(future: torch.futures.Future[Any]) -> Any:
            (x, *_) = future.value()
            deeper = attached(group, other.allreduce([x]), each, rank == 1)
            return deeper.wait()

        def each(future: torch.futures.Future[Any]) -> Any:
            (x,) = future.value()
            other.allreduce([x]).wait()
            return float(x[0])

        for i in range(4):
            work = (group if i % 2 else other).allreduce([torch.ones(2) + i])
            chain = attached(group, work, every, i // 2 == rank)
            found.append((chain, chain.then(nested)))
        result = [(first.wait()[1:], second.wait()) for first, second in found]
        other.shutdown()
        return result

    wanted = [(([4 * n, 4 * n + 1], 8 * n), 16 * n) for n in (1, 2, 3, 4)]
    assert ranks(2, body) == [wanted] * 2


@pytest.mark.usefixtures("soon_gone")
def test_a_callback_may_call_a_group_with_other_members(ranks: Ranks) -> None:
    """As a hierarchical hook does. A callback that only logs may be on one rank."""

    def body(group: ProcessGroup) -> float:
        rank, x = group.rank(), torch.ones(1)
        halves = [group.split_group(half) for half in ([0, 1], [2, 3])]
        half = halves[rank // 2]
        assert half is not None
        for _ in range(2):
            future: torch.futures.Future[Any] = half.allreduce([x]).get_future()
            if rank == 0:
                future.add_done_callback(lambda _: None)
            future.then(lambda _: group.allreduce([x]).wait()).wait()
            inner = group.allreduce([x]).get_future().then(lambda _: half.allreduce([x]).wait())
            inner.wait()
        with pytest.raises(TypeError):
            future.then(None)  # type: ignore[arg-type]
        half.shutdown()
        return float(x)

    assert ranks(4, body) == [(2 * 4 * 4 * 2) ** 2] * 4


@pytest.mark.usefixtures("soon_gone")
def test_futures_of_a_program_run_callbacks_as_they_were_attached(ranks: Ranks) -> None:
    """Also if one rank completes the future within a callback, and the other has done so before."""

    def body(group: ProcessGroup) -> float:
        x, ended = torch.ones(1), torch.futures.Future[Any]()
        steps = [
            lambda: ended.then(lambda _: group.allreduce([x]).wait()),
            lambda: work.get_future().add_done_callback(lambda _: ended.set_result(None)),
        ]
        work = group.allreduce([x])
        for step in steps if group.rank() else reversed(steps):
            work.wait()
            step()
        ended.wait()
        both = [group.allreduce([torch.ones(1)]).get_future() for _ in range(2)]
        torch.futures.collect_all(both).then(lambda _: group.allreduce([x]).wait()).wait()
        return float(x)

    assert ranks(2, body) == [8, 8]


@pytest.mark.usefixtures("soon_gone")
def test_tags_of_callbacks_are_forgotten(ranks: Ranks) -> None:
    def body(group: ProcessGroup) -> int:
        x = torch.zeros(1)
        for _ in range(2 * MANY):
            work = group.allreduce([x])
            work.wait()
            work.get_future().then(lambda _: group.allreduce([x]).wait())
        return len(group.group._context.calls.tags)

    assert max(ranks(2, body)) < 1.5 * MANY
