"""Listening sockets of the coordinator. `OSError`s name the address."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from aiodist.transports.surroundings import closed_on_error, look_up, new_socket
from aiodist.wire.address import Address, is_loopback

BACKLOG = 1024


Resolved = tuple[int, tuple[Any, ...]]
"""(family, address), as sockets take them."""


async def own_address(address: Address) -> Address | None:
    """Return `address` by number if its host is this one; None if it is another host's.

    Of several numbers, prefer one that other hosts can reach, IPv4 first. Raises OSError if the
    name cannot be resolved.
    """
    found = await _resolved(address)
    for family, target in sorted(found, key=lambda one: is_loopback(str(one[1][0]))):
        with contextlib.suppress(OSError):  # another host's, or a family that this host lacks
            probe = new_socket(family)
            try:
                probe.bind((target[0], 0, *target[2:]))
            finally:
                probe.close()
            return Address(address.scheme, str(target[0]), address.port)
    return None


async def _resolved(address: Address) -> list[Resolved]:
    """Resolve the host of `address`, IPv4 first. Raises OSError."""
    found = await look_up(address.host, address.port, socket.AI_PASSIVE)
    ordered = sorted(found, key=lambda info: info[0] != socket.AF_INET)
    return [(int(family), target) for family, _, _, _, target in ordered]


async def bind_tcp(address: Address) -> socket.socket:
    """Bind a socket to the first address that the host of `address` resolves to, IPv4 first."""
    with _naming(address):
        family, target = (await _resolved(address))[0]
        sock = new_socket(family)
        with closed_on_error(sock):
            # Connections of an earlier coordinator may linger in the kernel, and must not keep this
            # one from its port.
            if sys.platform != "win32":  # on Windows a second listener could share the port
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(target)
            sock.listen(BACKLOG)
            sock.setblocking(False)
    return sock


def bind_unix(path: str) -> socket.socket:
    """Bind a socket to `path`, for this user only. Replace a socket file without a listener."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with _naming(Address("unix", path=path)), closed_on_error(sock):
        try:
            sock.bind(path)
        except OSError as error:
            # The file outlives a coordinator that was killed. Only connecting shows whether there
            # is a listener.
            if error.errno != errno.EADDRINUSE or not _is_stale(path):
                raise
            Path(path).unlink()
            sock.bind(path)
        os.chmod(path, 0o600)
        sock.listen(BACKLOG)
        sock.setblocking(False)
    return sock


def _is_stale(path: str) -> bool:
    if not Path(path).is_socket():
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)  # the queue of a listener that hangs may be full
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
    return False


@contextlib.contextmanager
def _naming(address: Address) -> Iterator[None]:
    """Name the address in any OSError."""
    try:
        yield
    except OSError as error:
        text = f"cannot listen on {address}: {error.strerror or error}"
        raise OSError(error.errno, text) from error
