"""Finding the coordinator, or serving it: which rank does what with one address."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from aiodist.coordinator import agent_store, finding
from aiodist.coordinator.finding import Wanted, find
from aiodist.errors import JoinError, JoinTimeoutError
from aiodist.testing.virtual_loop import VirtualLoop
from aiodist.wire.address import parse_address

HERE = "tcp://127.0.0.1:0"
ELSEWHERE = "tcp://192.0.2.1:7"
"""An address that is there for examples alone (RFC 5737)."""


async def test_who_may_not_serve_looks_for_it() -> None:
    assert await find(Wanted(ELSEWHERE), 1.0) == (ELSEWHERE, None)


async def test_who_may_serve_does_and_knows_its_port() -> None:
    address, coordinator = await find(Wanted("tcp://localhost:0", serve=HERE), 1.0)
    assert coordinator is not None
    try:
        at = parse_address(address)
        assert at.host == "localhost"  # as the others know it
        assert at.port == parse_address(coordinator.address).port != 0
    finally:
        await coordinator.stop()


async def test_where_somebody_listens_there_is_a_coordinator_to_be_found() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        assert await find(Wanted(address, serve=address), 1.0) == (address, None)


async def test_the_address_of_another_host_is_not_served() -> None:
    assert await find(Wanted(ELSEWHERE, serve=ELSEWHERE), 1.0) == (ELSEWHERE, None)


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
    assert loop.run_until_complete(find(wanted, 5.0)) == (ELSEWHERE, None)
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

    async def look_up(host: str, port: int, key: str, timeout: float) -> str:
        assert (host, port) == ("127.0.0.1", 29500)
        found: str = kept[key]
        return found

    async def publish(host: str, port: int, key: str, address: str, timeout: float) -> None:
        assert (host, port) == ("127.0.0.1", 29500)
        if isinstance(kept.get(key), Exception):
            raise kept[key]
        kept[key] = address

    monkeypatch.setattr(agent_store, "look_up", look_up)
    monkeypatch.setattr(agent_store, "publish", publish)
    return kept


AGENT = "tcp://127.0.0.1:29500"


async def test_ranks_meet_by_the_store_that_has_the_port(agent: dict[str, Any]) -> None:
    served = Wanted(AGENT, serve=AGENT, through_agent=True, key="k")
    address, coordinator = await find(served, 1.0)
    assert coordinator is not None
    try:
        assert agent == {"k": address}
        assert parse_address(address).port != 29500
        assert await find(Wanted(AGENT, through_agent=True, key="k"), 1.0) == (address, None)
    finally:
        await coordinator.stop()


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
    _, coordinator = await find(Wanted(HERE, serve=HERE), 1.0)
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
