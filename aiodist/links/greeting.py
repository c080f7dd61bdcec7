"""The greeting of two peers: each shows the other that it is a member.

A stranger neither hears nor says anything about the group before that: only random bytes and
proofs.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from typing import Any, NamedTuple, Protocol

from aiodist.errors import ProtocolError
from aiodist.transports.base import Landing, Link
from aiodist.transports.certificates import advice
from aiodist.transports.sparing import Sparing
from aiodist.wire import kinds
from aiodist.wire.frames import pack_fields, unpack_fields
from aiodist.wire.proof import NONCE_BYTES, Role, check_proof, make_proof, mark_of, membership_key

log = logging.getLogger("aiodist.endpoint")

LOST_CALLER = "it has lost this rank: "
"""How the reason of a refusal begins if the coordinator may have removed the caller."""

HANDSHAKE_TIMEOUT = 10.0
"""Seconds for each of the two frames by which a caller shows which member it is."""

Nonces = tuple[bytes, bytes]
"""The nonces of the caller and of the listener."""


class Claim(NamedTuple):
    """What a side says of earlier links: how many there were, and how many frames have come to
    it."""

    generation: int
    came: int


class Identity:
    """The identity of this endpoint: member `id` of `group`, with `token`."""

    def __init__(self, group: str, id: str, token: bytes | None = None) -> None:
        self.group = group
        self.id = id
        self.mark = mark_of(id)
        self._token = token

    def prove(self, role: Role, peer: str, nonces: Nonces, claim: Claim) -> bytes:
        """Return the proof, for member `peer`, that this is member `id` and makes `claim`."""
        return make_proof(self._key(peer), role, *nonces, pack_fields(self.id, *claim))

    def check(self, role: Role, peer: str, mac: bytes, nonces: Nonces, claim: Claim) -> bool:
        """Tell whether `mac` proves that the other side is member `peer` and makes `claim`."""
        return check_proof(mac, self._key(peer), role, *nonces, pack_fields(peer, *claim))

    def _key(self, peer: str) -> bytes:
        # Sorted, so that both sides make the same key.
        return membership_key(self._token, self.group, sorted((self.id, peer)))


class Door(Protocol):
    """Judges what callers show of themselves."""

    loop: asyncio.AbstractEventLoop
    sparing: Sparing

    def holds(self, greeter: Greeter) -> bool:
        """Tell whether `greeter`, whose proof has come, may wait until the membership is known.

        The door calls `Greeter.proceed` each time more members are known.
        """
        ...

    def identify(self, mark: bytes, mac: bytes, claim: Claim, nonces: Nonces) -> int | None:
        """Return the root of the member that this proof names, or None if it may still become
        known.

        Raises ProtocolError for a stranger.
        """
        ...

    def greeted(self, greeter: Greeter, rank: int, claim: Claim, nonces: Nonces) -> None:
        """Take over the link of `greeter`, which is member `rank` (a root): answer it, or close
        it."""
        ...

    def dismiss(self, greeter: Greeter) -> None:
        """Forget `greeter`, whose link is closed."""
        ...


class Counterpart(Protocol):
    """The member that this rank has called and greets."""

    rank: int
    id: str

    @property
    def claim(self) -> Claim:
        """What this rank tells it of earlier links."""
        ...

    def can_attach(self, link: Link, theirs: Claim) -> bool:
        """Tell whether `link` can take the place of the last one, given the member's claim."""
        ...

    def attach(self, link: Link, theirs: Claim, *, dialled: bool) -> None:
        """Take over `link`, which is up now. `dialled`: this rank made it."""
        ...


class Greeter:
    """Receives the greeting of a caller, which is a stranger until it has shown a proof.

    It may send two frames without payload.
    """

    tells_why = True
    """It logs itself, sparingly, what breaks its link."""

    def __init__(self, endpoint: Door, link: Link) -> None:
        self.link = link
        self.peer = link.peer_name  # the caller's address, for the log
        self.host = link.peer_name.rpartition(":")[0]  # strangers are counted by host
        self._endpoint = endpoint
        self._theirs = b""  # the nonce of the other side; b"": no hello yet
        self._ours = secrets.token_bytes(NONCE_BYTES)  # the nonce that its proof must answer
        # Its mark, proof and claim; None until they come.
        self._shown: tuple[bytes, bytes, Claim] | None = None
        # Expires if the peer's next frame takes too long.
        self._timer = self._patience()

    # Its frames have no payload, so it is their landing itself. It acts once the link has counted
    # the frame, because the count begins anew at the end of the greeting.
    memory = None

    def frame(self, link: Link, header: bytes, nbytes: int) -> Landing | None:
        fields = unpack_fields(header)
        if nbytes or self._shown is not None:
            raise ProtocolError("a peer waits for the answer to its greeting")
        if not self._theirs:
            self._theirs = _hello(fields)
        else:
            self._shown = _shown(fields)
        return self

    def landed(self) -> None:
        if self._shown is None:
            self.link.send(pack_fields(kinds.CHALLENGE, self._ours))
            # The time starts anew. A loop that takes seconds for a turn sees the hello late. If the
            # proof had only the rest of that time, no connection would ever be made, and repeated
            # attempts would make the turns even longer.
            self._timer.cancel()
            self._timer = self._patience()
        elif self._endpoint.holds(self):
            self.proceed()
        else:
            self.link.close(ProtocolError("more connections than there will be members"))

    def proceed(self) -> None:
        """Check the proof, once it has come and the membership is known."""
        if self._shown is None:
            return
        mark, mac, claim = self._shown
        nonces = (self._theirs, self._ours)
        # The peer was in time. If the membership is not known here yet, this rank is late.
        # `Door.holds` limits how many callers may wait for it.
        self._timer.cancel()
        try:
            found = self._endpoint.identify(mark, mac, claim, nonces)
        except ProtocolError as error:
            self.link.close(error)
            return
        if found is not None:
            self._endpoint.greeted(self, found, claim, nonces)

    def drop(self) -> None:
        """Close at once, without a word."""
        self.link.close()

    def closed(self, link: Link, error: BaseException | None) -> None:
        self._timer.cancel()
        self._endpoint.dismiss(self)
        if isinstance(error, ProtocolError):
            text = "connection of %s closed: %s"
            self._endpoint.sparing.warning("greeting", text, link.peer_name, error)

    def _patience(self) -> asyncio.TimerHandle:
        return self._endpoint.loop.call_later(HANDSHAKE_TIMEOUT, self._expired)

    def _expired(self) -> None:
        over = self._timer
        self.link.poll()  # if this loop did not turn, the frame may lie there
        if self._shown is None and self._timer is over:
            self.link.close(ProtocolError(f"no greeting within {HANDSHAKE_TIMEOUT:g} s"))


class Greeting:
    """Receives the answers of a peer that we called.

    `why` may be the reason that there was no answer. `is_final`: the peer said so.
    """

    _link: Link
    memory = None  # see `Greeter.memory`

    def __init__(
        self, loop: asyncio.AbstractEventLoop, peer: Counterpart, identity: Identity
    ) -> None:
        # Whether the peer has taken the link.
        self.answered: asyncio.Future[bool] = loop.create_future()
        self._peer = peer
        self._identity = identity
        self._ours = secrets.token_bytes(NONCE_BYTES)  # the nonce that the peer's proof must answer
        self.why = "it has left, or lost us"
        self.is_final = False
        self._theirs = b""  # the nonce of the peer; b"": it has not answered the hello
        self._claim: Claim | None = None  # what the peer claims, once it has proved it

    @property
    def was_heard(self) -> bool:
        """Whether the peer has answered the hello."""
        return bool(self._theirs)

    def begin(self, link: Link) -> None:
        """Say hello."""
        self._link = link
        link.send(pack_fields(kinds.HELLO, kinds.MAGIC, kinds.VERSION, self._ours), urgent=True)

    def frame(self, link: Link, header: bytes, nbytes: int) -> Landing | None:
        fields = unpack_fields(header)
        if self._theirs and not nbytes and fields[:2] == [kinds.FAREWELL, b""] and len(fields) == 3:
            self.is_final = True
            self.why = str(fields[2])[:1000]
            link.close()
            return None
        kind, size = (kinds.HELLO_ACK, 4) if self._theirs else (kinds.CHALLENGE, 2)
        if nbytes or self._claim is not None or len(fields) != size or fields[0] != kind:
            raise ProtocolError("not the answer to a greeting")
        if type(fields[1]) is not bytes:
            raise ProtocolError("a nonce or proof is bytes")
        if not self._theirs:
            self._theirs = _nonce(fields[1])
            return self
        claim = self._claim = _claim(fields[2:])
        nonces = (self._ours, self._theirs)
        if not self._identity.check("listener", self._peer.id, fields[1], nonces, claim):
            raise ProtocolError(
                f"the process that answered did not prove that it is rank {self._peer.rank}"
            )
        if not self._peer.can_attach(link, claim):
            raise ProtocolError(f"rank {self._peer.rank} cannot go on where the link broke")
        return self

    def landed(self) -> None:
        link = self._link
        if self.answered.done():
            link.close()  # the peer's own connection has replaced it
        elif self._claim is None:
            identity, own = self._identity, self._peer.claim
            mac = identity.prove("dialler", self._peer.id, (self._ours, self._theirs), own)
            link.send(pack_fields(kinds.PROOF, identity.mark, mac, *own), urgent=True)
        else:
            # At once, because the peer's first frames may be right behind its answer.
            self._peer.attach(link, self._claim, dialled=True)
            self.answered.set_result(True)

    def closed(self, link: Link, error: BaseException | None) -> None:
        if not self.answered.done():
            if error is not None and not isinstance(error, ConnectionResetError):
                self.why = advice(error) or str(error)
            self.is_final = self.is_final or isinstance(error, ProtocolError)
            self.answered.set_result(False)


def _hello(fields: list[Any]) -> bytes:
    """Return the nonce of a hello."""
    if len(fields) != 4 or fields[:3] != [kinds.HELLO, kinds.MAGIC, kinds.VERSION]:
        raise ProtocolError(f"not the hello of aiodist protocol {kinds.VERSION}")
    return _nonce(fields[3])


def _nonce(value: Any) -> bytes:
    if type(value) is not bytes or len(value) != NONCE_BYTES:
        raise ProtocolError(f"a nonce has {NONCE_BYTES} bytes")
    return value


def _shown(fields: list[Any]) -> tuple[bytes, bytes, Claim]:
    """Return mark, proof and claim."""
    if len(fields) != 5 or fields[0] != kinds.PROOF:
        raise ProtocolError("not a proof")
    if type(fields[1]) is not bytes or type(fields[2]) is not bytes:
        raise ProtocolError("a mark and a proof are bytes")
    return fields[1], fields[2], _claim(fields[3:])


def _claim(fields: list[Any]) -> Claim:
    generation, came = fields
    if type(generation) is not int or type(came) is not int or generation < 0 or came < 0:
        raise ProtocolError("a claim is two numbers")
    return Claim(generation, came)
