"""Links through shared memory, for ranks of one host.

Whoever dials connects to an abstract Unix socket and passes a segment of its own; the listener
maps it and answers with one of its own. A side that cannot do so ends the connection, and the
dialler takes another transport.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct
from collections.abc import Callable
from contextlib import closing

from aiodist.buffers.segment import Segment
from aiodist.errors import ProtocolError
from aiodist.transports.base import Link, Listener, Receiver
from aiodist.transports.handover import Caller, readable, receive_fds
from aiodist.transports.processes import peer_pid
from aiodist.transports.shm_link import ShmLink
from aiodist.transports.shm_rings import SEGMENT
from aiodist.transports.sockets import Acceptor, give, log
from aiodist.transports.sparing import Sparing
from aiodist.transports.unix import bound_socket, connected_socket

SCHEME = "shm:"

VERSION = 1
"""Of the segments' layout, and of the set-up."""

_GREETING = struct.Struct(">11sBQ")
_HELLO = _GREETING.pack(b"aiodist-shm", VERSION, SEGMENT)
"""What comes with a segment."""


class ShmTransport:
    """Makes links through shared memory; addresses are "shm:aiodist-…".

    Both ends check that the other runs as the same user. A link takes three file
    descriptors and two segments of `SEGMENT` bytes, one of each side.
    """

    kind = "shm"

    async def listen(
        self, accept: Callable[[Link], None], *, host: str = "", port: int = 0
    ) -> Listener:
        """Listen at a new random name; `host` and `port` say nothing here."""
        loop = asyncio.get_running_loop()
        sock, address = bound_socket("aiodist", SCHEME)
        return ShmListener(loop, sock, address, accept)

    async def dial(self, address: str, receiver: Receiver) -> Link:
        """Connect. Raises PermissionError where the listener is another user's, and OSError too
        where memory cannot be shared."""
        loop = asyncio.get_running_loop()
        sock = await connected_socket(address, SCHEME)
        try:
            pid = peer_pid(sock, os.geteuid())
            try:
                with closing(_offer(sock)) as own:
                    await readable(loop, sock)
                    with closing(_accepted(*receive_fds(sock, len(_HELLO), 1))) as peer:
                        link = _link(loop, sock, pid, own, peer)
            except (OSError, ProtocolError) as error:
                _say_why(pid, error)
                raise ConnectionError(f"no shared memory with process {pid}: {error}") from error
        except BaseException:
            sock.close()
            raise
        link.receiver = receiver
        link.start()
        return link


class ShmListener(Acceptor):
    """Makes links of the connections that it accepts, once their segments are exchanged."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        address: str,
        accept: Callable[[Link], None],
    ) -> None:
        super().__init__(loop, sock, address, self._called)
        self._user = os.geteuid()
        self._accept = accept
        self._callers: set[Caller] = set()
        self._sparing = Sparing(log)

    def _called(self, sock: socket.socket) -> None:
        try:
            pid = peer_pid(sock, self._user)
        except PermissionError as error:
            self._sparing.warning("refused", "%s refused a connection: %s", self.address, error)
            sock.close()
            return
        self._callers.add(Caller(self._loop, sock, pid, len(_HELLO), 1, self._heard))

    def _heard(self, caller: Caller, data: bytes, fds: list[int]) -> None:
        self._callers.discard(caller)
        sock = caller.release()
        try:
            with closing(_accepted(data, fds)) as peer, closing(_offer(sock)) as own:
                link = _link(self._loop, sock, caller.pid, own, peer)
        except (OSError, ProtocolError) as error:
            _say_why(caller.pid, error)
            sock.close()
            return
        give(link, self._accept, self.address)

    def close(self) -> None:
        super().close()
        for caller in self._callers:
            caller.release().close()
        self._callers.clear()

    def close_in_child(self) -> None:
        super().close_in_child()
        for caller in self._callers:
            caller.sock.close()
        self._callers.clear()


def _offer(sock: socket.socket) -> Segment:
    """Make a segment, and pass it on. Raises OSError."""
    segment = Segment.create(SEGMENT, "aiodist-link")
    try:
        socket.send_fds(sock, [_HELLO], [segment.fd])
    except BaseException:
        segment.close()
        raise
    return segment


def _accepted(data: bytes, fds: list[int]) -> Segment:
    """Map the peer's segment, which came with `data`. Raises OSError, ProtocolError."""
    if not data:
        raise ConnectionResetError(
            "it ended the set-up (it went away, or could not share memory: then its log says why)"
        )
    if data != _HELLO or len(fds) != 1:
        for fd in fds:
            os.close(fd)
        raise ProtocolError(
            f"expected a segment and {_HELLO!r}, got {len(fds)} descriptors and {data!r}: is it"
            " another version of aiodist?"
        )
    return Segment.attach(fds[0], SEGMENT)


def _say_why(pid: int, error: Exception) -> None:
    """Log, on the side that failed, why there is no link."""
    # Ranks that dial each other at once, or leave, end the set-up too: nothing to warn of.
    level = logging.DEBUG if isinstance(error, ConnectionError) else logging.WARNING
    log.log(level, "no shared memory with process %d, other transports are tried: %s", pid, error)


def _link(
    loop: asyncio.AbstractEventLoop, sock: socket.socket, pid: int, own: Segment, peer: Segment
) -> ShmLink:
    """A link, which keeps what it needs of the segments: they may be closed."""
    return ShmLink(loop, sock, own.memory, peer.memory, peer_name=f"shm:pid {pid}")
