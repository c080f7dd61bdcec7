"""Socket options, and accepting connections. Shared by the TCP and Unix transports."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Callable

from aiodist.transports.base import Link
from aiodist.transports.framed import FramedLink

log = logging.getLogger("aiodist.transport")

BACKLOG = 512
"""Connections that the kernel keeps for us before they are accepted."""

AT_ONCE = 64
"""The most connections accepted in one turn of the loop."""

PAUSE = 0.25
"""Seconds without accepting after the process ran out of file descriptors or memory."""

# accept(2): Linux also reports errors of the network that wait on the new connection.
_LOST = {
    errno.ECONNABORTED, errno.ECONNRESET, errno.EPROTO, errno.ENOPROTOOPT,
    errno.EOPNOTSUPP, errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTDOWN, errno.EHOSTUNREACH,
    getattr(errno, "ENONET", errno.ENETDOWN),  # only Linux has it
}  # fmt: skip
"""Errors of one connection, after which the next one can be accepted."""

_EXHAUSTED = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


def exhaustion(error: BaseException | None) -> OSError | None:
    """Return the OSError in `error` or its causes that tells of exhausted files or memory, or
    None."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _EXHAUSTED:
            return error
        error = error.__cause__
    return None


class Acceptor:
    """Accepts connections of a listening socket, which it owns, until closed.

    `take(sock)` gets each connection, non-blocking, and owns it. If it raises OSError, the
    connection is gone again.

    **Why not `loop.sock_accept`.** A task would wait for each listener, and the loop would turn
    once for each connection. Here dozens are accepted in each turn when 500 ranks join. Also, a
    process without free files would be told of a waiting connection again and again. So the
    listener pauses for a moment, instead of filling log and processor.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        address: str,
        take: Callable[[socket.socket], None],
    ) -> None:
        self.address = address  # for peers
        self._loop = loop
        self._socket = sock  # the one that listens
        self._take = take
        self._resume: asyncio.TimerHandle | None = None  # ends a pause; None: it listens
        self._closed = False  # nothing is accepted any more
        self._is_told = (
            False  # the log tells of missing files, and no connection was accepted since
        )
        self.on_exhausted: Callable[[OSError], None] = lambda error: None
        """Called each time that a connection waits and cannot be accepted because no files are
        left."""
        loop.add_reader(sock.fileno(), self._ready)

    def _ready(self) -> None:
        for _ in range(AT_ONCE):
            if self._closed:
                return
            try:
                sock, _address = self._socket.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                if error.errno in _LOST:
                    continue
                if error.errno not in _EXHAUSTED:
                    log.exception("%s cannot accept connections any more", self.address)
                    self.close()
                    return
                if not self._is_told:
                    self._is_told = True
                    log.error(
                        "%s cannot accept connections for now: %s; trying again every %g s"
                        " (is the limit of open files too low?)",
                        self.address,
                        error,
                        PAUSE,
                    )
                self._loop.remove_reader(self._socket.fileno())
                self._resume = self._loop.call_later(PAUSE, self._again)
                self.on_exhausted(error)
                return
            self._is_told = False
            try:
                sock.setblocking(False)
                self._take(sock)
            except OSError as error:  # gone again before we looked
                log.debug("%s lost a new connection: %s", self.address, error)
                sock.close()

    def _again(self) -> None:
        self._resume = None
        self._loop.add_reader(self._socket.fileno(), self._ready)

    def close(self) -> None:
        """Stop listening. Accepted links stay. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if not self._loop.is_closed():
            if self._resume is not None:
                self._resume.cancel()
            else:
                self._loop.remove_reader(self._socket.fileno())
        self._socket.close()

    def close_in_child(self) -> None:
        """After a fork, in the child: close its copy of the socket without touching the loop."""
        if not self._closed:
            self._closed = True
            self._socket.close()


class SocketListener(Acceptor):
    """Makes links of the connections that it accepts.

    `admit(sock)` makes a link of a new connection, or returns None to close it. `accept(link)` sets
    the link's receiver.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        address: str,
        admit: Callable[[socket.socket], FramedLink | None],
        accept: Callable[[Link], None],
    ) -> None:
        super().__init__(loop, sock, address, self._admitted)
        self._admit = admit
        self._accept = accept

    def _admitted(self, sock: socket.socket) -> None:
        link = self._admit(sock)
        if link is None:
            sock.close()
        else:
            give(link, self._accept, self.address)


def give(link: FramedLink, accept: Callable[[Link], None], address: str) -> None:
    """Hand a new link of the listener at `address` to `accept`, and start it."""
    try:
        accept(link)
    except Exception as error:
        log.exception("%s could not take the connection of %s", address, link.peer_name)
        link.close(error)
    link.start()
