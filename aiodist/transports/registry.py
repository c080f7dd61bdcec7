"""Which transports there are, and which of them lead from one rank to another."""

from __future__ import annotations

import asyncio
import functools
import os
import secrets
import socket
import sys
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from aiodist.buffers.segment import unsupported_reason
from aiodist.transports.base import Transport
from aiodist.transports.inproc import InprocTransport
from aiodist.transports.link import log
from aiodist.transports.shm import ShmTransport
from aiodist.transports.tcp import PATIENCE, TcpTransport
from aiodist.transports.tls import TlsContexts
from aiodist.transports.unix import UnixTransport

_RUN = secrets.token_hex(8)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a rank can be reached.

    `process` names its process and event loop, `host` its host and network namespace, `user` its
    user there; `addresses` says where it listens, by transport; `allowed` are the transports it may
    use.
    """

    process: str
    host: str
    addresses: Mapping[str, str] = field(default_factory=dict)
    allowed: tuple[str, ...] = ()
    user: str = ""


@dataclass(frozen=True, slots=True)
class _Kind:
    make: Callable[[], Transport]
    reaches: Callable[[Endpoint, Endpoint], bool]
    unavailable: Callable[[], str | None] = lambda: None
    """Why it cannot be used here, or None."""


def _no_abstract_sockets() -> str | None:
    return None if sys.platform == "linux" else f"this is {sys.platform}, not Linux"


def _share_a_host(own: Endpoint, peer: Endpoint) -> bool:
    """Whether the kernel lets them trust each other there. Both sides decide alike."""
    return own.host == peer.host and own.user == peer.user


# In order of preference.
_KINDS: Mapping[str, _Kind] = {
    "inproc": _Kind(InprocTransport, lambda own, peer: own.process == peer.process),
    "shm": _Kind(ShmTransport, _share_a_host, unsupported_reason),
    "unix": _Kind(UnixTransport, _share_a_host, _no_abstract_sockets),
    "tcp": _Kind(TcpTransport, lambda own, peer: True),
}


DEVICES = "cuda_ipc"
"""Named as a transport, though it is none between ranks: they read each other's devices."""


def names_of(names: str | Iterable[str] | None) -> list[str]:
    """What `choose` takes, as a list; all for None."""
    if isinstance(names, str):
        return [name.strip() for name in names.split(",")]
    return [*_KINDS, DEVICES] if names is None else list(names)


def allows_devices(names: str | Iterable[str] | None) -> bool:
    """Whether `names`, as `choose` takes them, allow ranks to read each other's devices."""
    return DEVICES in names_of(names)


def choose(names: str | Iterable[str] | None) -> tuple[str, ...]:
    """The transports that `names` allows here, best first: all for None, else a tuple of names
    (or a string of names with commas between). Raises ValueError for unknown names, and where
    none is left."""
    wanted = [name for name in names_of(names) if name != DEVICES]
    known = ", ".join(repr(name) for name in (*_KINDS, DEVICES))
    for name in wanted:
        if name not in _KINDS:
            raise ValueError(f"there is no transport {name!r}: transports= takes {known}")
    # What the program allows and what the machine has are two questions: who asks for shared memory
    # where there is none gets the next best, with a line in the log, and an error only where
    # nothing is left. So one setting does for all machines of a job.
    missing = {name: reason for name in wanted if (reason := _KINDS[name].unavailable())}
    if "shm" in missing:
        _say_why(missing["shm"])
    chosen = tuple(name for name in _KINDS if name in wanted and name not in missing)
    if not chosen:
        reasons = "".join(f", {name!r}: {reason}" for name, reason in missing.items())
        raise ValueError(
            f"transports={tuple(wanted)!r} leaves no transport here{reasons}; allow 'tcp'"
        )
    return chosen


@functools.cache  # once a process
def _say_why(reason: str) -> None:
    log.info("ranks of this host do not share memory, they use sockets: %s", reason)


def make(
    name: str, tls: TlsContexts | None = None, patience: float = PATIENCE, port: int = 0
) -> Transport:
    """A transport by its name, one of those that `choose` gave. For what leaves the host: `tls`,
    after how many seconds (`patience`) a system that does not answer is out of reach, and at which
    `port` it listens (0: any)."""
    return TcpTransport(tls, patience, port) if name == "tcp" else _KINDS[name].make()


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
