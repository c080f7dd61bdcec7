"""How the ranks of a process group find each other: through the store that torch gives them.

Rank 0 has a coordinator beside it, and says in the store where it is and with which token it lets
others in. So every way to rendezvous that torch has (``env://``, ``tcp://``, ``file://``, torchrun,
a store of one's own) serves aiodist, too.

Where the launcher has a coordinator, as `aiodist run` does, the group meets there: what its ranks
do is then seen where the launcher's status is, and its members do not depend on rank 0.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Mapping
from typing import Any, NamedTuple

from aiodist.wire.address import is_loopback


class Meeting(NamedTuple):
    """Where a group meets: at which coordinator, under which name. `token`: what that wants to be
    shown; None: what AIODIST_TOKEN says, which is nothing to be written into a store."""

    address: str
    token: str | None
    group: str


def at_launcher(environ: Mapping[str, str], name: str) -> Meeting | None:
    """A meeting at the coordinator of the launcher, which says where that is, and which run this
    is. None: it has none."""
    address = environ.get("AIODIST_ADDRESS")
    if not address or not environ.get("AIODIST_RUN_ID"):
        return None
    # A name of its own: a program may make its default group again, and another run that uses that
    # coordinator has one, too.
    return Meeting(address, None, f"torch {name} {secrets.token_hex(4)}")


def publish(store: Any, rank: int, meeting: Meeting) -> None:
    """Say in `store` where the group meets."""
    store.set(_key(store, rank), "\n".join([meeting.address, meeting.token or "", meeting.group]))


def look_up(store: Any, rank: int) -> Meeting:
    """What rank 0 has published; waits for it as long as the store does."""
    address, token, group = store.get(_key(store, rank)).decode().split("\n", 2)
    return Meeting(address, token or None, group)


def _key(store: Any, rank: int) -> str:
    """Where rank 0 publishes the next meeting of its ranks.

    A store may outlive a group (torchrun's does): what it says of the last one is nothing for the
    next. Each rank counts its meetings, in the store, and they all count alike.
    """
    # By rank, for a rank that failed to join the last meeting and one that did not would else count
    # two for one meeting, and read what is said of another.
    return f"aiodist/{store.add(f'aiodist/meetings/{rank}', 1)}"


def new_token() -> str:
    """A secret of one group."""
    return secrets.token_hex(16)


def own_host(store: Any) -> tuple[str, str]:
    """(address to listen at, address to be dialled at) of this host, for who meets at `store`.

    Where the store is a TCPStore, peers reach this host the way it reaches the store; else by its
    name, if that is known and leads beyond the host.
    """
    store = underlying(store)
    host = _towards(store.host, store.port) if is_tcp(store) else _named(socket.gethostname())
    if is_loopback(host):
        return host, host
    return ("::" if ":" in host else "0.0.0.0"), host


def is_tcp(store: Any) -> bool:
    """Whether it is a TCPStore, which one process serves and all others call."""
    store = underlying(store)
    return hasattr(store, "host") and hasattr(store, "port")


def underlying(store: Any) -> Any:
    """The store within those that torch wraps around it."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store


def _towards(host: str, port: int) -> str:
    """The own address on the way to another; nothing is sent."""
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
