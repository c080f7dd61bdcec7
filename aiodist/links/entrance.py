"""Connections that peers make to this rank.

Each connection begins as a stranger (`greeting`). It becomes the link of a peer once it has shown
which member it is, and if it does not stand in the way of a better one (`peer`). A stranger whose
proof has come may have to wait, because it may know the new membership before this rank does.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from aiodist.errors import ProtocolError
from aiodist.links.greeting import LOST_CALLER, Claim, Greeter, Identity, Nonces
from aiodist.links.peer import Peer, PeerHome
from aiodist.transports.base import Link
from aiodist.transports.sparing import Sparing
from aiodist.transports.unproven import UnprovenConnections
from aiodist.wire import kinds
from aiodist.wire.frames import pack_fields
from aiodist.wire.proof import mark_of

log = logging.getLogger("aiodist.endpoint")

MIN_UNPROVEN = 256
"""How many connections without a proof are always allowed."""


class PeerEntrance:
    """The `Door` of one endpoint. `peers` are the known ones, by root."""

    def __init__(self, endpoint: PeerHome, peers: Mapping[int, Peer], expected: int) -> None:
        self.loop = endpoint.loop  # for the timeouts of the greeting
        self.sparing = Sparing(log)  # limits warnings about strangers
        self.identity: Identity | None = None  # shows that this rank is a member
        self.is_over = False  # no connection is accepted any more
        self._endpoint = endpoint
        self._peers = peers
        # the roots of the peers, by the mark with which they connect
        self._roots: dict[bytes, int] = {}
        self._expected = expected  # the most members there will be
        self._expecting = False  # see `expect`
        # a dict for its order, because a simulation repeats itself
        self._greeters: dict[Greeter, None] = {}
        # The `_greeters` without a proof. If there are too many, the oldest are dropped.
        self._unproven: UnprovenConnections[Greeter] = UnprovenConnections(
            log, max(MIN_UNPROVEN, 2 * expected)
        )

    def know(self, peer: Peer) -> None:
        """Take in `peer`, which is a member."""
        self._roots[mark_of(peer.id)] = peer.rank

    def forget(self, peer: Peer) -> None:
        """Forget `peer`, which is no longer a member."""
        del self._roots[mark_of(peer.id)]

    def admit(self, count: int) -> None:
        """Note that there are `count` members, all of them known."""
        self._expected = max(self._expected, count)
        self._unproven.most = max(MIN_UNPROVEN, 2 * count)
        self._proceed()

    def expect(self, expecting: bool) -> None:
        """Note whether peers may already know members that this rank does not know yet."""
        self._expecting = expecting
        self._proceed()

    def _proceed(self) -> None:
        for greeter in list(self._greeters):
            greeter.proceed()

    def enter(self, link: Link) -> None:
        """Take in a new connection."""
        if self.is_over:
            link.close()
            return
        greeter = Greeter(self, link)
        link.receiver = greeter
        self._greeters[greeter] = None
        self._unproven.add(greeter, self.loop.time())

    def holds(self, greeter: Greeter) -> bool:
        """Tell whether a peer whose proof has come may wait until the membership is known."""
        self._unproven.discard(greeter)
        # A proof can be checked only when its member is known here; until then a false one looks
        # like any other. There are never more true ones than members, so the rest is refused.
        return len(self._greeters) - len(self._unproven) <= self._expected

    def greeted(self, greeter: Greeter, rank: int, claim: Claim, nonces: Nonces) -> None:
        """Answer a connection of rank `rank`, or close it."""
        endpoint, identity = self._endpoint, self.identity
        assert identity is not None
        self._greeters.pop(greeter, None)
        peer = self._peers[rank]
        # A rank that leaves still accepts a link on which it has data to send.
        if rank in endpoint.lost or (endpoint.closing and peer.dialing is None):
            why = "it is leaving" if endpoint.closing else LOST_CALLER + endpoint.lost[rank]
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
        # Urgent, because nothing may overtake it.
        greeter.link.send(pack_fields(kinds.HELLO_ACK, proof, *own), urgent=True)
        peer.attach(greeter.link, claim, dialled=False)

    def dismiss(self, greeter: Greeter) -> None:
        self._greeters.pop(greeter, None)
        self._unproven.discard(greeter)

    def identify(self, mark: bytes, mac: bytes, claim: Claim, nonces: Nonces) -> int | None:
        """Return the root of the member that this proof names, or None if it may still become
        known.

        Raises ProtocolError for a stranger.
        """
        identity = self.identity
        # This rank waits for its view. Others that have theirs may call already.
        if identity is None:
            return None
        root = self._roots.get(mark)
        if root is None:
            if self._expecting:
                return None
            raise ProtocolError("the process that connected is no known member of the group")
        their_id = self._peers[root].id
        if root == self._endpoint.rank or not identity.check(
            "dialler", their_id, mac, nonces, claim
        ):
            raise ProtocolError("the process that connected did not prove that it is a member")
        return root

    def close(self) -> None:
        """Close the connections that have not shown a proof."""
        for greeter in list(self._greeters):
            greeter.link.close()

    def close_in_child(self) -> None:
        """After a fork: close the child's copies of the sockets."""
        for greeter in self._greeters:
            greeter.link.close_in_child()
