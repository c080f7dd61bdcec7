"""Futures of operations: their values, their failures, and callbacks that communicate."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

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
