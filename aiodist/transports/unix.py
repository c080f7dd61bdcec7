"""Links over Linux abstract Unix sockets: same host, nothing to leave behind on a disk."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import struct
from collections.abc import Callable

from aiodist.transports.base import Link, Listener, Receiver
from aiodist.transports.sockets import BACKLOG, SocketListener, log
from aiodist.transports.stream import StreamLink

SCHEME = "unix-abstract:"
_CREDENTIALS = struct.Struct("iII")  # struct ucred: pid, uid, gid


class UnixTransport:
    """Makes links over abstract Unix sockets; addresses are "unix-abstract:aiodist-…".

    Both ends check that the other runs as the same user, or as root.
    """

    kind = "unix"

    async def listen(
        self, accept: Callable[[Link], None], *, host: str = "", port: int = 0
    ) -> Listener:
        """Listen at a new random name; `host` and `port` say nothing here."""
        loop = asyncio.get_running_loop()
        name = f"aiodist-{secrets.token_hex(12)}"
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            sock.bind(f"\0{name}")
            sock.listen(BACKLOG)
        except BaseException:
            sock.close()
            raise

        def admit(connection: socket.socket) -> StreamLink | None:
            try:
                return _link(loop, connection, None)
            except PermissionError as error:
                log.warning("unix-abstract:%s refused a connection: %s", name, error)
                return None

        return SocketListener(loop, sock, SCHEME + name, admit, accept)

    async def dial(self, address: str, receiver: Receiver) -> Link:
        """Connect. Raises PermissionError where the listener is another user's."""
        if not address.startswith(SCHEME):
            raise ValueError(f"an address looks like {SCHEME}aiodist-…, not {address!r}")
        loop = asyncio.get_running_loop()
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            pause = 0.001
            while True:
                # Not `loop.sock_connect`: a full backlog is EAGAIN here, after which a socket
                # counts as writable though it is not connected.
                try:
                    sock.connect(f"\0{address.removeprefix(SCHEME)}")
                    break
                except BlockingIOError:
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, 0.1)
            link = _link(loop, sock, receiver)
        except BaseException:
            sock.close()
            raise
        link.start()
        return link


def _link(
    loop: asyncio.AbstractEventLoop, sock: socket.socket, receiver: Receiver | None
) -> StreamLink:
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _gid = _CREDENTIALS.unpack(raw)
    if uid not in (os.getuid(), 0):
        raise PermissionError(
            f"process {pid} runs as user {uid}: expected user {os.getuid()}, as this one, or root"
        )
    return StreamLink(loop, sock, kind="unix", peer_name=f"unix:pid {pid}", receiver=receiver)
