"""How ranks reach each other: what a member says of itself, and how others read it."""

from __future__ import annotations

import asyncio
import ssl
from typing import Any

import pytest

from aiodist.coordinator.exposure import Guard
from aiodist.reach import Reach, endpoint_of, memory_of
from aiodist.transports import registry
from aiodist.wire.messages import JoinRequest, MemberInfo

OPEN = Guard(keeps_out=False)
GUARDED = Guard(keeps_out=True)


class Listener:
    def __init__(self, address: str) -> None:
        self.address = address

    def close(self) -> None: ...

    def close_in_child(self) -> None: ...


class Transport:
    """Notes where it is asked to listen and to dial, and refuses."""

    kind = "tcp"

    def __init__(self) -> None:
        self.hosts: list[str] = []
        self.ports: list[int] = []
        self.dialled: list[str] = []
        self.error: OSError = ConnectionRefusedError("refused")

    async def listen(self, accept: Any, *, host: str) -> Listener:
        self.hosts.append(host)
        return Listener(f"tcp://{'[::1]' if ':' in host else '127.0.0.1'}:5")

    async def dial(self, address: str, receiver: Any) -> Any:
        self.dialled.append(address)
        raise self.error


@pytest.fixture
def transport(monkeypatch: pytest.MonkeyPatch) -> Transport:
    made = Transport()

    def make(*_: object, port: int = 0) -> Transport:
        made.ports.append(port)
        return made

    monkeypatch.setattr(registry, "make", make)
    return made


def reach(guard: Guard = OPEN, **options: Any) -> Reach:
    return Reach(("tcp",), None, guard, options.get("bind"), options.get("advertise"))


def member(host: str, *addresses: str, host_id: str = "there") -> MemberInfo:
    return MemberInfo(0, "id", host, 1, "", {}, 0.0, host_id, addresses)


@pytest.mark.parametrize(
    ("guard", "bind", "coordinator", "local", "host"),
    [
        (OPEN, None, "tcp://10.0.0.1:1", "10.0.0.2", "10.0.0.2"),
        (OPEN, "10.9.9.9", "tcp://10.0.0.1:1", "10.0.0.2", "10.9.9.9"),
        # It reaches the coordinator on its own host, where others come from elsewhere.
        (GUARDED, None, "tcp://10.0.0.1:1", "127.0.0.1", "0.0.0.0"),
        (GUARDED, None, "tcp://[2001::1]:1", "::1", "::"),
        (GUARDED, "127.0.0.1", "tcp://10.0.0.1:1", "127.0.0.1", "127.0.0.1"),
        (OPEN, None, "tcp://10.0.0.1:1", "127.0.0.1", "127.0.0.1"),
        (GUARDED, None, "tcp://localhost:1", "127.0.0.1", "127.0.0.1"),
    ],
)
async def test_it_listens_where_others_can_reach_it(
    transport: Transport, guard: Guard, bind: str | None, coordinator: str, local: str, host: str
) -> None:
    listeners: list[Any] = []
    await reach(guard, bind=bind).listen(coordinator, local, lambda link: None, listeners)
    assert transport.hosts == [host]
    assert len(listeners) == 1


@pytest.mark.parametrize(
    ("bind", "advertise", "host", "port"),
    [
        (None, None, "10.0.0.2", 0),
        (None, "nat", "10.0.0.2", 0),
        (None, "nat:7", "10.0.0.2", 7),
        ("10.9.9.9:5", "nat:7", "10.9.9.9", 5),
        (":5", "nat", "10.0.0.2", 5),
    ],
)
async def test_it_listens_where_what_it_advertises_is_mapped_to(
    transport: Transport, bind: str | None, advertise: str | None, host: str, port: int
) -> None:
    made = reach(bind=bind, advertise=advertise)
    await made.listen("tcp://10.0.0.1:1", "10.0.0.2", lambda link: None, [])
    assert (transport.hosts, transport.ports) == ([host], [port])


async def test_what_it_says_of_itself_is_read_by_others() -> None:
    asked = JoinRequest(group="g", id="", size=1)
    listeners: list[Any] = [Listener("tcp://0.0.0.0:5"), Listener("shm:name")]
    loop = asyncio.get_running_loop()
    said = reach().introduce(asked, "10.0.0.2", 0.0, listeners, loop)
    assert (said.host, len(said.id)) == ("10.0.0.2", 32)
    assert said.addresses[2:] == ("tcp://10.0.0.2:5", "shm:name")
    apart = reach().introduce(asked, "10.0.0.2", 0.0205, listeners, loop)
    assert apart.addresses[2:] == ("trip:0.0205", "tcp://10.0.0.2:5", "shm:name")
    assert reach(advertise="name").introduce(asked, "10.0.0.2", 0.0, listeners, loop).host == "name"
    mapped = reach(advertise="nat:7").introduce(asked, "10.0.0.2", 0.0, listeners, loop)
    assert (mapped.host, mapped.addresses[2:]) == ("nat", ("tcp://nat:7", "shm:name"))
    mapped = reach(advertise=":7").introduce(asked, "10.0.0.2", 0.0, listeners, loop)
    assert (mapped.host, mapped.addresses[2]) == ("10.0.0.2", "tcp://10.0.0.2:7")
    there = endpoint_of(member(said.host, *said.addresses), ("tcp",))
    assert there.process == registry.process_id(loop)
    assert there.addresses == {"tcp": "tcp://10.0.0.2:5", "shm": "shm:name"}


async def test_a_peer_that_names_the_loopback_is_dialled_where_the_coordinator_is(
    transport: Transport,
) -> None:
    own = registry.Contact("process", "here", allowed=("tcp",))
    peer = member("127.0.0.1", "tcp://127.0.0.1:5")
    with pytest.raises(OSError, match="listens there alone"):
        await reach().dial(own, peer, "coordinator", None, 1.0)
    with pytest.raises(OSError, match="check firewalls"):
        await reach(GUARDED).dial(own, peer, "coordinator", None, 1.0)
    assert transport.dialled == ["tcp://coordinator:5"] * 2


async def test_a_certificate_that_is_refused_is_no_matter_of_firewalls(
    transport: Transport,
) -> None:
    transport.error.__cause__ = ssl.SSLCertVerificationError("it has expired")
    own = registry.Contact("process", "here", allowed=("tcp",))
    with pytest.raises(OSError, match="check the certificate") as caught:
        await reach(GUARDED).dial(own, member("h", "tcp://h:5"), "coordinator", None, 1.0)
    assert "firewalls" not in str(caught.value)


async def test_where_no_transport_leads_it_says_so(transport: Transport) -> None:
    own = registry.Contact("process", "here", allowed=("shm",), user="me")
    with pytest.raises(OSError, match=r"no transport of shm is common .* users need"):
        await reach().dial(own, member("h"), "c", None, 1.0)


def test_ranks_share_memory_by_host_and_user() -> None:
    said = member("h", "process:run-1-aa", "user:me", "shm:x", "inproc://y")
    assert memory_of(said) == ("run-1", True, "there me")
    assert memory_of(member("h", "process:run-1-aa", "user:me")) == ("run-1", False, "")
