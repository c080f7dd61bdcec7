"""One group, as one of its ranks reaches it: its ranks, their links, and the ranks that are gone.

The endpoint knows peers by root, over all groups and epochs of a membership. A group knows them by
rank. This class translates, once for each group. Everything that a group sends goes through
`Party.peers`, and a peer queues it until there is a link.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from aiodist.errors import AiodistError, PeerLostError
from aiodist.links.endpoint import Endpoint
from aiodist.links.peer import Peer
from aiodist.transports.base import Done, Link
from aiodist.transports.shm_link import ShmLink
from aiodist.wire import kinds
from aiodist.wire.frames import pack_fields


class Party:
    """The ranks of one group in one epoch."""

    def __init__(
        self, endpoint: Endpoint, *, id: bytes, group: str, epoch: int, ranks: Sequence[int]
    ) -> None:
        self.endpoint = endpoint
        self.loop = endpoint.loop  # that of the endpoint
        self.id = id  # its id in frames
        self.group = group  # the name of the group
        self.epoch = epoch
        self.ranks = tuple(ranks)  # the roots of its members, by rank
        self.rank = self.ranks.index(endpoint.rank)  # this rank
        self.size = len(self.ranks)  # how many ranks it has, including lost ones
        self.peers: Sequence[Peer] = [endpoint.peer(root) for root in ranks]  # by rank
        self.rank_of = {root: rank for rank, root in enumerate(self.ranks)}  # by root
        # ranks that are lost to this group, or have left it, and why
        self.gone: dict[int, str] = {}
        # Why nothing can be called any more. Copies are raised, because an error that is raised
        # keeps its frames alive, with all that they hold.
        self.ended: AiodistError | None = None

    def end(self, error: AiodistError) -> None:
        """End this group, because of `error`."""
        self.ended = error

    def check_open(self) -> None:
        """Raise the error that ended this group, if it has ended."""
        if self.ended is not None:
            raise copy.copy(self.ended)

    # -- sending ----------------------------------------------------------------------------------

    def send(
        self,
        dst: int,
        fields: tuple[Any, ...],
        payload: Sequence[memoryview] = (),
        *,
        done: Done | None = None,
        token: object = None,
        urgent: bool = False,
    ) -> None:
        """Send one point-to-point frame to rank `dst`."""
        header = pack_fields(kinds.P2P, self.id, *fields)
        self.peers[dst].send(header, payload, done=done, token=token, urgent=urgent)

    def say(self, peer: int, kind: int, *fields: Any) -> None:
        """Send `peer` a small frame that overtakes what is queued."""
        self.peers[peer].send(pack_fields(kind, self.id, *fields), urgent=True)

    def tell(self, peer: int, kind: int, *fields: Any) -> None:
        """Send `peer` a small frame behind all that was sent before."""
        self.peers[peer].send(pack_fields(kind, self.id, *fields))

    def reach(self, peer: int, kind: int, *fields: Any, asks: bool = False) -> None:
        """Send `peer` a small frame, and make a link for it, but do not wait for it in `close`.
        `asks`: see `Peer.reach`."""
        self.peers[peer].reach(pack_fields(kind, self.id, *fields), asks=asks)

    def ask(self, peer: int) -> None:
        """Have `peer` say when it leaves this group, or that it has left, if only it can."""
        # Any frame does that. This one does nothing else.
        if not self.endpoint.owner.tells_who_leaves(self.id):
            self.reach(peer, kinds.KICK, asks=True)

    def discard(self, dst: int, token: object) -> None:
        """See `Link.discard`."""
        self.peers[dst].discard(token)

    def settle(self, dst: int, token: object) -> None:
        """See `Link.settle`."""
        link = self.peers[dst].link
        if link is not None:
            link.settle(token)

    def settle_all(self, to: Iterable[int], token: object) -> None:
        """Settle for several ranks. Data that was sent to more than one is copied once."""
        copies = self.endpoint.copies
        copies.begin()
        try:
            for dst in to:
                self.settle(dst, token)
        finally:
            copies.end()

    def link(self, peer: int) -> Link | None:
        """Return the link to a rank, or None."""
        return self.peers[peer].link

    def process_of(self, peer: int) -> int:
        """Return the process id of a rank of this host; 0 if it is not known."""
        link = self.near(peer)
        return 0 if link is None else link.pid

    def near(self, peer: int) -> ShmLink | None:
        """Return the link to a rank if it is in shared memory, else None."""
        link = self.peers[peer].link
        return link if isinstance(link, ShmLink) else None

    # -- lost ranks ------------------------------------------------------------------------------

    def lost(self) -> Mapping[int, str]:
        """Return the ranks that are lost, and why."""
        lost = self.endpoint.lost
        if not (self.gone or lost):
            return {}
        return {rank: lost[root] for root, rank in self.rank_of.items() if root in lost} | self.gone

    def has_lost(self, peer: int) -> bool:
        """Tell whether a rank is lost."""
        return peer in self.gone or self.ranks[peer] in self.endpoint.lost

    def why_lost(self, peer: int) -> PeerLostError | None:
        """Return the error of operations that need a rank that is lost; None if it is not lost."""
        reason = self.gone.get(peer) or self.endpoint.lost.get(self.ranks[peer])
        if reason is None:
            return None
        return PeerLostError(f"rank {peer} is lost: {reason}", ranks=[peer])

    def why_broken(self) -> PeerLostError | None:
        """Return the error that names all lost ranks; None if no rank is lost."""
        lost = self.lost()
        text = "; ".join(f"rank {rank} is lost: {reason}" for rank, reason in lost.items())
        return PeerLostError(text, ranks=lost) if lost else None

    def error(self, cls: type[AiodistError], message: str, **fields: Any) -> AiodistError:
        """Make an error that names this group and epoch."""
        return cls(message, group=self.group, epoch=self.epoch, **fields)
