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
"""A family, and an address of it as sockets take it."""


async def own_address(address: Address) -> Address | None:
    """`address` by number, where its host is this one: of several numbers, one that other hosts can
    reach if there is one, IPv4 first. None: it is another host's. Raises OSError for a name that
    cannot be resolved."""
    found = await _resolved(address)
    for family, target in sorted(found, key=lambda one: is_loopback(str(one[1][0]))):
        with contextlib.suppress(OSError):  # another host's, or there is none of that family here
            probe = new_socket(family)
            try:
                probe.bind((target[0], 0, *target[2:]))
            finally:
                probe.close()
            return Address(address.scheme, str(target[0]), address.port)
    return None


async def _resolved(address: Address) -> list[Resolved]:
    """What the host of `address` resolves to, IPv4 first. Raises OSError."""
    found = await look_up(address.host, address.port, socket.AI_PASSIVE)
    ordered = sorted(found, key=lambda info: info[0] != socket.AF_INET)
    return [(int(family), target) for family, _, _, _, target in ordered]


async def bind_tcp(address: Address) -> socket.socket:
    """A socket bound to the first address that the host of `address` resolves to, IPv4 first."""
    with _naming(address):
        family, target = (await _resolved(address))[0]
        sock = new_socket(family)
        with closed_on_error(sock):
            # Where a coordinator ended a moment ago, connections of it still linger in the kernel,
            # and the next one must not be kept from its port by them.
            if sys.platform != "win32":  # there it would let a second listener share the port
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(target)
            sock.listen(BACKLOG)
            sock.setblocking(False)
    return sock


def bind_unix(path: str) -> socket.socket:
    """A socket bound to `path`, for this user only. A socket file whose listener is gone is
    replaced."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with _naming(Address("unix", path=path)), closed_on_error(sock):
        try:
            sock.bind(path)
        except OSError as error:
            # The file outlives a coordinator that was killed. Whether anybody listens is shown by
            # connecting: nothing else tells a live socket from a dead one.
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
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
    return False


@contextlib.contextmanager
def _naming(address: Address) -> Iterator[None]:
    """Whatever fails says where."""
    try:
        yield
    except OSError as error:
        text = f"cannot listen on {address}: {error.strerror or error}"
        raise OSError(error.errno, text) from error
