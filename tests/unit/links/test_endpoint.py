"""The links of one rank: what it finds out about them by itself, and what it keeps for later."""

from __future__ import annotations

import asyncio
import socket
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest

from aiodist.links import inboxes
from aiodist.links import peer as links_peer
from aiodist.links.endpoint import Endpoint
from aiodist.links.greeting import Claim, Identity
from aiodist.links.inboxes import Stray
from aiodist.transports.base import Link, Receiver
from aiodist.transports.retransmission import ACK, own_frame
from aiodist.transports.stream import StreamLink
from aiodist.wire import kinds
from aiodist.wire.frames import encode, pack_fields

uvloop = pytest.importorskip("uvloop")


class Refusing:
    """Where peers are dialled, and nobody answers."""

    def __init__(self) -> None:
        self.called = asyncio.Event()

    async def __call__(self, root: int, receiver: Receiver, seconds: float) -> Link:
        self.called.set()
        raise ConnectionRefusedError("nobody listens")


def endpoint_of_two(dial: Any, lease: float = 15.0) -> Endpoint:
    endpoint = Endpoint(asyncio.get_running_loop(), lease=lease)
    endpoint.activate(Identity("g", "a", None), dial)
    assert endpoint.admit(["a", "b"]) == (0, 1)
    return endpoint


def linked(endpoint: Endpoint) -> tuple[StreamLink, socket.socket]:
    """A link to peer 1, over which a frame was sent, and the socket at its other end."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    link = StreamLink(endpoint.loop, ours, kind="unix", peer_name="b")
    link.start()
    peer = endpoint.peer(1)
    peer.attach(link, Claim(0, 0), dialled=False)
    peer.send(pack_fields(kinds.REVOKE, b"context!", 0))
    return link, theirs


@pytest.mark.parametrize(
    "factory", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"]
)
def test_a_connection_that_ends_with_its_last_bytes_is_found(factory: Any) -> None:
    """The peer's process is killed while frames of ours are unread: the system resets the
    connection behind its last frame."""

    async def main() -> None:
        dial = Refusing()
        endpoint = endpoint_of_two(dial, lease=0.2)
        _, theirs = linked(endpoint)
        theirs.send(encode(pack_fields(kinds.INQUIRE, b"context!", None, 0)))
        theirs.close()
        async with asyncio.timeout(20):
            await dial.called.wait()  # to make it again
        assert not endpoint.peer(1).is_linked
        await endpoint.finish(0)

    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(main())


@pytest.mark.parametrize("carries", ["nothing", "a frame to the peer", "no frame at all"])
@pytest.mark.parametrize("looks", [0, links_peer.LOOKS, links_peer.LOOKS - 1])
async def test_connections_that_carry_nothing_are_given_up(
    monkeypatch: pytest.MonkeyPatch, carries: str, looks: int
) -> None:
    """They break at once, or after so many looks without an answer. The peer may break them off
    one look before this rank. What they carry to the peer counts, though nothing comes from it."""

    async def dial(*_: Any) -> Link:
        return await asyncio.Event().wait()

    monkeypatch.setattr(links_peer, "SHORT_LIFE", 0.0 if looks else 1000.0)
    monkeypatch.setattr(StreamLink, "is_unanswered", lambda *_: True)
    endpoint = endpoint_of_two(dial)
    peer = endpoint.peer(1)
    theirs = []
    for number in range(links_peer.IN_VAIN):
        ours, other = socket.socketpair()
        ours.setblocking(False)
        theirs.append(other)
        link = StreamLink(endpoint.loop, ours, kind="unix", peer_name="b")
        link.start()
        taken = number if carries == "a frame to the peer" else 0
        peer.attach(link, Claim(number, taken), dialled=False)
        if carries != "no frame at all":
            peer.send(pack_fields(kinds.REVOKE, b"context!", 0))
        for _ in range(looks):
            peer.look(1.0)
        assert link.is_severed == (looks == links_peer.LOOKS)
        link.break_off(ConnectionResetError("it broke"))
        await asyncio.sleep(0)  # the peer hears in the next turn that the link is severed
    await asyncio.sleep(0)  # and in the one after that it hears that the link is closed
    said = "given up: 4 connections in a row broke, and nothing was seen to arrive; the last one: "
    lost = carries == "nothing" or (carries == "no frame at all" and not looks)
    assert [said in reason for reason in endpoint.lost.values()] == [True] * lost
    assert ["MTU" in reason for reason in endpoint.lost.values()] == [looks > 0] * lost
    await endpoint.finish(0)
    for other in theirs:
        other.close()


async def test_what_is_dropped_of_a_peer_does_not_count_against_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(inboxes, "MOST_GROUPS", 3)
    endpoint = endpoint_of_two(Refusing())
    peer = endpoint.peer(1)
    held = []
    for number in range(6):
        header = pack_fields(kinds.REVOKE, b"%08d" % number, 0)
        stray = peer.frame(None, header, 0)
        assert isinstance(stray, Stray)
        stray.landed()
        held.append(peer._early_bytes)
    assert held[0] < held[1] < held[2] == held[3] == held[5]
    await endpoint.finish(0)


async def test_what_fails_beside_is_told(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But not what was cancelled, as all is at the end."""

    async def fail() -> None:
        raise error

    async def wait() -> None:
        await asyncio.Event().wait()

    error = LookupError("what is that?")
    told: list[BaseException] = []
    endpoint = endpoint_of_two(Refusing())
    monkeypatch.setattr(endpoint.owner, "task_failed", told.append)
    tasks = [endpoint.spawn(fail(), "a test"), endpoint.spawn(wait(), "another")]
    await asyncio.wait(tasks[:1])
    await endpoint.finish(0)
    assert told == [error]
    assert tasks[1].cancelled()
    (record,) = caplog.records
    assert (record.levelname, record.getMessage()) == ("ERROR", "a test failed")


async def test_strangers_are_turned_away_before_the_last_words_are_sent() -> None:
    """These may take long, and meanwhile nobody is to be let in."""
    endpoint = endpoint_of_two(Refusing())
    closed: list[str] = []

    async def finish(timeout: float) -> None:
        closed.append("goodbye")

    endpoint.accept(
        cast(Link, SimpleNamespace(peer_name="b:1", close=lambda: closed.append("stranger")))
    )
    endpoint.peer(1).link = cast(Link, SimpleNamespace(finish=finish))
    await endpoint.finish(1.0)
    assert closed[:2] == ["stranger", "goodbye"]


async def test_links_are_closed_if_the_loop_ends_amid_an_abort() -> None:
    """A program may end right after `abort`. Its peers still hear the reason."""
    endpoint = endpoint_of_two(Refusing())
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    link = StreamLink(endpoint.loop, ours, kind="unix", peer_name="b")
    link.start()
    endpoint.peer(1).attach(link, Claim(0, 0), dialled=False)
    endpoint.abort("enough")
    aborting = asyncio.create_task(endpoint.aborted())
    await asyncio.sleep(0)
    aborting.cancel()
    await asyncio.wait({aborting})
    assert link.is_closed
    assert ours.fileno() == -1
    assert b"enough" in theirs.recv(1000)
    theirs.close()


async def test_each_context_hears_of_a_loss_even_if_another_one_fails() -> None:
    endpoint = endpoint_of_two(Refusing())
    heard: list[str] = []

    def rank_lost(name: str, root: int, reason: str) -> None:
        heard.append(name)
        raise ValueError("of a test")

    for name in ("one", "two"):
        context = SimpleNamespace(id=name.encode(), rank_lost=partial(rank_lost, name))
        endpoint.add(cast(Any, context))
    with pytest.raises(ValueError, match="of a test"):
        endpoint.lose(1, "gone")
    assert heard == ["one", "two"]


async def test_a_forked_child_closes_a_connection_that_is_being_made() -> None:
    endpoint = endpoint_of_two(Refusing())
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    link = StreamLink(endpoint.loop, ours, kind="unix", peer_name="b")
    endpoint.peer(1).calling = link
    endpoint.close_in_child()
    assert link.is_closed and ours.fileno() == -1
    theirs.close()


@pytest.mark.parametrize("came", ["nothing", "a frame", "an acknowledgement"])
async def test_a_late_proof_of_an_abandoned_attempt_breaks_no_link(came: str) -> None:
    """It names as few links as a peer that has not heard of the present one. But over that link
    something has come."""
    endpoint = endpoint_of_two(Refusing())
    link, theirs = linked(endpoint)
    peer = endpoint.peer(1)
    if came == "a frame":
        theirs.send(encode(pack_fields(kinds.REVOKE, b"context!", 0)))
    elif came == "an acknowledgement":
        theirs.send(own_frame(ACK, 1))
    is_old = came != "nothing"
    assert peer.make_way(Claim(0, 0)) is not is_old
    assert link.is_severed is not is_old
    assert not link.is_closed
    await endpoint.finish(0)
    theirs.close()


async def test_a_peer_hears_once_that_a_group_has_ended() -> None:
    """One that sends without reading would fill the memory of this rank with answers."""
    endpoint = endpoint_of_two(Refusing())
    for context in (b"context1", b"context2"):
        endpoint.inboxes.close(context, "enough")
    sent: list[bytes] = []
    link = cast(Link, SimpleNamespace(send=sent.append, unheard=0))
    for context in (b"context1", b"context2", b"context1", b"context1"):
        endpoint.peer(1).frame(link, pack_fields(kinds.GRANT, context, 1), 0)
    assert sent == [
        pack_fields(kinds.FAREWELL, context, "enough") for context in (b"context1", b"context2")
    ]
    await endpoint.finish(0)


async def test_what_waits_for_a_peer_does_not_pile_up() -> None:
    endpoint = endpoint_of_two(Refusing())
    peer = endpoint.peer(1)
    for number in range(links_peer.MOST_ONCE_LINKED + 1):
        peer.reach(b"%d" % number, asks=False)
        assert peer.dialing is not None
        await asyncio.wait({peer.dialing})
    assert not endpoint.lost and not peer._reaching
    assert len(peer._once_linked) == links_peer.MOST_ONCE_LINKED
    peer.send(b"header", [memoryview(bytes(100))])
    assert peer.held
    endpoint.lose(1, "gone")
    assert not peer.held and not peer._once_linked
    await endpoint.finish(0)
