"""Where peers come in that connect to this rank.

Each connection begins as a stranger (`greeting`), and becomes the link of a peer once it has shown
which member it is, and that it does not stand in the way of a better one (`peer`). A stranger whose
proof is here may have to wait: the membership may be known to it, and not yet to this rank.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from aiodist.errors import ProtocolError
from aiodist.links.greeting import Claim, Greeter, Identity, Nonces
from aiodist.links.peer import Home, Peer
from aiodist.transports.base import Link
from aiodist.transports.sparing import Sparing
from aiodist.transports.unproven import UnprovenConnections
from aiodist.wire import kinds
from aiodist.wire.frames import pack_fields
from aiodist.wire.proof import mark_of

log = logging.getLogger("aiodist.endpoint")

MIN_UNPROVEN = 256
"""So many connections that have not shown who they are there may always be."""


class Entrance:
    """The `Door` of one endpoint. `peers` are those that are known, by root."""

    def __init__(self, endpoint: Home, peers: Mapping[int, Peer], expected: int) -> None:
        self.loop = endpoint.loop  # for the times of the greeting
        self.sparing = Sparing(log)  # warns of what strangers do, but not without end
        self.identity: Identity | None = None  # how this rank shows that it is a member
        self._endpoint = endpoint
        self._peers = peers
        self._roots: dict[bytes, int] = {}  # of the peers, by the mark with which they connect
        self._expected = expected  # how many members there will be at most
        self._expecting = False  # see `expect`
        self._greeters: dict[Greeter, None] = {}  # in order: a simulation repeats itself
        # Those of `_greeters` whose proof has not come; of too many the oldest are dropped.
        self._unproven: UnprovenConnections[Greeter] = UnprovenConnections(
            log, max(MIN_UNPROVEN, 2 * expected)
        )

    def know(self, peer: Peer) -> None:
        """`peer` is a member."""
        self._roots[mark_of(peer.id)] = peer.rank

    def forget(self, peer: Peer) -> None:
        """`peer` is none any more."""
        del self._roots[mark_of(peer.id)]

    def admit(self, count: int) -> None:
        """There are `count` members, all of whom are known."""
        self._expected = max(self._expected, count)
        self._unproven.most = max(MIN_UNPROVEN, 2 * count)
        self._proceed()

    def expect(self, expecting: bool) -> None:
        """Whether peers may already know members that are not known here."""
        self._expecting = expecting
        self._proceed()

    def _proceed(self) -> None:
        for greeter in list(self._greeters):
            greeter.proceed()

    def enter(self, link: Link) -> None:
        """Somebody has connected."""
        greeter = Greeter(self, link)
        link.receiver = greeter
        self._greeters[greeter] = None
        self._unproven.add(greeter, self.loop.time())

    def holds(self, greeter: Greeter) -> bool:
        """A peer has sent its proof: whether it may wait until the membership is known."""
        self._unproven.discard(greeter)
        # A proof can be judged only when its member is known here, and until then a false one looks
        # like any other. There are never more true ones than members, so the rest is turned away.
        return len(self._greeters) - len(self._unproven) <= self._expected

    def greeted(self, greeter: Greeter, rank: int, claim: Claim, nonces: Nonces) -> None:
        """Rank `rank` has connected to us."""
        endpoint, identity = self._endpoint, self.identity
        assert identity is not None
        self._greeters.pop(greeter, None)
        peer = self._peers[rank]
        # A rank that leaves still takes a link for what it has to say.
        if rank in endpoint.lost or (endpoint.closing and peer.dialing is None):
            why = (
                "it is leaving"
                if endpoint.closing
                else f"it has lost this rank: {endpoint.lost[rank]}"
            )
            greeter.link.send(pack_fields(kinds.FAREWELL, b"", why[:1000]), urgent=True)
            greeter.link.close()
            return
        if not peer.make_way(claim):
            greeter.link.close()
            return
        if peer.dialing is not None:
            # Both dialled at once: the connection of the lower id is kept.
            if identity.id < peer.id:
                greeter.link.close()
                return
            peer.dialing.cancel()
        own = peer.claim
        proof = identity.prove("listener", peer.id, nonces, own)
        # Urgent: nothing may overtake it.
        greeter.link.send(pack_fields(kinds.HELLO_ACK, proof, *own), urgent=True)
        peer.attach(greeter.link, claim, dialled=False)

    def dismiss(self, greeter: Greeter) -> None:
        self._greeters.pop(greeter, None)
        self._unproven.discard(greeter)

    def identify(self, mark: bytes, mac: bytes, claim: Claim, nonces: Nonces) -> int | None:
        """Who connected shows that it is the member with this mark: its root. None while it may be
        one that is not known here yet. Raises ProtocolError for somebody else."""
        identity = self.identity
        # This rank waits for its view, and others, who have theirs, may call already.
        if identity is None:
            return None
        root = self._roots.get(mark)
        if root is None:
            if self._expecting:
                return None
            raise ProtocolError("who connected is no member that is known here")
        their_id = self._peers[root].id
        if root == self._endpoint.rank or not identity.check(
            "dialler", their_id, mac, nonces, claim
        ):
            raise ProtocolError("who connected did not show that it is a member")
        return root

    def close(self) -> None:
        """Turn away those who have not shown who they are."""
        for greeter in list(self._greeters):
            greeter.link.close()

    def close_in_child(self) -> None:
        """After a fork: close the child's copies of the sockets."""
        for greeter in self._greeters:
            greeter.link.close_in_child()
