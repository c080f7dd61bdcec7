"""How the ranks of a process group find each other: through the store that torch gives them.

Rank 0 has a coordinator beside it, and says in the store where it is and with which token it lets
others in. So every way to rendezvous that torch has (``env://``, ``tcp://``, ``file://``, torchrun,
a store of one's own) serves aiodist, too.
"""

from __future__ import annotations

import secrets
import socket
from typing import Any

from aiodist.wire.address import is_loopback


def publish(store: Any, rank: int, address: str, token: str) -> None:
    """Say in `store` where the coordinator is, and what it wants to be shown."""
    store.set(_key(store, rank), f"{address} {token}")


def look_up(store: Any, rank: int) -> tuple[str, str]:
    """The address and token that rank 0 has published; waits for it as long as the store does."""
    address, _, token = store.get(_key(store, rank)).decode().partition(" ")
    return address, token


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
    store = _underlying(store)
    host = _towards(store.host, store.port) if is_tcp(store) else _named(socket.gethostname())
    if is_loopback(host):
        return host, host
    return ("::" if ":" in host else "0.0.0.0"), host


def is_tcp(store: Any) -> bool:
    """Whether it is a TCPStore, which one process serves and all others call."""
    store = _underlying(store)
    return hasattr(store, "host") and hasattr(store, "port")


def _underlying(store: Any) -> Any:
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
