"""TCP and Unix listeners and dialling."""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import os
import socket
import sys
import weakref
from pathlib import Path
from typing import Any, cast

import pytest

from aiodist.testing.links import LinkPair, connected
from aiodist.transports import processes, tcp, unix
from aiodist.transports.base import Link
from aiodist.transports.inproc import InprocTransport
from aiodist.transports.sockets import SocketListener
from aiodist.transports.stream import StreamLink
from aiodist.transports.tcp import TcpTransport
from aiodist.transports.unix import UnixTransport

SO_BUF_LOCK = 72
"""Of Linux: which buffers have sizes that were set by hand. Python does not name it."""


async def test_bad_addresses_of_the_others() -> None:
    ends = LinkPair()
    with pytest.raises(ValueError, match="unix-abstract:"):
        await UnixTransport().dial("tcp://10.0.0.1:1", ends.at_a)
    with pytest.raises(ValueError, match="inproc://"):
        await InprocTransport().dial("tcp://10.0.0.1:1", ends.at_a)


async def test_tcp_options_and_names() -> None:
    async with connected(TcpTransport()) as ends:
        for link in (ends.a, ends.b):
            assert isinstance(link, StreamLink)
            sock = link._socket
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            # It would end connections to ranks that live, but do not read for a while.
            assert not sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
            assert not sock.getblocking()
            assert not sock.get_inheritable()
        assert ends.a.peer_name.startswith("127.0.0.1:")
        assert ends.a.peer_name != ends.b.peer_name


async def test_tcp_to_a_near_peer_is_not_paced() -> None:
    async with connected(TcpTransport()) as ends:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as other:
            usual = other.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
        expected = b"reno" if usual.startswith((b"bbr", b"cubic")) else usual
        for link in (ends.a, ends.b):
            assert isinstance(link, StreamLink)
            chosen = link._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
            assert chosen.rstrip(b"\0") == expected.rstrip(b"\0")


@pytest.mark.parametrize(
    ("usual", "far"),
    [(b"reno", b"bbr"), (b"cubic", b"bbr"), (b"bbr", b"bbr"), (b"vegas", b"vegas")],
)
def test_tcp_to_a_far_peer_stands_losses(usual: bytes, far: bytes) -> None:
    """Where the system lets a process choose, and has chosen nothing special."""
    sock = Stub(usual)
    tcp._choose_congestion_control(cast(Any, sock), near=False)
    assert sock.congestion == far
    denied = Stub(usual, allowed=False)
    tcp._choose_congestion_control(cast(Any, denied), near=False)
    assert denied.congestion == usual


class Stub:
    """A socket that has one option."""

    def __init__(self, congestion: bytes, *, allowed: bool = True) -> None:
        self.congestion = congestion
        self._allowed = allowed

    def getsockopt(self, level: int, name: int, size: int) -> bytes:
        assert (level, name) == (socket.IPPROTO_TCP, socket.TCP_CONGESTION)
        return self.congestion.ljust(size, b"\0")

    def setsockopt(self, level: int, name: int, value: bytes) -> None:
        assert (level, name) == (socket.IPPROTO_TCP, socket.TCP_CONGESTION)
        if not self._allowed:
            raise PermissionError(errno.EPERM, "not permitted")
        self.congestion = value


@pytest.mark.parametrize(("trip", "unsent"), [(1e-3, None), (0.02, tcp.UNSENT), (None, None)])
async def test_tcp_to_a_far_peer_keeps_its_queue_here(
    monkeypatch: pytest.MonkeyPatch, trip: float | None, unsent: int | None
) -> None:
    """So what is urgent overtakes what is not."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as other:
        usual = other.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT)
    monkeypatch.setattr(tcp, "round_trip", lambda sock: trip)
    # Who listens would wait for the first byte: see test_joining.py.
    monkeypatch.setattr(TcpTransport, "_is_far", lambda self, sock: False)
    monkeypatch.setattr(TcpTransport, "_wants_bundle", lambda self, sock: False)
    chosen: list[bool] = []
    monkeypatch.setattr(
        tcp, "_choose_congestion_control", lambda sock, *, near: chosen.append(near)
    )
    async with connected(TcpTransport()) as ends:
        for link in (ends.a, ends.b):
            assert isinstance(link, StreamLink)
            found = link._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT)
            assert found == (usual if unsent is None else unsent)
    assert chosen == ([] if trip is None else [unsent is None] * 2)


def largest_buffer() -> int:
    """Bytes to which the kernel grows the receive buffer of a connection."""
    return int(Path("/proc/sys/net/ipv4/tcp_rmem").read_text().split()[2])


@pytest.mark.skipif(sys.platform != "linux", reason="it is Linux that makes room by this option")
@pytest.mark.parametrize("trip", [1e-3, 2e-3, 0.1, None])
async def test_tcp_to_a_far_peer_begins_with_a_window_for_the_round_trip(
    monkeypatch: pytest.MonkeyPatch, trip: float | None
) -> None:
    """Else the kernel raises it from 64 KiB, which takes the first operations many round trips."""
    monkeypatch.setattr(tcp, "round_trip", lambda sock: trip)
    monkeypatch.setattr(TcpTransport, "_is_far", lambda self, sock: False)
    monkeypatch.setattr(TcpTransport, "_wants_bundle", lambda self, sock: False)
    monkeypatch.setattr(tcp, "_choose_congestion_control", lambda sock, *, near: None)
    most = largest_buffer()
    async with connected(TcpTransport()) as ends:
        for link in (ends.a, ends.b):
            assert isinstance(link, StreamLink)
            room, wakes, locked = (
                link._socket.getsockopt(socket.SOL_SOCKET, option)
                for option in (socket.SO_RCVBUF, socket.SO_RCVLOWAT, SO_BUF_LOCK)
            )
            if trip is None or trip <= tcp.NEAR:
                assert room < tcp.MOST_ROOM // 2
            else:
                assert room >= min(trip * tcp.FASTEST, tcp.MOST_ROOM, most // 2)
            assert wakes == 1  # a reader is woken by the first byte
            assert not locked  # the kernel may still grow them


async def test_tcp_over_ipv6() -> None:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        pytest.skip("no IPv6 loopback here")
    ends = LinkPair()

    def accept(link: Link) -> None:
        link.receiver = ends.at_b
        ends.b = link
        ends.news.set()

    listener = await TcpTransport().listen(accept, host="::1")
    assert listener.address.startswith("tcp://[::1]:")
    link = await TcpTransport().dial(listener.address, ends.at_a)
    link.send(b"h")
    await ends.until(lambda: ends.at_b.headers == [b"h"])
    await link.finish(20.0)
    await ends.until(lambda: bool(ends.at_b.ends))
    listener.close()


async def test_unix_leaves_nothing_behind() -> None:
    async with connected(UnixTransport()) as ends:
        assert isinstance(ends.a, StreamLink)
        name = ends.a._socket.getpeername()
        assert bytes(name).startswith(b"\0aiodist-")
        assert f"pid {os.getpid()}" in ends.b.peer_name


async def test_unix_refuses_other_users(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    accepted: list[Link] = []
    listener = await UnixTransport().listen(accepted.append)
    uid = os.getuid()
    monkeypatch.setattr(processes, "_CREDENTIALS", FakeCredentials(uid + 1))
    with pytest.raises(PermissionError, match=f"runs as user {uid + 1}: expected user {uid}"):
        await UnixTransport().dial(listener.address, LinkPair().at_a)
    assert isinstance(listener, SocketListener)
    listener._ready()  # and so does the listener, of that same connection
    assert "refused a connection" in caplog.text
    for _ in range(100):  # 6000 a second would fill the log
        with pytest.raises(PermissionError):
            await UnixTransport().dial(listener.address, LinkPair().at_a)
        listener._ready()
    assert caplog.text.count("refused a connection") == 10
    assert not accepted
    listener.close()


class FakeCredentials:
    """Credentials of another user than the kernel says."""

    size = 12

    def __init__(self, uid: int) -> None:
        self.uid = uid

    def unpack(self, raw: bytes) -> tuple[int, int, int]:
        assert len(raw) == self.size
        return 4711, self.uid, 0


async def test_unix_waits_for_room_in_the_backlog(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unix, "BACKLOG", 0)
    links: list[Link] = []
    listener = await UnixTransport().listen(links.append)
    assert isinstance(listener, SocketListener)
    listener._loop.remove_reader(listener._socket.fileno())  # nobody accepts
    dials = [
        asyncio.ensure_future(UnixTransport().dial(listener.address, LinkPair().at_a))
        for _ in range(4)
    ]
    await asyncio.wait(dials, return_when=asyncio.FIRST_COMPLETED)
    assert not all(dial.done() for dial in dials)
    listener._loop.add_reader(listener._socket.fileno(), listener._ready)
    dialled = await asyncio.gather(*dials)
    for link in [*dialled, *links]:
        link.close()
    listener.close()


async def test_a_cancelled_dial_closes_its_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unix, "BACKLOG", 0)
    listener = await UnixTransport().listen(lambda link: None)
    assert isinstance(listener, SocketListener)
    listener._loop.remove_reader(listener._socket.fileno())
    before = len(os.listdir("/proc/self/fd"))
    dials = [
        asyncio.ensure_future(UnixTransport().dial(listener.address, LinkPair().at_a))
        for _ in range(4)
    ]
    await asyncio.wait(dials, return_when=asyncio.FIRST_COMPLETED)
    for dial in dials:
        dial.cancel()
    for result in await asyncio.gather(*dials, return_exceptions=True):
        if isinstance(result, StreamLink):
            result.close()
    assert len(os.listdir("/proc/self/fd")) == before
    listener._loop.add_reader(listener._socket.fileno(), listener._ready)
    listener.close()


class FakeListening:
    """A listening socket whose `accept` raises and gives what it is told."""

    def __init__(self, results: list[Any]) -> None:
        self.results = results
        self.pair = socket.socketpair()
        self.closed = False

    def fileno(self) -> int:
        return self.pair[0].fileno()

    def accept(self) -> tuple[Any, str]:
        result = self.results.pop(0) if self.results else BlockingIOError()
        if isinstance(result, BaseException):
            raise result
        return result, ""

    def close(self) -> None:
        self.closed = True
        for sock in self.pair:
            sock.close()


def listening(results: list[Any], accept: Any) -> tuple[FakeListening, SocketListener]:
    loop = asyncio.get_running_loop()
    fake = FakeListening(results)

    def admit(sock: socket.socket) -> StreamLink:
        return StreamLink(loop, sock, kind="tcp", peer_name="p")

    return fake, SocketListener(loop, fake, "tcp://x:1", admit, accept)


async def test_out_of_file_descriptors_backs_off(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("aiodist.transports.sockets.PAUSE", 0.0)
    ours, theirs = socket.socketpair()
    accepted: list[Link] = []
    came = asyncio.Event()

    def accept(link: Link) -> None:
        accepted.append(link)
        came.set()

    fake, listener = listening(
        [
            *[OSError(errno.EMFILE, "Too many open files")] * 3,
            ConnectionAbortedError(errno.ECONNABORTED, "gone"),
            ours,
        ],
        accept,
    )
    told: list[OSError] = []
    listener.on_exhausted = told.append
    fake.pair[1].send(b"x")  # "readable" from now on
    async with asyncio.timeout(20):
        await came.wait()
    assert "Too many open files; trying again" in caplog.text
    assert len(caplog.records) == 1  # not each time
    assert [error.errno for error in told] == [errno.EMFILE] * 3
    accepted[0].close()
    listener.close()
    theirs.close()


async def test_closing_while_backing_off(caplog: pytest.LogCaptureFixture) -> None:
    fake, listener = listening([OSError(errno.ENFILE, "full")], lambda link: None)
    listener._ready()
    listener.close()
    listener.close()
    assert fake.closed


@pytest.mark.parametrize("number", [errno.EPROTO, errno.ENETDOWN, errno.ECONNRESET])
async def test_a_connection_that_fails_as_it_is_accepted_does_not_end_the_listener(
    number: int,
) -> None:
    links: list[Link] = []
    ours, theirs = socket.socketpair()
    fake, listener = listening([OSError(number, "of a test"), ours], links.append)
    listener._ready()
    assert len(links) == 1 and not fake.closed
    links[0].close()
    listener.close()
    theirs.close()


async def test_a_broken_listening_socket_is_closed(caplog: pytest.LogCaptureFixture) -> None:
    fake, listener = listening([OSError(errno.EBADF, "bad")], lambda link: None)
    listener._ready()
    assert fake.closed
    assert caplog.records[0].levelno == logging.ERROR


async def test_an_error_in_accept_closes_that_link(caplog: pytest.LogCaptureFixture) -> None:
    links: list[Link] = []

    def accept(link: Link) -> None:
        links.append(link)
        raise LookupError("a mistake")

    ours, theirs = socket.socketpair()
    _fake, listener = listening([ours], accept)
    listener._ready()
    assert links[0].is_closed
    assert theirs.recv(1) == b""
    assert "could not take the connection" in caplog.text
    listener.close()
    theirs.close()


async def test_closing_a_listener_in_a_forked_child_leaves_the_loop_alone() -> None:
    fake, listener = listening([], lambda link: None)
    fileno = fake.fileno()
    listener.close_in_child()
    listener.close_in_child()
    listener.close()
    assert fake.closed
    assert asyncio.get_running_loop().remove_reader(fileno), "the loop was told"


async def test_a_connection_that_is_gone_at_once_is_no_error() -> None:
    loop = asyncio.get_running_loop()
    ours, theirs = socket.socketpair()
    fake = FakeListening([ours])

    def admit(sock: socket.socket) -> StreamLink:
        raise OSError(errno.ENOTCONN, "gone")

    listener = SocketListener(loop, fake, "tcp://x:1", admit, lambda link: None)
    listener._ready()
    assert theirs.recv(1) == b""
    theirs.close()
    listener.close()
    assert fake.closed


def test_inproc_serves_one_loop_only() -> None:
    async def listen() -> Any:
        return await InprocTransport().listen(lambda link: None)

    async def dial(address: str) -> None:
        with pytest.raises(ConnectionRefusedError, match="in this event loop"):
            await InprocTransport().dial(address, LinkPair().at_a)

    listener = asyncio.run(listen())
    asyncio.run(dial(listener.address))
    listener.close_in_child()


async def test_an_inproc_listener_that_is_dropped_is_freed() -> None:
    """A group that a program never closes ends with its event loop, and leaves no sockets."""

    class Owner:
        listener: Any

        def accept(self, link: Link) -> None: ...

    owner = Owner()
    owner.listener = await InprocTransport().listen(owner.accept)
    address = owner.listener.address
    is_freed = weakref.ref(owner)
    del owner
    gc.collect()
    assert is_freed() is None
    with pytest.raises(ConnectionRefusedError):
        await InprocTransport().dial(address, LinkPair().at_a)


async def test_inproc_accept_that_fails(caplog: pytest.LogCaptureFixture) -> None:
    def accept(link: Link) -> None:
        raise LookupError("a mistake")

    ends = LinkPair()
    listener = await InprocTransport().listen(accept)
    link = await InprocTransport().dial(listener.address, ends.at_a)
    await ends.until(lambda: bool(ends.at_a.ends))
    assert isinstance(ends.at_a.ends[0], ConnectionResetError)
    assert link.is_closed
    assert "could not take the connection" in caplog.text
    listener.close()
