"""What keeps strangers from a rank's listeners, and what is forbidden without that."""

from __future__ import annotations

import logging
import ssl as tls
from dataclasses import dataclass

from aiodist.wire.address import Address, parse_address

log = logging.getLogger("aiodist.session")


@dataclass(frozen=True, slots=True)
class Guard:
    """`keeps_out`: whether a connection must show a secret. `allow_pickle`: whether members may run
    code here."""

    keeps_out: bool
    allow_pickle: bool = False

    @classmethod
    def of(cls, token: bytes | None, server: tls.SSLContext | None, *, allow_pickle: bool) -> Guard:
        """Make a guard from a token, or from a `server` TLS context that asks for certificates."""
        # TLS alone keeps others from listening, but a server that asks for no certificate accepts
        # any client.
        asks = server is not None and server.verify_mode is tls.CERT_REQUIRED
        return cls(token is not None or asks, allow_pickle)

    def check(self, where: str) -> None:
        """Raise ValueError if strangers could run code through a listener at `where`."""
        if self.allow_pickle and not self.keeps_out and not parse_address(where).is_loopback:
            raise ValueError(
                f"allow_pickle=True lets every member run code in this process, and any process "
                f"that can connect to {where} could become one: give all ranks the same token= "
                "(AIODIST_TOKEN), or ssl= with contexts that ask for certificates; or do without "
                "allow_pickle"
            )

    def warn(self, where: str) -> None:
        """Warn if strangers could join at `where`, because this rank serves the coordinator
        there."""
        if not self.keeps_out and not parse_address(where).is_loopback:
            log.warning(
                "rank 0 serves the coordinator at %s without a token: any process that can connect "
                "to it may take a rank's place, and read and change what ranks exchange. Give all "
                "ranks the same AIODIST_TOKEN (openssl rand -hex 32)",
                where,
            )


def elsewhere_hint(named: Address) -> str:
    """What may be wrong if rank 0 was to serve `named`, an address that its host does not have."""
    return (
        f"{named.host} is no address of the host that rank 0 is on. Unless a coordinator runs "
        "there, or a proxy leads from there to rank 0, no coordinator is at that address: start "
        f"rank 0 on {named.host}, or give all ranks an address of rank 0's host (MASTER_ADDR and "
        "MASTER_PORT, or AIODIST_ADDRESS), or the address of a coordinator (aiodist coordinator)"
    )


def narrow_hint(named: Address) -> str:
    """What may be wrong if no rank reaches `named`, which rank 0 serves itself, without a token.

    "" if this is not the reason.
    """
    if named.is_loopback:
        return ""
    return (
        f"Without a token, rank 0 listens on what {named.host} means on its own host, and on "
        "nothing else. If that is a loopback address there (as in Debian's /etc/hosts), or if "
        f"{named.host} is the address of a proxy, others do not reach it: give all ranks the same "
        "AIODIST_TOKEN, which makes rank 0 listen on all interfaces, or name it by an address that "
        "its host has"
    )
