"""How the ranks of a process group find each other: through the store that torch gives them.

Rank 0 runs a coordinator, and writes its address and token into the store. So all of torch's ways
to meet work with aiodist, too: ``env://``, ``tcp://``, ``file://``, torchrun, a store of your own.

If the launcher has a coordinator, as `aiodist run` does, the group meets there. The launcher's
status then shows what its ranks do, and its members do not depend on rank 0.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Mapping
from typing import Any, NamedTuple

from aiodist.wire.address import is_loopback


class Meeting(NamedTuple):
    """The meeting point of a group: the coordinator's address, and the group's name there.

    `token` is for that coordinator. None: AIODIST_TOKEN, which must not be written into a store.
    """

    address: str
    token: str | None
    group: str


def at_launcher(environ: Mapping[str, str], name: str) -> Meeting | None:
    """Return a meeting at the launcher's coordinator; None if the launcher has none."""
    address = environ.get("AIODIST_ADDRESS")
    if not address or not environ.get("AIODIST_RUN_ID"):
        return None
    # A name of its own, because a program may make its default group again, and another run with
    # that coordinator has one, too.
    return Meeting(address, None, f"torch {name} {secrets.token_hex(4)}")


def publish(store: Any, rank: int, meeting: Meeting) -> None:
    """Write the meeting point into `store`."""
    store.set(_key(store, rank), "\n".join([meeting.address, meeting.token or "", meeting.group]))


def look_up(store: Any, rank: int) -> Meeting:
    """Return what rank 0 has published. Waits for it as long as the store does."""
    address, token, group = store.get(_key(store, rank)).decode().split("\n", 2)
    return Meeting(address, token or None, group)


def _key(store: Any, rank: int) -> str:
    """Return the key at which rank 0 publishes the next meeting.

    A store may outlive a group, as torchrun's does, and its entry for the last meeting is useless
    for the next. So each rank counts its meetings in the store, and all count alike.
    """
    # By rank. Otherwise a rank that failed to join the last meeting and another one would count two
    # for one meeting.
    return f"aiodist/{store.add(f'aiodist/meetings/{rank}', 1)}"


def new_token() -> str:
    """Return a new secret for one group."""
    return secrets.token_hex(16)


def own_host(store: Any) -> tuple[str, str]:
    """Return (address to listen at, address to dial) of this host, for ranks that meet at `store`.

    With a TCPStore, peers reach this host the way it reaches the store, or by the store's name if
    that leads to loopback here. Otherwise they use this host's name, if that leads beyond it.
    """
    store = underlying(store)
    host = _towards(store.host, store.port) if is_tcp(store) else _named(socket.gethostname())
    everywhere = "::" if ":" in host else "0.0.0.0"
    if not is_loopback(host):
        return everywhere, host
    if is_tcp(store) and not is_loopback(store.host):
        # Debian has an entry 127.0.1.1 for the host's own name. On other hosts the name leads here.
        return everywhere, store.host
    return host, host


def is_tcp(store: Any) -> bool:
    """Tell whether it is a TCPStore, which one process serves and all others call."""
    store = underlying(store)
    return hasattr(store, "host") and hasattr(store, "port")


def underlying(store: Any) -> Any:
    """Return the store inside those that torch wraps around it."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store


def _towards(host: str, port: int) -> str:
    """Return this host's address on the way to another host. Nothing is sent."""
    for family, kind, protocol, _, address in _resolved(host, port):
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.connect(address)
            except OSError:
                continue
            found: str = probe.getsockname()[0]
            return found
    return "127.0.0.1"


def _named(name: str) -> str:
    addresses: list[str] = [str(address[0]) for *_, address in _resolved(name, 0)]
    beyond = [address for address in addresses if not is_loopback(address)]
    return beyond[0] if beyond else "127.0.0.1"


def _resolved(host: str, port: int) -> list[Any]:
    try:
        return [*socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)]
    except OSError:  # no such name here
        return []
