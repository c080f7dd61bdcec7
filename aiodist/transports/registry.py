"""Which transports there are, and which of them lead from one rank to another."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import sys
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from aiodist.transports.base import Transport
from aiodist.transports.inproc import InprocTransport
from aiodist.transports.tcp import TcpTransport
from aiodist.transports.unix import UnixTransport

_RUN = secrets.token_hex(8)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a rank can be reached.

    `process` names its process and event loop, `host` its host and network namespace;
    `addresses` says where it listens, by transport; `allowed` are the transports it may use.
    """

    process: str
    host: str
    addresses: Mapping[str, str] = field(default_factory=dict)
    allowed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Kind:
    make: Callable[[], Transport]
    reaches: Callable[[Endpoint, Endpoint], bool]
    available: bool = True


# In order of preference.
_KINDS: Mapping[str, _Kind] = {
    "inproc": _Kind(InprocTransport, lambda own, peer: own.process == peer.process),
    "unix": _Kind(
        UnixTransport, lambda own, peer: own.host == peer.host, sys.platform.startswith("linux")
    ),
    "tcp": _Kind(TcpTransport, lambda own, peer: True),
}


def choose(names: str | Iterable[str] | None) -> tuple[str, ...]:
    """The transports that `names` allows here, best first: all for None, else a tuple of names
    (or a string of names with commas between). Raises ValueError for unknown names, and where
    none is left."""
    if names is None:
        return tuple(name for name, kind in _KINDS.items() if kind.available)
    if isinstance(names, str):
        names = [name.strip() for name in names.split(",")]
    wanted = list(names)
    known = ", ".join(repr(name) for name in _KINDS)
    for name in wanted:
        if name not in _KINDS:
            raise ValueError(f"there is no transport {name!r}: transports= takes {known}")
    chosen = tuple(name for name, kind in _KINDS.items() if kind.available and name in wanted)
    if not chosen:
        raise ValueError(
            f"transports={tuple(wanted)!r} leaves no transport on this platform: allow 'tcp'"
        )
    return chosen


def make(name: str) -> Transport:
    """A transport by its name, one of those that `choose` gave."""
    return _KINDS[name].make()


def candidates(own: Endpoint, peer: Endpoint) -> list[tuple[str, str]]:
    """Ways from `own` to `peer`, best first: (transport, the peer's address)."""
    return [
        (name, peer.addresses[name])
        for name, kind in _KINDS.items()
        if name in own.allowed
        and name in peer.allowed
        and name in peer.addresses
        and kind.reaches(own, peer)
    ]


def process_id(loop: asyncio.AbstractEventLoop) -> str:
    """Names this process and `loop`, unlike any other anywhere."""
    return f"{_RUN}-{os.getpid()}-{id(loop):x}"


def host_id() -> str:
    """Names this host and network namespace: processes with the same one can meet at an abstract
    Unix socket. Elsewhere than on Linux: the host alone."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}-{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return f"{uuid.getnode():012x}-{socket.gethostname()}"
