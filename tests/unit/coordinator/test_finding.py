"""Finding the coordinator, or serving it: which rank does what with one address."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from aiodist.coordinator import finding
from aiodist.coordinator.agent_store import AgentStore, Notice
from aiodist.coordinator.finding import Located, Wanted, at_newest, find
from aiodist.errors import JoinError, JoinTimeoutError
from aiodist.testing.virtual_loop import VirtualLoop
from aiodist.wire.address import parse_address

HERE = "tcp://127.0.0.1:0"
ELSEWHERE = "tcp://192.0.2.1:7"
"""An address that is there for examples alone (RFC 5737)."""


async def test_who_may_not_serve_looks_for_it() -> None:
    assert await find(Wanted(ELSEWHERE), 1.0) == Located(ELSEWHERE)


async def test_who_may_serve_does_and_knows_its_port() -> None:
    found = await find(Wanted("tcp://localhost:0", serve=HERE), 1.0)
    coordinator = found.coordinator
    assert coordinator is not None
    try:
        at = parse_address(found.address)
        assert at.host == "localhost"  # as the others know it
        assert at.port == parse_address(coordinator.address).port != 0
    finally:
        await coordinator.stop()


async def test_where_somebody_listens_there_is_a_coordinator_to_be_found() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        assert await find(Wanted(address, serve=address), 1.0) == Located(address)


async def test_the_address_of_another_host_is_not_served() -> None:
    assert await find(Wanted(ELSEWHERE, serve=ELSEWHERE), 1.0) == Located(ELSEWHERE)


def test_a_name_may_become_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of a container that has just started."""
    asked = []

    async def own_address(named: Any) -> None:
        asked.append(loop.time())
        if len(asked) < 4:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(finding, "own_address", own_address)
    loop = VirtualLoop()
    wanted = Wanted(ELSEWHERE, serve="tcp://rank-0:7")
    assert loop.run_until_complete(find(wanted, 5.0)) == Located(ELSEWHERE)
    assert asked == pytest.approx([0.0, 0.2, 0.4, 0.6])
    loop.close()


def test_a_name_that_stays_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    async def own_address(named: Any) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(finding, "own_address", own_address)
    loop = VirtualLoop()
    with pytest.raises(JoinTimeoutError, match=r"rank-0:7.* not known to it for 5 s"):
        loop.run_until_complete(find(Wanted(ELSEWHERE, serve="tcp://rank-0:7"), 5.0))
    assert loop.time() <= 5.0
    loop.close()


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The store that torchrun keeps, by key."""
    kept: dict[str, Any] = {}

    async def read(self: AgentStore, timeout: float, *, but: Notice | None = None) -> Notice:
        if (found := kept.get(self._key)) is None or found == but:
            await asyncio.sleep(timeout)
            raise JoinTimeoutError("nothing was published")
        published: Notice = found
        return published

    async def publish(self: AgentStore, published: Notice, timeout: float) -> None:
        assert str(self) == "torchrun's store at 127.0.0.1:29500"
        if isinstance(kept.get(self._key), Exception):
            raise kept[self._key]
        kept[self._key] = published

    monkeypatch.setattr(AgentStore, "read", read)
    monkeypatch.setattr(AgentStore, "publish", publish)
    return kept


AGENT = "tcp://127.0.0.1:29500"


async def test_ranks_meet_by_the_store_that_has_the_port(agent: dict[str, Any]) -> None:
    served = await find(Wanted(AGENT, serve=AGENT, through_agent=True, key="k"), 1.0)
    assert served.coordinator is not None
    try:
        assert agent == {"k": (served.address, served.run_id)}
        assert parse_address(served.address).port != 29500
        found = await find(Wanted(AGENT, through_agent=True, key="k"), 1.0)
        assert (found.address, found.run_id) == (served.address, served.run_id)
    finally:
        await served.coordinator.stop()


def test_a_refusal_counts_if_rank_0_publishes_nothing_else(
    agent: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    agent["k"] = Notice(ELSEWHERE, "drawn")

    async def refused(found: Located) -> None:
        raise JoinError(f"refused at {found.address}")

    async def main() -> None:
        found = await find(Wanted(AGENT, through_agent=True, key="k"), 60.0)
        await at_newest(found, refused, 60.0)

    loop = VirtualLoop()
    with pytest.raises(JoinError, match=f"^refused at {ELSEWHERE}$"):
        loop.run_until_complete(main())
    assert loop.time() == 30.0
    loop.close()
    (record,) = caplog.records
    assert record.getMessage() == (
        f"refused at {ELSEWHERE}; torchrun's store at 127.0.0.1:29500 has no other coordinator for "
        "10 s. Trying until 30 s are over"
    )


async def test_a_coordinator_that_nobody_could_be_told_of_is_stopped(
    agent: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    agent["k"] = JoinError("the agent's store does not answer")
    with pytest.raises(JoinError, match="does not answer"):
        await find(Wanted(AGENT, serve=AGENT, through_agent=True, key="k"), 1.0)


async def test_rank_0_on_another_host_than_the_store() -> None:
    wanted = Wanted(AGENT, serve=ELSEWHERE, through_agent=True, key="k")
    with pytest.raises(JoinError, match="is MASTER_ADDR another host's"):
        await find(wanted, 1.0)


async def test_nobody_waits_for_a_coordinator_that_ends_with_rank_0() -> None:
    coordinator = (await find(Wanted(HERE, serve=HERE), 1.0)).coordinator
    assert coordinator is not None
    try:
        assert not coordinator._clients.returns
    finally:
        await coordinator.stop()


def test_a_host_that_stays_unknown_is_said_to_be_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def unknown(*_: object) -> None:
        raise OSError("Name or service not known")

    monkeypatch.setattr(finding, "own_address", unknown)
    loop = VirtualLoop()
    try:
        with pytest.raises(JoinTimeoutError):
            loop.run_until_complete(find(Wanted(ELSEWHERE, serve=ELSEWHERE), 60.0))
    finally:
        loop.close()
    (record,) = caplog.records
    assert record.getMessage() == (
        f"rank 0 is to serve {ELSEWHERE}, and does not know that host for 10 s. Trying until "
        "60 s are over"
    )
