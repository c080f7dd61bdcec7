"""The process group of torchft's replicas. On torchft itself where it is installed, and on what
stands for it: torchft_standin.py."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torchft_standin
from threaded import in_threads

import aiodist
from aiodist.threads.engine import engine
from aiodist_torch import ProcessGroup

pytestmark = pytest.mark.timeout(300)

MINUTE = timedelta(seconds=60)


def total(group: Any) -> float:
    x = torch.ones(1)
    group.allreduce([x], dist.AllreduceOptions()).wait()
    return float(x)


def test_a_group_without_a_default_group(no_leaks: None) -> None:
    store = dist.HashStore()

    def main(rank: int) -> None:
        for _ in range(2):  # a store serves one meeting after the other
            group = ProcessGroup.join(store, rank, 2, timeout=MINUTE)
            assert isinstance(group, ProcessGroup)
            assert (group.rank(), group.size(), total(group)) == (rank, 2, 2)
            assert group.get_group_store() is store
            group.shutdown()

    in_threads(2, main)
    engine().end()


def test_a_meeting_that_nobody_else_comes_to() -> None:
    with pytest.raises(aiodist.JoinTimeoutError) as caught:
        ProcessGroup.join(dist.HashStore(), 0, 2, timeout=timedelta(milliseconds=100))
    assert isinstance(caught.value, dist.DistBackendError)


@pytest.fixture
def adapter(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """`ProcessGroupAiodist`, on what stands for torchft's class."""
    for name in torchft_standin.NAMES:
        monkeypatch.setitem(sys.modules, name, torchft_standin)
    monkeypatch.delitem(sys.modules, "aiodist_torch.torchft", raising=False)
    from aiodist_torch.torchft import ProcessGroupAiodist

    yield ProcessGroupAiodist
    sys.modules.pop("aiodist_torch.torchft", None)


def test_a_replica_is_lost_and_comes_back(adapter: Any, no_leaks: None) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    groups = [adapter(timeout=MINUTE) for _ in range(2)]

    def quorum(number: int, *replicas: int) -> list[Any]:
        """The replicas meet, as torchft's manager has them do; what each of them sums up."""

        def main(rank: int) -> float:
            group = groups[replicas[rank]]
            address = f"127.0.0.1:{store.port}/quorum/{number}"
            group.configure(address, f"replica {replicas[rank]}", rank, len(replicas))
            group.barrier().wait()
            return total(group)

        return in_threads(len(replicas), main)

    assert quorum(1, 0, 1) == [2, 2]
    assert groups[0].getBackendName() == "torchft-aiodist"
    groups[0].abort()  # it is gone without a word to torchft
    with pytest.raises(aiodist.PeerLostError):
        total(groups[1])
    assert quorum(2, 1) == [1]
    groups[0] = adapter(timeout=MINUTE)
    assert quorum(3, 1, 0) == [2, 2]
    for group in groups:
        group.shutdown()
        group.shutdown()
    engine().end()


@pytest.mark.skipif(
    importlib.util.find_spec("torchft") is None, reason="needs torchft: pip install torchft"
)
def test_training_goes_on_without_a_killed_replica_and_with_it_again(
    job: Callable[..., Any], tmp_path: Path
) -> None:
    assert job("replicas.py", 1, str(tmp_path), anew=True).finish(quiet=False) == ["equal\n"]
