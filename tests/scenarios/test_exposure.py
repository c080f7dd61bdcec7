"""Addresses of the environment: where rank 0 listens, who can connect there, and what it says."""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
import ssl
from dataclasses import replace
from typing import Any

import pytest

import aiodist
from aiodist import session
from aiodist.coordinator.actor import Coordinator
from aiodist.coordinator.exposure import Guard, narrow_hint
from aiodist.coordinator.listening import own_address
from aiodist.membership.group import REFUSED
from aiodist.reach import Reach
from aiodist.testing import Simulation
from aiodist.transports.registry import Contact
from aiodist.transports.tcp import PATIENCE
from aiodist.transports.tls import TlsContexts
from aiodist.wire.address import parse_address
from aiodist.wire.messages import MemberInfo

NAME = "node0.test"


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """What names lead to, beside those that the system knows; nothing: nobody knows it. (Loops of
    asyncio ask in Python.)"""
    known: dict[str, list[str]] = {}
    of_system = socket.getaddrinfo

    def getaddrinfo(host: Any, *rest: Any, **more: Any) -> Any:
        asked = known.get(host, [host])
        if not asked:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return list(itertools.chain(*[of_system(one, *rest, **more) for one in asked]))

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    for name in ("AIODIST_ADDRESS", "AIODIST_TOKEN", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)
    return known


@pytest.fixture
def master(monkeypatch: pytest.MonkeyPatch, names: dict[str, list[str]]) -> int:
    """This process is rank 0 of 1, with a MASTER_ADDR that is `NAME`, 127.0.0.2: its port."""
    names[NAME] = ["127.0.0.2"]
    with socket.socket() as probe:
        probe.bind(("127.0.0.2", 0))
        port: int = probe.getsockname()[1]
    for variable, value in (
        ("MASTER_ADDR", NAME),
        ("MASTER_PORT", str(port)),
        ("RANK", "0"),
        ("WORLD_SIZE", "1"),
    ):
        monkeypatch.setenv(variable, value)
    return port


async def is_open(host: str, port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection(host, port)
    except ConnectionRefusedError:
        return False
    writer.close()
    return True


async def ports_of(group: aiodist.Group) -> tuple[str, int]:
    (own,) = [one for one in group._actor._listeners if one.address.startswith("tcp://")]
    at = parse_address(own.address)
    return at.host, at.port


def test_without_a_token_rank_0_listens_where_its_address_says(master: int) -> None:
    async def main() -> None:
        async with aiodist.connect() as group:
            assert await is_open("127.0.0.2", master)
            assert not await is_open("127.0.0.3", master)
            host, port = await ports_of(group)  # that for its peers
            assert host.startswith("127.")
            assert not await is_open("127.0.0.4", port)

    asyncio.run(main())


def test_with_a_token_it_listens_on_all_interfaces(
    master: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("AIODIST_TOKEN", "secret")

    async def main() -> None:
        async with aiodist.connect(allow_pickle=True) as group:
            assert await is_open("127.0.0.3", master)
            assert (await ports_of(group))[0] == "0.0.0.0"

    asyncio.run(main())
    assert not caplog.records


def everywhere(master: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The address is one that other hosts could reach, if there were any."""
    monkeypatch.setenv("AIODIST_ADDRESS", f"tcp://0.0.0.0:{master}")


def test_a_wide_address_without_a_token_is_warned_of_once(
    master: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    everywhere(master, monkeypatch)

    async def main() -> None:
        async with aiodist.connect():
            assert await is_open("127.0.0.3", master)

    with caplog.at_level(logging.WARNING):
        asyncio.run(main())
    (said,) = caplog.messages
    assert f"rank 0 serves the coordinator at tcp://0.0.0.0:{master} without a token" in said
    assert "AIODIST_TOKEN" in said


def test_pickles_of_strangers_are_refused_before_anybody_can_connect(
    master: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    everywhere(master, monkeypatch)

    async def main() -> None:
        with pytest.raises(ValueError, match=r"allow_pickle=True lets .* same token="):
            await aiodist.connect(allow_pickle=True)
        assert not await is_open("127.0.0.1", master)

    asyncio.run(main())


def test_pickles_of_strangers_are_refused_at_the_listener_for_peers(run: Any) -> None:
    async def main() -> None:
        async with Coordinator("tcp://127.0.0.1:0") as coordinator:
            options: dict[str, Any] = {"rank": 0, "size": 1, "allow_pickle": True}
            with pytest.raises(ValueError, match=r"connect to tcp://0\.0\.0\.0:\d+ could become"):
                await aiodist.connect(coordinator.address, bind="0.0.0.0", **options)
            async with aiodist.connect(coordinator.address, **options):
                pass  # nobody but this host gets there
            only = {**options, "bind": "0.0.0.0", "transports": "unix"}
            async with aiodist.connect(coordinator.address, **only):
                pass

    run(main())


def test_a_name_of_several_addresses_is_listened_to_where_others_come(
    names: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        names[NAME] = ["127.0.1.1", "::1", "127.0.0.2"]
        assert await own_address(parse_address(f"tcp://{NAME}:7")) == parse_address(
            "tcp://127.0.1.1:7"
        )
        # 192.0.2.0/24 is nobody's (RFC 5737); 0.0.0.0 stands for what others can reach.
        names[NAME] = ["192.0.2.1", "127.0.1.1", "0.0.0.0"]
        assert await own_address(parse_address(f"tcp://{NAME}:7")) == parse_address(
            "tcp://0.0.0.0:7"
        )
        names[NAME] = ["192.0.2.1"]
        assert await own_address(parse_address(f"tcp://{NAME}:7")) is None

    asyncio.run(main())


async def refused() -> str:
    """What `connect` has to say, beside its error, where the ranks do not meet."""
    with pytest.raises(aiodist.JoinTimeoutError) as caught:
        await aiodist.connect(timeout=0.3)
    (note,) = caught.value.__notes__
    return note


@pytest.mark.parametrize("token", [True, False])
@pytest.mark.parametrize("variable", ["MASTER_ADDR", "AIODIST_ADDRESS"])
def test_rank_0_is_on_another_host_and_the_error_says_so(
    master: int,
    names: dict[str, list[str]],
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    token: bool,
) -> None:
    names[NAME] = ["192.0.2.1"]
    if token:
        monkeypatch.setenv("AIODIST_TOKEN", "secret")
    if variable == "AIODIST_ADDRESS":
        monkeypatch.setenv("AIODIST_ADDRESS", f"tcp://{NAME}:{master}")
        monkeypatch.setenv("AIODIST_RANK", "0")
        monkeypatch.setenv("AIODIST_SIZE", "1")
    note = asyncio.run(refused())
    assert note.startswith(f"{NAME} is no address of the host that rank 0 is on.")


def test_a_name_that_nobody_knows_and_the_error_says_what_may_be_wrong(
    master: int, names: dict[str, list[str]]
) -> None:
    names[NAME] = []
    note = asyncio.run(refused())
    assert note == narrow_hint(parse_address(f"tcp://{NAME}:{master}"))
    assert "AIODIST_TOKEN" in note


async def test_an_address_that_a_refused_rank_has_reached_is_not_suspected(
    master: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def met(_: object) -> aiodist.Group:
        raise aiodist.JoinTimeoutError(f"the group is not complete{REFUSED}'rank-1'")

    monkeypatch.setattr(session, "_met", met)
    with pytest.raises(aiodist.JoinTimeoutError) as caught:
        await aiodist.connect(timeout=1.0)
    assert not hasattr(caught.value, "__notes__")


@pytest.mark.parametrize(("token", "one_host"), [(True, False), (False, False), (False, True)])
def test_a_name_that_means_a_loopback_address_on_its_own_host(
    master: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    token: bool,
    one_host: bool,
) -> None:
    """As the name of a Debian host does there. Others know it by another address."""
    monkeypatch.setenv("AIODIST_ADDRESS", f"tcp://{NAME}:{master}")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1" if one_host else "0")
    if token:
        monkeypatch.setenv("AIODIST_TOKEN", "secret")

    async def main() -> None:
        async with aiodist.connect():
            assert await is_open("127.0.0.2", master)
            assert await is_open("127.0.0.3", master) is token

    with caplog.at_level(logging.WARNING):
        asyncio.run(main())
    if token or one_host:
        assert caplog.messages == []
    else:
        (said,) = caplog.messages
        assert f"at tcp://127.0.0.2:{master}, which is what {NAME} means on its host" in said


def test_a_name_that_becomes_known_a_moment_later_is_waited_for(
    master: int, names: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    names[NAME] = []
    asked: list[str] = []
    lookup = socket.getaddrinfo

    def getaddrinfo(host: Any, *rest: Any, **more: Any) -> Any:
        asked.append(host)
        try:
            return lookup(host, *rest, **more)
        except socket.gaierror:
            names[NAME] = ["127.0.0.2"]
            raise

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)

    async def main() -> None:
        async with aiodist.connect():
            assert asked[:2] == [NAME, NAME]

    asyncio.run(main())


def test_what_keeps_strangers_out() -> None:
    asks, does_not = (
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER),
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER),
    )
    asks.verify_mode = ssl.CERT_REQUIRED
    client = ssl.create_default_context()
    assert not Guard.of(None, None, allow_pickle=True).keeps_out
    assert not Guard.of(None, TlsContexts(client, does_not).server, allow_pickle=True).keeps_out
    assert Guard.of(None, TlsContexts(client, asks).server, allow_pickle=True).keeps_out
    assert Guard.of(b"secret", None, allow_pickle=True).keeps_out


@pytest.mark.parametrize("empty", ["", b""])
async def test_an_empty_token_is_refused(empty: str | bytes) -> None:
    with pytest.raises(ValueError, match="the token is empty"):
        aiodist.connect("tcp://127.0.0.1:1", rank=0, size=1, token=empty)
    with pytest.raises(ValueError, match="the token is empty"):
        async with aiodist.local(1, token=empty):
            pass


def test_an_empty_token_of_the_environment_is_refused(
    master: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIODIST_TOKEN", "")
    with pytest.raises(ValueError, match="AIODIST_TOKEN is set, but empty"):
        aiodist.connect()


async def test_the_token_of_the_environment_is_shown_at_an_address_that_is_given(
    names: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By ranks, by participants of channels, and by status; and `token=` goes first."""
    async with aiodist.Coordinator("tcp://127.0.0.1:0", token="secret") as coordinator:
        at = coordinator.address
        monkeypatch.setenv("AIODIST_TOKEN", "secret")
        async with aiodist.connect(at, size=1) as group:
            await group.barrier()
        async with (
            aiodist.publisher("policy", address=at),
            aiodist.subscriber("policy", address=at),
        ):
            pass
        with pytest.raises(aiodist.AuthenticationError, match=r"Set AIODIST_TOKEN to .* token="):
            await aiodist.connect(at, size=1, token="another")
        monkeypatch.setenv("AIODIST_TOKEN", "another")
        async with aiodist.connect(at, size=1, token="secret") as group:
            await group.barrier()


async def test_the_token_of_the_environment_is_asked_for(
    names: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a coordinator that is given none, so that it and its ranks agree."""
    monkeypatch.setenv("AIODIST_TOKEN", "secret")
    async with aiodist.local(2) as ranks:
        assert await asyncio.gather(*(rank.all_reduce(1) for rank in ranks)) == [2, 2]
    async with aiodist.Coordinator("tcp://127.0.0.1:0") as coordinator:
        async with aiodist.connect(coordinator.address, size=1) as group:
            await group.barrier()
        monkeypatch.delenv("AIODIST_TOKEN")
        with pytest.raises(aiodist.AuthenticationError):
            await aiodist.connect(coordinator.address, size=1)


async def test_a_token_for_a_coordinator_that_asks_for_none(
    names: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with aiodist.Coordinator("tcp://127.0.0.1:0") as coordinator:
        monkeypatch.setenv("AIODIST_TOKEN", "secret")
        with pytest.raises(aiodist.AuthenticationError, match="unset AIODIST_TOKEN"):
            await aiodist.connect(coordinator.address, size=1)


def test_a_simulation_under_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIODIST_TOKEN", "secret")

    async def main(group: aiodist.Group) -> int:
        return await group.all_reduce(1)

    assert Simulation(2).run(main) == [2, 2]


@pytest.fixture
def member(run: Any) -> MemberInfo:
    """Who was in a group."""

    async def main() -> MemberInfo:
        async with aiodist.local(1) as (group,):
            (own,) = group._actor.view.members
            return own

    found: MemberInfo = run(main())
    return found


HERE = Contact("y", "this", {}, ("tcp",))
"""A rank that dials."""


def reach(guard: Guard) -> Reach:
    return Reach(("tcp",), None, guard, None, None)


def test_who_allows_pickles_calls_no_strangers_elsewhere(run: Any, member: MemberInfo) -> None:
    """The coordinator lets everybody in, though this rank reaches it by a loopback address."""
    # 192.0.2.0/24 is nobody's (RFC 5737).
    there = ("process:x", "tcp://192.0.2.1:9")
    stranger = replace(member, host_id="another", host="192.0.2.1", addresses=there)
    guard = Guard(False, allow_pickle=True)
    receiver: Any = None
    with pytest.raises(ValueError, match=r"connect to tcp://192\.0\.2\.1:9 could become one"):
        run(reach(guard).dial(HERE, stranger, "127.0.0.1", receiver, PATIENCE))


@pytest.mark.parametrize("token", [True, False])
def test_a_rank_that_listens_on_its_own_host_alone(
    run: Any, member: MemberInfo, token: bool
) -> None:
    """It is behind the coordinator's address: nobody listens there."""
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        there = ("process:x", f"tcp://127.0.1.1:{nobody.getsockname()[1]}")
        mate = replace(member, host_id="another", host="127.0.1.1", addresses=there)
        receiver: Any = None
        why = "check firewalls" if token else "listens there alone, as there is no token"
        with pytest.raises(OSError, match=rf"tried tcp://127\.0\.0\.1:\d+ .*{why}"):
            run(reach(Guard(token)).dial(HERE, mate, "127.0.0.1", receiver, PATIENCE))
