"""Operations show in the traces of torch's profilers, with shapes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from aiodist_torch import profiling
from aiodist_torch.process_group import ProcessGroup

pytestmark = pytest.mark.timeout(180)

Ranks = Callable[..., list[Any]]

LONG = 120.0
"""Seconds for a profiler to start, which the first one of a process takes long for. The other rank
begins after that, as its operations have deadlines."""


def seen(trace: Any) -> dict[str, list[list[int]]]:
    """The shapes with which each of aiodist's operations was recorded last."""
    return {
        event.name: event.input_shapes
        for event in trace.events()
        if event.name.startswith("aiodist:") or event.name == "mine"
    }


def sync(options: Any) -> Any:
    options.asyncOp = False
    return options


def everything(group: ProcessGroup) -> None:
    """One call of each kind."""
    rank, x, outs = group.rank(), torch.ones(2, 3), [torch.empty(2, 3) for _ in range(2)]
    group.allreduce([x], sync(dist.AllreduceOptions())).wait()
    group.allgather([outs], [x]).wait()
    group.barrier(sync(dist.BarrierOptions())).wait()
    if rank:
        group.send([x], 0).wait()
    else:
        group.recv([x], 1).wait()
    torch.ones(1).add_(1)  # what follows is not taken for a part of it


@pytest.mark.parametrize("shapes", [True, False])
def test_operations_are_recorded(ranks: Ranks, shapes: bool) -> None:
    ready = threading.Event()

    def body(group: ProcessGroup) -> dict[str, list[list[int]]] | None:
        if group.rank():
            ready.wait(LONG)
            everything(group)
            return None
        with profile(activities=[ProfilerActivity.CPU], record_shapes=shapes) as trace:
            ready.set()
            everything(group)
        return seen(trace)

    found = ranks(2, body)[0]
    found.pop("aiodist:wait", None)  # where it was not done at once
    assert found == {
        "aiodist:all_reduce": [[2, 3]] if shapes else [],
        "aiodist:all_gather": [[2, 3]] * 3 if shapes else [],
        "aiodist:barrier": [],
        "aiodist:recv": [[2, 3]] if shapes else [],
    }


def test_a_call_that_waits_is_recorded_until_it_is_done(ranks: Ranks) -> None:
    ready = threading.Event()

    def body(group: ProcessGroup) -> list[str] | None:
        x = torch.ones(1)
        if group.rank():
            ready.wait(LONG)
            group.allreduce([x]).wait()
            return None
        with profile(activities=[ProfilerActivity.CPU]) as trace:
            ready.set()
            work = group.allreduce([x], sync(dist.AllreduceOptions()))
            assert work.is_completed()
            work.wait()
        return [event.name for event in trace.events() if event.name.startswith("aiodist:")]

    assert ranks(2, body)[0] == ["aiodist:all_reduce"]


def test_waiting_is_recorded(ranks: Ranks) -> None:
    ready = threading.Event()

    def body(group: ProcessGroup) -> list[str] | None:
        x = torch.ones(1)
        if group.rank():
            ready.wait(LONG)
            group.send([x], 0).wait()
            return None
        with profile(activities=[ProfilerActivity.CPU]) as trace:
            work = group.recv([x], 1)
            ready.set()
            assert not work.is_completed() or work.is_success()
            work.wait()
        return [event.name for event in trace.events() if event.name.startswith("aiodist:")]

    assert ranks(2, body)[0][0] == "aiodist:recv"


def test_operations_can_have_a_name_of_their_own(ranks: Ranks) -> None:
    ready = threading.Event()

    def body(group: ProcessGroup) -> dict[str, list[list[int]]] | None:
        x = torch.ones(1)
        if group.rank():
            ready.wait(LONG)
            group.allreduce([x]).wait()
            return None
        with profile(activities=[ProfilerActivity.CPU]) as trace, dist.record_comm("mine"):
            ready.set()
            group.allreduce([x]).wait()
        return {name: [] for name in seen(trace) if name != "aiodist:wait"}

    assert ranks(2, body)[0] == {"mine": []}


def test_nothing_is_recorded_for_nobody(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling, "_RecordFunctionFast", None)
    monkeypatch.setattr("aiodist_torch.work._RecordFunctionFast", None)
    ranks(2, everything)
