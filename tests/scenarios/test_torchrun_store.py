"""Ranks that find each other by the store that torchrun keeps, which outlives the workers.

The store is torch's own, in this process. Another round is what torchrun starts if a worker dies or
a host comes: the same store, the same TORCHELASTIC_RUN_ID, and a restart count that differs.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

import aiodist
from aiodist.coordinator.agent_store import AgentStore

distributed = pytest.importorskip("torch.distributed")


@pytest.fixture(scope="module")
def store():
    return distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def ask(store, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    """``ask(rank, size)`` calls connect() as a worker of torchrun does."""

    def connecting(rank: int, size: int, *, restarts: int = 0) -> Any:
        variables = {
            "RANK": rank,
            "WORLD_SIZE": size,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": store.port,
            "GROUP_WORLD_SIZE": 2,  # agents
            "TORCHELASTIC_RUN_ID": request.node.name,
            "TORCHELASTIC_RESTART_COUNT": restarts,
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        for name, value in variables.items():
            monkeypatch.setenv(name, str(value))

        return asyncio.ensure_future(_joined(aiodist.connect(timeout=50)))

    return connecting


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What ranks have read in the store."""
    found: list[Any] = []
    get = AgentStore._get

    def noted(self: AgentStore) -> Any:
        found.append(get(self))
        return found[-1]

    monkeypatch.setattr(AgentStore, "_get", noted)
    return found


async def until(condition: Any) -> None:
    for _ in iter(lambda: bool(condition()), True):
        await asyncio.sleep(0)


async def work_and_close(*joining: Any) -> None:
    groups = await asyncio.gather(*joining)
    assert await asyncio.gather(*[g.all_reduce(1) for g in groups]) == [len(groups)] * len(groups)
    await asyncio.gather(*[g.close() for g in groups])


def test_agents_that_have_counted_different_restarts(run, ask):
    """The agent whose worker died counts one, and the agent whose worker was healthy none."""

    async def main():
        await work_and_close(ask(0, 2, restarts=0), ask(1, 2, restarts=1))

    run(main())


def test_the_coordinator_of_the_round_before_is_gone(run, ask, reads):
    async def main():
        await work_and_close(ask(0, 2), ask(1, 2))
        stale, reads[:] = reads[-1], []
        early = ask(1, 2)
        await until(lambda: reads and reads[-1] == stale)
        await work_and_close(ask(0, 2), early)

    run(main())


def test_the_coordinator_of_the_round_before_still_runs(run, ask):
    """It has lost a rank, so it lets the new one wait."""

    async def main():
        old = await asyncio.gather(ask(0, 2), ask(1, 2))
        old[1].abort("its worker is ended")
        early = ask(1, 2, restarts=1)
        coordinator = old[0]._actor._coordinator
        await until(lambda: coordinator.status()["groups"][0]["waiting"])
        await work_and_close(ask(0, 2), early)
        assert not coordinator.status()["groups"][0]["waiting"]
        old[0].abort("its worker is ended")
        await asyncio.gather(*[one._actor.gone() for one in old])

    run(main())


def test_the_coordinator_of_the_round_before_refuses_ranks_of_the_next(run, ask):
    """The next round has another size."""

    async def main():
        old = await ask(0, 1)
        refused = []
        old._actor._coordinator.observers.append(
            lambda note: refused.append(note) if note.event == "join refused" else None
        )
        early = ask(1, 2)
        await until(lambda: refused)
        await work_and_close(ask(0, 2), early)
        await old.close()

    run(main())


def test_a_store_that_does_not_answer_keeps_no_process(monkeypatch: pytest.MonkeyPatch):
    """asyncio.run waits for threads of asyncio.to_thread, and this one would wait for ever."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        for name, value in {
            "RANK": "1",
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(listener.getsockname()[1]),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }.items():
            monkeypatch.setenv(name, value)

        async def main():
            listener.setblocking(False)
            joining = asyncio.ensure_future(_joined(aiodist.connect(timeout=3)))
            accepted, _ = await asyncio.get_running_loop().sock_accept(listener)
            joining.cancel()
            await asyncio.wait({joining})
            return accepted

        asyncio.run(main()).close()


async def _joined(connecting: aiodist.session.Connecting) -> aiodist.Group:
    return await connecting
