"""Calls to peers that cannot be reached: the coordinator may know why."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from aiodist.links import caller as links_caller
from aiodist.links.caller import Caller
from aiodist.links.greeting import Claim, Greeting, Identity
from aiodist.links.owner import EndpointOwner
from aiodist.wire import kinds
from aiodist.wire.frames import pack_fields
from aiodist.wire.proof import NONCE_BYTES

ABORTED = "it aborted: the disk is full"


class Owner(EndpointOwner):
    """The coordinator has lost `peer` for `reason`, and this rank hears of it once it asks."""

    def __init__(self, home: Home, reason: str = "") -> None:
        self.home = home
        self.reason = reason
        self.asked: list[float] = []

    async def caught_up(self, seconds: float = 0.0) -> None:
        self.asked.append(seconds)
        if self.reason:
            self.home.lose(self.home.peer.rank, self.reason)
        await asyncio.sleep(0)


class Home:
    """An endpoint that knows one peer, which refuses connections, or ends them (`ends`)."""

    error = OSError("refused")

    def __init__(self, reason: str = "", broken: str = "") -> None:
        self.loop = asyncio.get_running_loop()
        self.owner = Owner(self, reason)
        self.lost: dict[int, str] = {}
        self.peer: Any = SimpleNamespace(
            rank=1,
            id="b",
            broken=broken,
            is_linked=False,
            is_needed=True,
            dialing=None,
            link=None,
            calling=None,
            claim=Claim(0, 0),
            unreached=lambda: None,
        )
        self.calls = 0

    def lose(self, rank: int, reason: str) -> None:
        if rank not in self.lost:
            self.lost[rank] = reason
            if self.peer.dialing is not None:
                self.peer.dialing.cancel()

    def cut(self, rank: int, reason: str, *, ended: bool = False, is_over: bool = False) -> None:
        self.lose(rank, reason)

    def ends(self, greeting: Greeting) -> Any:
        """Return a connection that the peer ends, or raise an error."""
        raise self.error

    async def call(self) -> None:
        async def dial(root: int, receiver: Any, seconds: float) -> Any:
            self.calls += 1
            return self.ends(receiver)

        home: Any = self
        caller = Caller(home, Identity("g", "a", None), dial)
        self.peer.dialing = self.loop.create_task(caller.connect(self.peer))
        await asyncio.wait({self.peer.dialing})
        assert self.peer.dialing is None


async def test_the_reason_of_an_abort_counts_more_than_a_refused_connection() -> None:
    home = Home(ABORTED)
    await home.call()
    assert home.lost == {1: ABORTED}


async def test_who_is_not_needed_is_not_lost() -> None:
    home = Home()
    home.peer.is_needed = False
    await home.call()
    assert not home.lost


async def test_without_another_reason_it_is_not_reachable() -> None:
    home = Home()
    await home.call()
    assert home.owner.asked == [0.0]
    assert home.lost == {1: "not reachable: refused"}


async def test_who_had_a_link_has_said_why_it_goes() -> None:
    home = Home(ABORTED, broken="connection lost; ")
    await home.call()
    assert home.owner.asked == []
    assert home.lost == {1: "connection lost; not reachable: refused"}


async def test_who_had_a_link_and_listens_no_more_has_ended() -> None:
    home = Home(broken="connection lost; ")
    home.error = OSError("tried tcp://10.0.0.1:7 (refused); check firewalls")
    home.error.__cause__ = ConnectionRefusedError("refused")
    await home.call()
    assert home.lost == {1: "connection lost; its process has probably ended (refused)"}


@pytest.mark.parametrize("answers", [False, True])
async def test_connections_that_last_and_answer_nothing_come_to_an_end(
    monkeypatch: pytest.MonkeyPatch, answers: bool
) -> None:
    """A proxy may accept connections for a peer that it does not reach. But a peer that has
    answered is there, and was just busy."""
    challenge = pack_fields(kinds.CHALLENGE, bytes(NONCE_BYTES))
    home = Home()

    def ends(greeting: Greeting) -> Any:
        if home.calls > 20:
            raise home.error
        link: Any = SimpleNamespace(send=lambda *_, **__: None, close=lambda: None)
        greeting.begin(link)
        if answers:
            landing = greeting.frame(link, challenge, 0)
            assert landing is not None
            landing.landed()
        greeting.closed(link, ConnectionResetError("closed"))
        return link

    monkeypatch.setattr(home, "ends", ends)
    monkeypatch.setattr(links_caller, "SHORT_LIFE", -1.0)
    monkeypatch.setattr(links_caller, "PAUSES", [0.0] * 3)
    await home.call()
    assert home.calls == (21 if answers else 4)
    why = (
        "not reachable: refused" if answers else "it refuses connections (it has left, or lost us)"
    )
    assert home.lost == {1: why}
