"""Links through shared memory, for ranks of one host.

The dialer connects to an abstract Unix socket and passes a segment of its own. The listener maps it
and answers with one of its own. A side that cannot do so ends the connection, and the dialer uses
another transport.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable
from contextlib import closing

from aiodist.buffers.segment import Segment
from aiodist.errors import ProtocolError
from aiodist.transports.base import Link, Listener, Receiver
from aiodist.transports.handover import GREETING_BYTES, Callers, mapped, pass_on, received
from aiodist.transports.processes import peer_pid
from aiodist.transports.shm_link import ShmLink
from aiodist.transports.shm_rings import SEGMENT
from aiodist.transports.sockets import give, log
from aiodist.transports.surroundings import closed_on_error
from aiodist.transports.unix import bound_socket, connected_socket

SCHEME = "shm:"


class ShmTransport:
    """Makes links through shared memory. Addresses are "shm:aiodist-…".

    Both ends check that the other runs as the same user. A link takes one file descriptor on each
    side, and two segments of `SEGMENT` bytes, one of each side.
    """

    kind = "shm"

    async def listen(self, accept: Callable[[Link], None], *, host: str = "") -> Listener:
        """Listen at a new random name. `host` is ignored."""
        loop = asyncio.get_running_loop()
        return ShmListener(loop, bound_socket("aiodist", SCHEME), accept)

    async def dial(self, address: str, receiver: Receiver) -> Link:
        """Connect. Raises PermissionError if the listener is another user's, and OSError if memory
        cannot be shared."""
        loop = asyncio.get_running_loop()
        sock = await connected_socket(address, SCHEME)
        with closed_on_error(sock):
            pid = peer_pid(sock, os.geteuid())
            try:
                with closing(_own()) as own:
                    pass_on(sock, own)
                    with closing(await received(loop, sock, SEGMENT)) as peer:
                        link = _link(loop, sock, pid, own, peer)
            except (OSError, ProtocolError) as error:
                _say_why(pid, error)
                raise ConnectionError(f"no shared memory with process {pid}: {error}") from error
        link.receiver = receiver
        link.start()
        return link


class ShmListener(Callers):
    """Makes links of accepted connections, once their segments are exchanged."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        listening: tuple[socket.socket, str],
        accept: Callable[[Link], None],
    ) -> None:
        super().__init__(loop, listening, GREETING_BYTES, 1, self._passed)
        self._accept = accept

    def _passed(self, sock: socket.socket, pid: int, data: bytes, fds: list[int]) -> None:
        try:
            # Each side maps what the other has made, and gives its own::
            #
            #     dialer     own segment ───────────────────> maps it, makes its own
            #     maps it  <─────────────────────────────────  passes it on, and has the link
            #
            # The listener has the link before the dialer can send frames. If it cannot map or make
            # a segment, it ends the connection, and the dialer uses another transport.
            with closing(mapped(data, fds, SEGMENT)) as peer, closing(_own()) as own:
                pass_on(sock, own)
                link = _link(self._loop, sock, pid, own, peer)
        except (OSError, ProtocolError) as error:
            _say_why(pid, error)
            sock.close()
            return
        give(link, self._accept, self.address)


def _own() -> Segment:
    return Segment.create(SEGMENT, "aiodist-link")


def _say_why(pid: int, error: Exception) -> None:
    """Log, on the side that failed, why there is no link."""
    # No warning for a broken connection, because ranks that dial each other at once, or leave,
    # cause it, too.
    level = logging.DEBUG if isinstance(error, ConnectionError) else logging.WARNING
    log.log(level, "no shared memory with process %d, other transports are tried: %s", pid, error)


def _link(
    loop: asyncio.AbstractEventLoop, sock: socket.socket, pid: int, own: Segment, peer: Segment
) -> ShmLink:
    """Make a link. It keeps what it needs of the segments, so these may be closed."""
    return ShmLink(loop, sock, own.memory, peer.memory, peer_name=f"shm:pid {pid}", pid=pid)
