"""Links over Linux abstract Unix sockets: on one host, leaving nothing on a disk.

An abstract name is in no file system. It goes with its socket, even after a crash, so nothing has
to be cleaned up. But such a name has no permissions: any process in the same network namespace may
connect. So names are random, and both sides ask the kernel for the user at the other end, which
cannot be forged.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from collections.abc import Callable

from aiodist.transports.base import Link, Listener, Receiver
from aiodist.transports.processes import peer_pid
from aiodist.transports.sockets import BACKLOG, SocketListener, log
from aiodist.transports.sparing import Sparing
from aiodist.transports.stream import StreamLink
from aiodist.transports.surroundings import closed_on_error

SCHEME = "unix-abstract:"


class UnixTransport:
    """Makes links over abstract Unix sockets. Addresses are "unix-abstract:aiodist-…".

    Both ends check that the other runs as the same user.
    """

    kind = "unix"

    async def listen(self, accept: Callable[[Link], None], *, host: str = "") -> Listener:
        """Listen at a new random name. `host` is ignored."""
        loop = asyncio.get_running_loop()
        user = os.geteuid()
        sock, address = bound_socket("aiodist", SCHEME)
        sparing = Sparing(log)

        def admit(connection: socket.socket) -> StreamLink | None:
            try:
                return _link(loop, connection, None, user)
            except PermissionError as error:
                sparing.warning("refused", "%s refused a connection: %s", address, error)
                return None

        return SocketListener(loop, sock, address, admit, accept)

    async def dial(self, address: str, receiver: Receiver) -> Link:
        """Connect. Raises PermissionError if the listener is another user's."""
        loop = asyncio.get_running_loop()
        sock = await connected_socket(address, SCHEME)
        with closed_on_error(sock):
            link = _link(loop, sock, receiver, os.geteuid())
        link.start()
        return link


def bound_socket(name: str, scheme: str) -> tuple[socket.socket, str]:
    """Make a non-blocking socket that listens at a new random abstract name. Returns it and its
    address.

    The name begins with `name`, and the address with `scheme`.
    """
    name = f"{name}-{secrets.token_hex(12)}"
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with closed_on_error(sock):
        sock.setblocking(False)
        sock.bind(f"\0{name}")
        sock.listen(BACKLOG)
    return sock, scheme + name


async def connected_socket(address: str, scheme: str) -> socket.socket:
    """Connect a non-blocking socket to an `address` of `bound_socket`.

    Raises OSError, and ValueError for an address of another scheme.
    """
    if not address.startswith(scheme):
        raise ValueError(f"an address looks like {scheme}aiodist-…, not {address!r}")
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with closed_on_error(sock):
        sock.setblocking(False)
        pause = 0.001
        while True:
            # Not `loop.sock_connect`: a full backlog is EAGAIN here, after which a socket counts as
            # writable though it is not connected.
            try:
                sock.connect(f"\0{address.removeprefix(scheme)}")
                return sock
            except BlockingIOError:
                await asyncio.sleep(pause)
                pause = min(2 * pause, 0.1)


def _link(
    loop: asyncio.AbstractEventLoop, sock: socket.socket, receiver: Receiver | None, user: int
) -> StreamLink:
    name = f"unix:pid {peer_pid(sock, user)}"
    return StreamLink(loop, sock, kind="unix", peer_name=name, receiver=receiver)
