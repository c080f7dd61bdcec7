"""Process groups where the launcher has a coordinator, as `aiodist run` does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import aiodist
from aiodist.threads.engine import engine
from aiodist_torch.process_group import ProcessGroup
from aiodist_torch.rendezvous import Meeting, at_launcher, look_up, publish

Ranks = Callable[..., list[Any]]


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[aiodist.Coordinator]:
    """The coordinator of a launcher, and what its ranks find in their environment."""

    async def serve() -> aiodist.Coordinator:
        coordinator = aiodist.Coordinator(token="of the run")
        await coordinator.start()
        return coordinator

    coordinator = engine().wait_for(serve())
    monkeypatch.setenv("AIODIST_ADDRESS", coordinator.address)
    monkeypatch.setenv("AIODIST_RUN_ID", "run")
    monkeypatch.setenv("AIODIST_TOKEN", "of the run")
    yield coordinator
    engine().wait_for(coordinator.stop())


def test_they_meet_there(launcher: aiodist.Coordinator, ranks: Ranks) -> None:
    def body(group: ProcessGroup) -> list[tuple[str, int]]:
        tensor = torch.ones(4)
        group.allreduce([tensor]).wait()
        assert tensor.tolist() == [2.0] * 4
        groups = launcher.status()["groups"]
        group.barrier().wait()  # who is done first leaves, and the other one would not see it
        return [(one["name"], len(one["members"])) for one in groups]

    first, again = ranks(2, body), ranks(2, body)
    for seen in (first, again):
        ((name, members),) = seen[0]
        assert name.startswith("torch world ")
        assert members == 2
        assert seen[0] == seen[1]
    assert first != again  # it is another group, though torch calls it the same
    assert launcher.status()["groups"] == []


@pytest.mark.parametrize("missing", ["AIODIST_ADDRESS", "AIODIST_RUN_ID"])
def test_without_one_rank_0_has_a_coordinator(
    launcher: aiodist.Coordinator, ranks: Ranks, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    """Who gives aiodist an address without a launcher may have nobody who serves it."""
    monkeypatch.delenv(missing)

    def body(group: ProcessGroup) -> list[Any]:
        group.barrier().wait()
        return list(launcher.status()["groups"])

    assert ranks(2, body) == [[], []]


def test_the_token_of_a_run_is_not_written_into_the_store() -> None:
    environ = {"AIODIST_ADDRESS": "tcp://h:1", "AIODIST_RUN_ID": "r", "AIODIST_TOKEN": "secret"}
    meeting = at_launcher(environ, "world")
    assert meeting is not None
    assert meeting.address == "tcp://h:1"
    store = dist.HashStore()
    publish(store, 0, meeting)
    assert b"secret" not in store.get("aiodist/1")
    assert look_up(store, 1) == meeting
    own = Meeting("tcp://h:2", "a token", "a\nname")
    publish(store, 0, own)
    assert look_up(store, 1) == own
