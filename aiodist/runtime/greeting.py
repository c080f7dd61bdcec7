"""The greeting of two peers: each shows the other that it is a member, before anything else.

Nothing that a stranger hears or says before that is about the group: random bytes, and proofs.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from typing import TYPE_CHECKING, Any

from aiodist.errors import ProtocolError
from aiodist.transports.base import Link
from aiodist.wire import kinds
from aiodist.wire.frames import pack_fields, unpack_fields
from aiodist.wire.proof import NONCE_BYTES, Role, check_proof, make_proof, mark_of, membership_key

if TYPE_CHECKING:
    from aiodist.runtime.endpoint import Endpoint, Peer

log = logging.getLogger("aiodist.endpoint")

HANDSHAKE_TIMEOUT = 10.0
"""Seconds for a peer to show who it is, and for the answer."""

Nonces = tuple[bytes, bytes]
"""Of the side that connected, and of the other."""


class Identity:
    """Who this endpoint is: member `id` of `group`, with `token`."""

    def __init__(self, group: str, id: str, token: bytes | None = None) -> None:
        self.group = group
        self.id = id
        self.mark = mark_of(id)
        self._token = token

    def prove(self, role: Role, peer: str, nonces: Nonces) -> bytes:
        """What shows member `peer` that this is who it is."""
        return make_proof(self._key(peer), role, *nonces, self.id.encode())

    def check(self, role: Role, peer: str, mac: bytes, nonces: Nonces) -> bool:
        """Whether `mac` shows that the other side is member `peer`."""
        return check_proof(mac, self._key(peer), role, *nonces, peer.encode())

    def _key(self, peer: str) -> bytes:
        return membership_key(self._token, self.group, sorted((self.id, peer)))


class Greeter:
    """Receives the greeting of a peer that connected to us, a stranger until it has shown who it
    is: it may send two frames, of a header each."""

    def __init__(self, endpoint: Endpoint, link: Link) -> None:
        self.link = link
        self.peer = link.peer_name
        self.host = link.peer_name.rpartition(":")[0]
        self._endpoint = endpoint
        self._theirs = b""
        self._ours = secrets.token_bytes(NONCE_BYTES)
        self._shown: tuple[bytes, bytes] | None = None
        self._timer = endpoint.loop.call_later(HANDSHAKE_TIMEOUT, self._expired)

    def frame(self, link: Link, header: bytes, nbytes: int) -> memoryview | None:
        fields = unpack_fields(header)
        if nbytes or self._shown is not None:
            raise ProtocolError("a peer waits for the answer to its greeting")
        if not self._theirs:
            self._theirs = _hello(fields)
        else:
            self._shown = _shown(fields)
        return None

    def payload(self, link: Link) -> None:
        if self._shown is None:
            link.send(pack_fields(kinds.CHALLENGE, self._ours))
        elif self._endpoint.holds(self):
            self.proceed()
        else:
            link.close(ProtocolError("more connections than there will be members"))

    def proceed(self) -> None:
        """Judge the proof, once it has come and the membership is known."""
        if self._shown is None:
            return
        mark, mac = self._shown
        self._timer.cancel()
        try:
            found = self._endpoint.identify(mark, mac, (self._theirs, self._ours))
        except ProtocolError as error:
            self.link.close(error)
            return
        if found is not None:
            self._endpoint.greeted(self, *found)

    def drop(self) -> None:
        """Close at once, without a word."""
        self.link.close()

    def closed(self, link: Link, error: BaseException | None) -> None:
        self._timer.cancel()
        self._endpoint.dismiss(self)
        if isinstance(error, ProtocolError):
            log.warning("connection of %s closed: %s", link.peer_name, error)

    def _expired(self) -> None:
        self.link.close(ProtocolError(f"no greeting within {HANDSHAKE_TIMEOUT:g} s"))


class Greeting:
    """Receives the answers to our greeting of the peer that we connected to. `why`: what may be
    the reason that there was none."""

    def __init__(self, loop: asyncio.AbstractEventLoop, peer: Peer, identity: Identity) -> None:
        self.answered: asyncio.Future[bool] = loop.create_future()
        self._peer = peer
        self._identity = identity
        self._ours = secrets.token_bytes(NONCE_BYTES)
        self.why = "it has left, or lost us"
        self._theirs = b""
        self._done = False

    def begin(self, link: Link) -> None:
        """Say hello."""
        link.send(pack_fields(kinds.HELLO, kinds.MAGIC, kinds.VERSION, self._ours), urgent=True)

    def frame(self, link: Link, header: bytes, nbytes: int) -> memoryview | None:
        fields = unpack_fields(header)
        kind = kinds.HELLO_ACK if self._theirs else kinds.CHALLENGE
        if nbytes or self._done or len(fields) != 2 or fields[0] != kind:
            raise ProtocolError("not the answer to a greeting")
        if type(fields[1]) is not bytes:
            raise ProtocolError("a nonce or proof is bytes")
        if not self._theirs:
            self._theirs = _nonce(fields[1])
            return None
        self._done = True
        nonces = (self._ours, self._theirs)
        if not self._identity.check("listener", self._peer.id, fields[1], nonces):
            raise ProtocolError(f"who answered did not show that it is rank {self._peer.rank}")
        return None

    def payload(self, link: Link) -> None:
        if self.answered.done():
            link.close()  # superseded
        elif not self._done:
            identity = self._identity
            mac = identity.prove("dialler", self._peer.id, (self._ours, self._theirs))
            link.send(pack_fields(kinds.PROOF, identity.mark, mac), urgent=True)
        else:
            # At once: the peer's first frames may be right behind its answer.
            self._peer.attach(link)
            self.answered.set_result(True)

    def closed(self, link: Link, error: BaseException | None) -> None:
        if not self.answered.done():
            if error is not None and not isinstance(error, ConnectionResetError):
                self.why = str(error)
            self.answered.set_result(False)


def _hello(fields: list[Any]) -> bytes:
    """The nonce of a hello."""
    if len(fields) != 4 or fields[:3] != [kinds.HELLO, kinds.MAGIC, kinds.VERSION]:
        raise ProtocolError(f"not the hello of aiodist protocol {kinds.VERSION}")
    return _nonce(fields[3])


def _nonce(value: Any) -> bytes:
    if type(value) is not bytes or len(value) != NONCE_BYTES:
        raise ProtocolError(f"a nonce has {NONCE_BYTES} bytes")
    return value


def _shown(fields: list[Any]) -> tuple[bytes, bytes]:
    """Mark and proof."""
    if len(fields) != 3 or fields[0] != kinds.PROOF:
        raise ProtocolError("not a proof")
    if type(fields[1]) is not bytes or type(fields[2]) is not bytes:
        raise ProtocolError("a mark and a proof are bytes")
    return fields[1], fields[2]
