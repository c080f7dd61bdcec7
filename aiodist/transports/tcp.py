"""Links over TCP.

Socket buffers are left to the kernel, which grows them as needed. Sizes set by hand would be fixed,
and cut to `net.core.rmem_max` and `wmem_max`. So a connection has at most what `net.ipv4.tcp_rmem`
and `tcp_wmem` allow on the way. To a distant peer the receive buffer begins large, because the
kernel would need many round trips to grow it (`_begin_with_room`).
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from aiodist.transports.base import Link, Listener, Receiver
from aiodist.transports.bundle import Bundle
from aiodist.transports.bundled import link_over
from aiodist.transports.joining import PARTS, BundleListener, has_room, join
from aiodist.transports.link import log
from aiodist.transports.silence import NEAR, probe_when_idle, round_trip
from aiodist.transports.sockets import BACKLOG
from aiodist.transports.stream import StreamLink
from aiodist.transports.surroundings import closed_on_error, look_up, new_socket
from aiodist.transports.tls import TlsContexts, TlsLink
from aiodist.wire.address import parse_address

T = TypeVar("T")

SILENCE = 20
"""Seconds without an answer to a keep-alive probe after which an idle connection ends, unless its
link sets another time (`StreamLink.listen_for`)."""

PATIENCE = 10.0
"""Seconds for a peer's system to accept a connection. It accepts for a busy process, too, so this
does not limit what the process does."""

STEPS = 10
"""That time is counted in this many steps, so that a loop that does not turn loses only one of
them. A rank that computes for a minute while it connects would otherwise find the time over, and
take a peer for dead whose answer has come long ago."""

BUNDLED = 5e-3
"""The round trip in seconds from which a connection that loses packets is too slow for long.
Well above `NEAR`, because the listener has measured another value, and must count the peer as
far, too."""

UNSENT = 4 << 20
"""Bytes that the kernel takes before it can send them to a distant peer: enough for as long as a
busy host lets the loop wait."""

FASTEST = 1.25e9
"""Bytes per second. Times a round trip, this is the first window of a new connection."""
MOST_ROOM = 8 << 20
"""The most bytes of that window: what a peer sends for collectives before it is asked."""


class TcpTransport:
    """Makes links over TCP. Addresses are "tcp://10.0.0.1:4711", "tcp://[::1]:4711".

    With `tls` all of them are encrypted, and addresses are "tls://10.0.0.1:4711". Ranks with and
    without it do not talk to each other.
    """

    kind = "tcp"

    def __init__(
        self, tls: TlsContexts | None = None, patience: float = PATIENCE, port: int = 0
    ) -> None:
        """`patience`: see `PATIENCE`, for connections that it makes. `port` to listen at; 0:
        any."""
        self._tls = tls
        self._patience = patience
        self._port = port
        self._scheme = "tcp" if tls is None else "tls"

    async def listen(self, accept: Callable[[Link], None], *, host: str) -> Listener:
        """Listen at `host` (a name or address; its first address is used)."""
        loop = asyncio.get_running_loop()
        found = await look_up(host, self._port, socket.AI_PASSIVE)
        family, kind, proto, _name, where = found[0]
        sock = new_socket(family, kind, proto)
        with closed_on_error(sock):
            sock.setblocking(False)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            try:
                sock.bind(where)
            except OSError as error:
                text = (
                    f"cannot listen for peers at {_endpoint((host, self._port))}: {error.strerror}"
                )
                raise OSError(error.errno, text) from error
            sock.listen(BACKLOG)
            address = f"{self._scheme}://{_endpoint(sock.getsockname())}"

        def admit(connection: socket.socket | Bundle) -> StreamLink:
            return self._link(loop, connection, None, None)

        return BundleListener(loop, sock, address, admit, accept, self._is_far)

    async def dial(self, address: str, receiver: Receiver) -> Link:
        loop = asyncio.get_running_loop()
        to = parse_address(address)
        if to.scheme != self._scheme:
            there, here = ("not ", "all") if to.scheme == "tcp" else ("", "not")
            raise ConnectionError(
                f"{address} is {there}encrypted, this rank's connections are {here}: give all "
                "ranks contexts for both sides (ssl=), or none"
            )
        failure: OSError | None = None
        found = await self._patiently(look_up(to.host, to.port))
        for family, kind, proto, _name, where in found:
            way = (family, kind, proto), where
            try:
                sock = await self._bundled(*way)
                with closed_on_error(sock):
                    link = self._link(loop, sock, receiver, to.host)
            except OSError as error:
                failure = error
                continue
            link.start()
            if isinstance(link, TlsLink):
                with closed_on_error(link):
                    await link.ready()
            return link
        raise failure or OSError(f"{address} has no address to connect to")

    async def _connected(self, kind: tuple[int, int, int], where: Any) -> socket.socket:
        sock = new_socket(*kind)
        with closed_on_error(sock):
            sock.setblocking(False)
            await self._patiently(asyncio.get_running_loop().sock_connect(sock, where))
        return sock

    def _is_far(self, sock: socket.socket) -> bool:
        """Tell whether this connection may be a part of a bundle."""
        trip = round_trip(sock)
        return trip is not None and trip > NEAR

    def _wants_bundle(self, sock: socket.socket) -> bool:
        """Tell whether to use several connections in place of this one."""
        trip = round_trip(sock)
        if trip is None or trip < BUNDLED:
            return False
        _choose_congestion_control(sock, near=False)
        return _congestion_control(sock) in (b"reno", b"cubic") and has_room()

    async def _bundled(self, kind: tuple[int, int, int], where: Any) -> socket.socket | Bundle:
        """Make a connection, or a bundle if that is better and the listener accepts it."""
        first = await self._connected(kind, where)
        socks = [first]

        async def one_more() -> None:
            socks.append(await self._connected(kind, where))

        with contextlib.ExitStack() as made:
            made.callback(_close_all, socks)
            if not self._wants_bundle(first):
                made.pop_all()
                return first
            more = (one_more() for _ in range(PARTS - 1))
            await asyncio.gather(*more, return_exceptions=True)
            if len(socks) == PARTS:
                try:
                    bundle = await self._patiently(join(asyncio.get_running_loop(), socks))
                    made.pop_all()
                    return bundle
                except OSError as error:
                    log.debug("no bundle of connections to %s: %s", where, error)
        return await self._connected(kind, where)

    async def _patiently(self, making: Coroutine[Any, Any, T]) -> T:
        """Return the result of `making`. Raises TimeoutError after `patience` seconds."""
        # `asyncio.timeout` would fire first after a long computation of this rank, though the
        # answer lies in the same turn of the loop. Here the task is checked before the time.
        task = asyncio.ensure_future(making)
        try:
            for _ in range(STEPS):
                if (await asyncio.wait({task}, timeout=self._patience / STEPS))[0]:
                    return task.result()
            raise TimeoutError(f"its system has not answered for {self._patience:g} s")
        finally:
            if task.cancel():  # it releases the socket first
                await asyncio.wait({task})

    def _link(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket | Bundle,
        receiver: Receiver | None,
        host: str | None,
    ) -> StreamLink:
        """Make a link over a connected socket or a bundle to `host` (None: that has connected to
        us).

        Raises OSError if the connection is gone already.
        """
        for one in sock.socks if isinstance(sock, Bundle) else (sock,):
            _set_options(one)
        peer = _endpoint(sock.getpeername())
        return link_over(loop, sock, self._tls, peer_name=peer, receiver=receiver, host=host)


def _close_all(socks: Sequence[socket.socket]) -> None:
    for sock in socks:
        sock.close()


def _endpoint(where: tuple[str, int] | tuple[str, int, int, int]) -> str:
    host, port = where[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _choose_congestion_control(sock: socket.socket, *, near: bool) -> None:
    """Choose Reno for a near peer and BBR for a distant one, unless the system has an unusual
    choice.

    Near: BBR paces what it sends with timers that take longer than such a round trip. CUBIC ends
    its slow start when round trips vary, as they do whenever a process waits for a core, and is
    much like Reno afterwards. Either can cost more than half of the throughput, and as much
    processor time.

    Far: Reno and CUBIC take each lost packet for a full queue, and send less for many round trips.
    With one packet of a hundred lost, BBR is 13 to 40 times as fast as CUBIC. Eight connections of
    CUBIC are 5 to 7 times as fast as one, and several of BBR are no faster. So there is a bundle if
    BBR is not allowed.
    """
    chosen = b"reno" if near else b"bbr"
    usual = {b"bbr", b"cubic", b"reno"} - {chosen}
    if _congestion_control(sock) in usual:
        with contextlib.suppress(OSError):  # not allowed here, or missing
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, chosen)


def _congestion_control(sock: socket.socket) -> bytes:
    """Return its name; b"" if the system does not say."""
    name = getattr(socket, "TCP_CONGESTION", None)
    return b"" if name is None else sock.getsockopt(socket.IPPROTO_TCP, name, 16).rstrip(b"\0")


def _keep_the_queue_here(sock: socket.socket) -> None:
    """Make the kernel take no more than it can send soon.

    On a long way it would otherwise take some MiB that it cannot send before others are
    acknowledged. A grant would wait behind them, and its peer for the grant, though it could
    overtake them in our queue.
    """
    name = getattr(socket, "TCP_NOTSENT_LOWAT", None)
    if name is not None:
        sock.setsockopt(socket.IPPROTO_TCP, name, UNSENT)


def _begin_with_room(sock: socket.socket, trip: float) -> None:
    """Make the kernel offer a window that fills the round trip `trip` from the start.

    A new connection has a window of 64 KiB. The kernel raises it as it sees how much is read in a
    round trip. So the first operations on a long way would wait for the window more than for the
    line. On 50 MB/s with a round trip of 100 ms, the first 4 MiB took twenty round trips. With
    this, only the sender's slow start decides.

    The option sets how many bytes wake a reader. Linux makes room for as many, up to half of
    `net.ipv4.tcp_rmem`, and still grows the buffer by itself, which it does not after `SO_RCVBUF`.
    The room stays when the option is set back.
    """
    with contextlib.suppress(OSError):  # a system without this option keeps its first window
        sock.setsockopt(
            socket.SOL_SOCKET, socket.SO_RCVLOWAT, min(round(trip * FASTEST), MOST_ROOM)
        )
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)


def _set_options(sock: socket.socket) -> None:
    """Raises OSError if the connection is gone already."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    probe_when_idle(sock, SILENCE)
    trip = round_trip(sock)
    if trip is None:
        return
    _choose_congestion_control(sock, near=trip <= NEAR)
    if trip > NEAR:
        _keep_the_queue_here(sock)
        _begin_with_room(sock, trip)
