"""How the ranks of a group reach each other: listeners, advertised addresses, and dialling.

A rank advertises addresses when it joins: those of its listeners, and two that name its process and
its user. By the last two, peers see whether they can share memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from aiodist.coordinator.exposure import Guard
from aiodist.rank.actor import MemoryReach
from aiodist.schedules.costs import said_trip
from aiodist.transports import registry
from aiodist.transports.base import Link, Listener, Receiver
from aiodist.transports.certificates import advice
from aiodist.transports.processes import user_id
from aiodist.transports.silence import NEAR
from aiodist.transports.surroundings import chooser_on, identity_on
from aiodist.transports.tls import TlsContexts
from aiodist.wire.address import is_loopback, parse_address, parse_endpoint
from aiodist.wire.messages import JoinRequest, MemberInfo

_PROCESS = "process:"
"""Marks the process among the addresses of a member, for peers in the same process."""

_USER = "user:"
"""Marks the user among them, because users share memory only with themselves on one host."""

_HERE = "127.0.0.1"

_IN_THE_CLEAR = (
    "the coordinator is reached by TLS, and one of the two ranks has no certificate: what they "
    "send each other would leave the host in the clear. Give all ranks certificates "
    "(AIODIST_TLS_CA, AIODIST_TLS_CERT, AIODIST_TLS_KEY; or ssl= with a pair of contexts), or "
    "ssl=(context, None) if the network between them is trusted"
)

_CHECK = "check firewalls, and bind= and advertise="
_LISTENS_ALONE = (
    "it came to the coordinator by a loopback address, and listens there alone, as there is no "
    "token: give all ranks the same one, or it bind= and advertise="
)
"""What to do about a peer that was not reached."""


@dataclass(frozen=True, slots=True)
class Reach:
    """How this rank is reached, and reaches others.

    `transports`: those that it may use, best first. `contexts`: for TLS. `guard`: what keeps
    strangers out. `bind`, `advertise`: as in `aiodist.connect`. `stays`: TCP is for this host only,
    because the coordinator uses TLS and this rank has no certificate.
    """

    transports: tuple[str, ...]
    contexts: TlsContexts | None
    guard: Guard
    bind: str | None
    advertise: str | None
    stays: bool = False

    async def listen(
        self,
        coordinator: str,
        local_host: str,
        accept: Callable[[Link], None],
        listeners: list[Listener],
    ) -> None:
        """Open this rank's listeners for peers, and add each to `listeners` at once.

        `local_host`: this end of the connection to the `coordinator`. Raises OSError, and
        ValueError if strangers could send pickles.
        """
        bound, port = parse_endpoint(self.bind or "")
        # A NAT maps the advertised port to this host, to the same port unless `bind` says
        # otherwise.
        port = port or parse_endpoint(self.advertise or "")[1]
        host = bound or local_host or "127.0.0.1"
        beyond = is_loopback(host) and not parse_address(coordinator).is_loopback
        if beyond and not bound and self.guard.keeps_out:
            # The coordinator runs on this host, but members come from others, too: see `dial`.
            # Ranks of this host reach it by the loopback, and ranks of other hosts by an address
            # that is unknown here. So listen everywhere, which the token or TLS makes safe.
            host = "::" if ":" in host else "0.0.0.0"
        for kind in self.transports:
            transport = registry.make(kind, self.contexts, port=port)
            where = _HERE if self.stays and kind == "tcp" else host
            try:
                listeners.append(await transport.listen(accept, host=where))
            except OSError as error:
                if kind != "tcp" or not self.bind:
                    raise
                raise OSError(
                    error.errno,
                    f"bind={self.bind!r} cannot be used: {error.strerror or error}. Give a name or "
                    "address of this host, with a free port or none",
                ) from error
            if kind == "tcp":
                self.guard.check(listeners[-1].address)

    def introduce(
        self,
        ask: JoinRequest,
        seen_host: str,
        trip: float,
        listeners: Iterable[Listener],
        loop: asyncio.AbstractEventLoop,
    ) -> JoinRequest:
        """Complete `ask` by the identity of this rank, and its addresses.

        `seen_host`: where the coordinator saw it come from. `trip`: the round trip to the
        coordinator.
        """
        host, port = parse_endpoint(self.advertise or "")
        host = host or seen_host or "127.0.0.1"
        known_as, port = (_HERE, 0) if self.stays else (host, port)
        addresses = [_advertised(listener.address, known_as, port) for listener in listeners]
        who = identity_on(loop, registry.process_id(loop), registry.host_id(), user_id())
        # If all ranks are near each other, windows keep their default, and `trip` is not needed.
        far = (said_trip(trip),) if trip > NEAR else ()
        return replace(
            ask,
            id=chooser_on(loop).randbytes(16).hex(),
            pid=who.pid,
            host=host,
            host_id=who.host,
            name=ask.name or who.name,
            addresses=(_PROCESS + who.process, _USER + who.user, *ask.addresses, *far, *addresses),
        )

    async def dial(
        self,
        own: registry.Contact,
        member: MemberInfo,
        coordinator_host: str,
        receiver: Receiver,
        patience: float,
    ) -> Link:
        """Make a link from this rank, `own`, to `member`, over the best transport that works.

        `patience`: see `registry.make`. Raises OSError, and ValueError if strangers elsewhere could
        send pickles.
        """
        peer = endpoint_of(member, tuple(_kind(address) for address in member.addresses))
        tried: list[str] = []
        apart = "" if own.user == peer.user else "; ranks of different users need 'tcp'"
        hint = _CHECK
        last: OSError | None = None
        for kind, address in registry.candidates(own, peer):
            if kind == "tcp" and own.host != peer.host and (self.stays or _stays(member, address)):
                hint = _IN_THE_CLEAR
                continue
            # A peer on the coordinator's host may have three names: its listening address, the
            # address that it advertises, and the one by which this rank reaches it. It advertises a
            # loopback address, which only its own host can use. Others use the name by which they
            # reach the coordinator.
            if kind == "tcp" and own.host != peer.host and is_loopback(member.host):
                # The coordinator sees the peer on its own host, which we know by another name.
                address = _advertised(address, coordinator_host)
                if not self.guard.keeps_out:
                    hint = _LISTENS_ALONE
            if kind == "tcp":
                # The coordinator may admit others, although this rank reaches it on its own host.
                self.guard.check(address)
            try:
                return await registry.make(kind, self.contexts, patience).dial(address, receiver)
            except OSError as error:
                tried.append(f"{address} ({error})")
                last = error
                hint = advice(error.__cause__) or hint
        raise OSError(
            f"tried {', '.join(tried)}; {hint}"
            if tried
            else hint
            if hint is not _CHECK
            else f"no transport of {', '.join(own.allowed)} is common to both ranks{apart}"
        ) from last


def _stays(member: MemberInfo, address: str) -> bool:
    """Whether `member`, which others know by another host, listens on a loopback address only."""
    return is_loopback(parse_address(address).host) and not is_loopback(member.host)


def _advertised(address: str, host: str, port: int = 0) -> str:
    """A listener's address as peers reach it; at its own port, if `port` is 0."""
    if address.partition("://")[0] not in ("tcp", "tls"):
        return address
    found = parse_address(address)
    return str(replace(found, host=host, port=port or found.port))


def endpoint_of(member: MemberInfo, allowed: tuple[str, ...]) -> registry.Contact:
    """How `member` can be reached, by its addresses. `allowed`: the transports to try."""
    addresses = {_kind(address): address for address in member.addresses}
    return registry.Contact(
        process=addresses.pop("process", "").removeprefix(_PROCESS),
        host=member.host_id,
        user=addresses.pop("user", "").removeprefix(_USER),
        addresses=addresses,
        allowed=allowed,
    )


def _kind(address: str) -> str:
    scheme = address.partition(":")[0]
    return {"unix-abstract": "unix", "tls": "tcp"}.get(scheme, scheme)


def memory_of(member: MemberInfo) -> MemoryReach:
    reach = endpoint_of(member, ())
    process = reach.process.rpartition("-")[0]  # without the loop
    host = f"{reach.host} {reach.user}" if "shm" in reach.addresses else ""
    return MemoryReach(process, "inproc" in reach.addresses, host)
