"""The greeting of two peers: each shows the other that it is a member, before anything else.

Nothing that a stranger hears or says before that is about the group: random bytes, and proofs.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from typing import Any, NamedTuple, Protocol

from aiodist.errors import ProtocolError
from aiodist.transports.base import Landing, Link
from aiodist.transports.sparing import Sparing
from aiodist.wire import kinds
from aiodist.wire.frames import pack_fields, unpack_fields
from aiodist.wire.proof import NONCE_BYTES, Role, check_proof, make_proof, mark_of, membership_key

log = logging.getLogger("aiodist.endpoint")

HANDSHAKE_TIMEOUT = 10.0
"""Seconds for each of the two frames in which who has connected shows who it is."""

Nonces = tuple[bytes, bytes]
"""Of the side that connected, and of the other."""


class Claim(NamedTuple):
    """What a side says of the links that there have been: how many, and how many frames have come
    to it over them."""

    generation: int
    came: int


class Identity:
    """Who this endpoint is: member `id` of `group`, with `token`."""

    def __init__(self, group: str, id: str, token: bytes | None = None) -> None:
        self.group = group
        self.id = id
        self.mark = mark_of(id)
        self._token = token

    def prove(self, role: Role, peer: str, nonces: Nonces, claim: Claim) -> bytes:
        """What shows member `peer` that this is who it is, and claims that."""
        return make_proof(self._key(peer), role, *nonces, pack_fields(self.id, *claim))

    def check(self, role: Role, peer: str, mac: bytes, nonces: Nonces, claim: Claim) -> bool:
        """Whether `mac` shows that the other side is member `peer`, and claims that."""
        return check_proof(mac, self._key(peer), role, *nonces, pack_fields(peer, *claim))

    def _key(self, peer: str) -> bytes:
        # In order, so that both sides come to the same key.
        return membership_key(self._token, self.group, sorted((self.id, peer)))


class Door(Protocol):
    """Where those come in who connect to this rank: it judges what they show of themselves."""

    loop: asyncio.AbstractEventLoop
    sparing: Sparing

    def holds(self, greeter: Greeter) -> bool:
        """The proof of `greeter` has come. Says whether it may wait here until the membership is
        known, and calls `Greeter.proceed` whenever more members have become known."""
        ...

    def identify(self, mark: bytes, mac: bytes, claim: Claim, nonces: Nonces) -> int | None:
        """Returns the root of the member that this proves to be; None while it may be a member
        that is not known here yet. Raises ProtocolError for somebody else."""
        ...

    def greeted(self, greeter: Greeter, rank: int, claim: Claim, nonces: Nonces) -> None:
        """Takes over the link of `greeter`, which has shown that it is the member with root
        `rank`: answers it, or closes it."""
        ...

    def dismiss(self, greeter: Greeter) -> None:
        """Forgets `greeter`, whose link is closed."""
        ...


class Counterpart(Protocol):
    """The member that this rank has connected to, and greets."""

    rank: int
    id: str

    @property
    def claim(self) -> Claim:
        """What this rank says to it of the links that there have been."""
        ...

    def can_attach(self, link: Link, theirs: Claim) -> bool:
        """Whether `link` can go on where the one before stopped, by what the member says."""
        ...

    def attach(self, link: Link, theirs: Claim, *, dialled: bool) -> None:
        """Takes over `link`, which is up now. `dialled`: this rank has made it."""
        ...


class Greeter:
    """Receives the greeting of a peer that connected to us, a stranger until it has shown who it
    is: it may send two frames, of a header each."""

    tells_why = True
    """What breaks its link is in the log by its own doing, which is sparing."""

    def __init__(self, endpoint: Door, link: Link) -> None:
        self.link = link
        self.peer = link.peer_name  # its address, for the log
        self.host = link.peer_name.rpartition(":")[0]  # strangers are counted by it
        self._endpoint = endpoint
        self._theirs = b""  # the nonce of the other side; b"": it has not said hello
        self._ours = secrets.token_bytes(NONCE_BYTES)  # the nonce that its proof must answer
        # Its mark, proof and claim; None: not here yet.
        self._shown: tuple[bytes, bytes, Claim] | None = None
        # Ends its patience with the peer's next frame.
        self._timer = self._patience()

    # Its frames have no payload: what they set off is done when the link has counted them, since
    # from the end of the greeting on the count begins anew. So it is their landing itself.
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
            # Patience begins anew. On a loop that takes seconds for a turn the hello is seen late:
            # were its time taken from the proof's, no connection would ever be made there, and
            # each would be tried again, beside all others, which makes the turns no shorter.
            self._timer.cancel()
            self._timer = self._patience()
        elif self._endpoint.holds(self):
            self.proceed()
        else:
            self.link.close(ProtocolError("more connections than there will be members"))

    def proceed(self) -> None:
        """Judge the proof, once it has come and the membership is known."""
        if self._shown is None:
            return
        mark, mac, claim = self._shown
        nonces = (self._theirs, self._ours)
        # The peer has done its part in time. If the membership is not known here yet, it is this
        # rank that is late, and `Door.holds` limits how many may wait for it.
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
        self.link.poll()  # where it was this loop that did not turn, the frame lies there
        if self._shown is None and self._timer is over:
            self.link.close(ProtocolError(f"no greeting within {HANDSHAKE_TIMEOUT:g} s"))


class Greeting:
    """Receives the answers to our greeting of the peer that we connected to. `why`: what may be
    the reason that there was none. `is_final`: the peer has said so."""

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
            raise ProtocolError(f"who answered did not show that it is rank {self._peer.rank}")
        if not self._peer.can_attach(link, claim):
            raise ProtocolError(f"rank {self._peer.rank} cannot go on where the link broke")
        return self

    def landed(self) -> None:
        link = self._link
        if self.answered.done():
            link.close()  # superseded
        elif self._claim is None:
            identity, own = self._identity, self._peer.claim
            mac = identity.prove("dialler", self._peer.id, (self._ours, self._theirs), own)
            link.send(pack_fields(kinds.PROOF, identity.mark, mac, *own), urgent=True)
        else:
            # At once: the peer's first frames may be right behind its answer.
            self._peer.attach(link, self._claim, dialled=True)
            self.answered.set_result(True)

    def closed(self, link: Link, error: BaseException | None) -> None:
        if not self.answered.done():
            if error is not None and not isinstance(error, ConnectionResetError):
                self.why = str(error)
            self.is_final = self.is_final or isinstance(error, ProtocolError)
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


def _shown(fields: list[Any]) -> tuple[bytes, bytes, Claim]:
    """Mark, proof and claim."""
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
