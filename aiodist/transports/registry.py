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
from aiodist.transports.surroundings import is_virtual
from aiodist.transports.tcp import PATIENCE, TcpTransport
from aiodist.transports.tls import TlsContexts
from aiodist.transports.unix import UnixTransport

_RUN = secrets.token_hex(8)


@dataclass(frozen=True, slots=True)
class Contact:
    """How a rank can be reached.

    `process` is the id of its process and event loop, `host` of its host and network namespace, and
    `user` of its user. `addresses` has its addresses by transport. `allowed` are the transports it
    may use.
    """

    process: str
    host: str
    addresses: Mapping[str, str] = field(default_factory=dict)
    allowed: tuple[str, ...] = ()
    user: str = ""


@dataclass(frozen=True, slots=True)
class _TransportKind:
    make: Callable[[], Transport]
    reaches: Callable[[Contact, Contact], bool]
    unavailable: Callable[[], str | None] = lambda: None
    """Why it cannot be used here, or None."""


def _no_abstract_sockets() -> str | None:
    if sys.platform != "linux":
        return f"this is {sys.platform}, not Linux"
    return None


def _is_simulated() -> bool:
    """Tell whether real files cannot be waited for here, because time is virtual."""
    try:
        return is_virtual(asyncio.get_running_loop())
    except RuntimeError:
        return False  # no loop runs


def _share_a_host(own: Contact, peer: Contact) -> bool:
    """Tell whether the kernel lets them trust each other there. Both sides decide alike."""
    return own.host == peer.host and own.user == peer.user


# In order of preference.
_KINDS: Mapping[str, _TransportKind] = {
    "inproc": _TransportKind(InprocTransport, lambda own, peer: own.process == peer.process),
    "shm": _TransportKind(ShmTransport, _share_a_host, unsupported_reason),
    "unix": _TransportKind(UnixTransport, _share_a_host, _no_abstract_sockets),
    "tcp": _TransportKind(TcpTransport, lambda own, peer: True),
}


DEVICES = "cuda_ipc"
"""Named as a transport, though ranks read each other's devices and send nothing."""


def names_of(names: str | Iterable[str] | None) -> list[str]:
    """Return what `choose` takes, as a list; all that this loop can use for None."""
    if isinstance(names, str):
        return [name.strip() for name in names.split(",")]
    if names is None:
        # A loop of virtual time cannot wait for real files, unless a test asks for them.
        return [*_KINDS, DEVICES] if not _is_simulated() else ["inproc", "tcp", DEVICES]
    return list(names)


def allows_devices(names: str | Iterable[str] | None) -> bool:
    """Tell whether `names` allow ranks to read each other's devices."""
    return DEVICES in names_of(names)


def choose(names: str | Iterable[str] | None) -> tuple[str, ...]:
    """Return the transports that `names` allow here, best first.

    `names` is None (all), names, or a string of names with commas. Raises ValueError for unknown
    names, and if none is left.
    """
    given = names_of(names)
    wanted = [name for name in given if name != DEVICES]
    known = ", ".join(repr(name) for name in (*_KINDS, DEVICES))
    for name in wanted:
        if name not in _KINDS:
            raise ValueError(f"there is no transport {name!r}: transports= takes {known}")
    # What the program allows and what the machine has are two questions. If shared memory is
    # allowed but missing, the rank uses the next best, with a line in the log. It is an error only
    # if none is left. So one setting works for all machines of a job.
    missing = {name: reason for name in wanted if (reason := _KINDS[name].unavailable())}
    if "shm" in missing:
        _say_why(missing["shm"])
    chosen = tuple(name for name in _KINDS if name in wanted and name not in missing)
    if not chosen:
        if DEVICES in given:
            missing[DEVICES] = "it is for tensors on a GPU only"
        reasons = "".join(f", {name!r}: {reason}" for name, reason in missing.items())
        raise ValueError(
            f"transports={tuple(given)!r} leaves no transport here{reasons}; allow 'tcp'"
        )
    return chosen


@functools.cache  # once a process
def _say_why(reason: str) -> None:
    log.info("ranks of this host do not share memory, they use sockets: %s", reason)


def make(
    name: str, tls: TlsContexts | None = None, patience: float = PATIENCE, port: int = 0
) -> Transport:
    """Make a transport, one of those that `choose` gave.

    For connections that leave the host: `tls`, the seconds after which a silent system is out of
    reach (`patience`), and the `port` to listen at (0: any).
    """
    return TcpTransport(tls, patience, port) if name == "tcp" else _KINDS[name].make()


def candidates(own: Contact, peer: Contact) -> list[tuple[str, str]]:
    """Return the ways from `own` to `peer`, best first: (transport, the peer's address)."""
    return [
        (name, peer.addresses[name])
        for name, kind in _KINDS.items()
        if name in own.allowed
        and name in peer.allowed
        and name in peer.addresses
        and kind.reaches(own, peer)
    ]


def process_id(loop: asyncio.AbstractEventLoop) -> str:
    """Return an id of this process and `loop`, unlike any other anywhere."""
    return f"{_RUN}-{os.getpid()}-{id(loop):x}"


def host_id() -> str:
    """Return an id of this host and network namespace. Outside of Linux: of the host.

    Processes with the same id can meet at an abstract Unix socket.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}-{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return f"{uuid.getnode():012x}-{socket.gethostname()}"
