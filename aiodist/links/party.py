"""One group, as one of its ranks reaches it: who its ranks are, over which links, and who is gone.

The endpoint knows peers by root, over all groups and epochs of a membership. A group knows them by
rank. This is where the one is made of the other, once for each group: whatever is sent for a group
goes by `Party.peers`, to a peer that queues it as long as there is no link.
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
        self.id = id  # names it in frames
        self.group = group  # the name of the group
        self.epoch = epoch
        self.ranks = tuple(ranks)  # the roots of its members, by rank
        self.rank = self.ranks.index(endpoint.rank)  # this one, among them
        self.size = len(self.ranks)  # how many ranks it has, the lost ones among them
        self.peers: Sequence[Peer] = [endpoint.peer(root) for root in ranks]  # by rank
        self.rank_of = {root: rank for rank, root in enumerate(self.ranks)}  # by root
        self.gone: dict[int, str] = {}  # ranks that are lost to this group, or left it, and why
        # Why nothing can be called any more. Raised are copies: an error that is raised keeps the
        # frames that it went through, with all that they hold.
        self.ended: AiodistError | None = None

    def end(self, error: AiodistError) -> None:
        """Nothing can be called here any more, because of `error`."""
        self.ended = error

    def check_open(self) -> None:
        """Raise what ended this group here, if anything did."""
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
        """Send `peer` a word, which overtakes what is queued."""
        self.peers[peer].send(pack_fields(kind, self.id, *fields), urgent=True)

    def tell(self, peer: int, kind: int, *fields: Any) -> None:
        """Send `peer` a word, behind all that was sent to it before."""
        self.peers[peer].send(pack_fields(kind, self.id, *fields))

    def discard(self, dst: int, token: object) -> None:
        """See `Link.discard`."""
        self.peers[dst].discard(token)

    def settle(self, dst: int, token: object) -> None:
        """See `Link.settle`."""
        link = self.peers[dst].link
        if link is not None:
            link.settle(token)

    def settle_all(self, to: Iterable[int], token: object) -> None:
        """Settle for several ranks: what was sent to more than one is copied once."""
        copies = self.endpoint.copies
        copies.begin()
        try:
            for dst in to:
                self.settle(dst, token)
        finally:
            copies.end()

    def link(self, peer: int) -> Link | None:
        """The link to a rank, if there is one."""
        return self.peers[peer].link

    def process_of(self, peer: int) -> int:
        """The process of a rank of this host, as the system knows it; 0: it is not known."""
        link = self.near(peer)
        return 0 if link is None else link.pid

    def near(self, peer: int) -> ShmLink | None:
        """The link to a rank, if it is in shared memory."""
        link = self.peers[peer].link
        return link if isinstance(link, ShmLink) else None

    # -- who is gone ------------------------------------------------------------------------------

    def lost(self) -> Mapping[int, str]:
        """The ranks that are lost, and why."""
        lost = self.endpoint.lost
        if not (self.gone or lost):
            return {}
        return {rank: lost[root] for root, rank in self.rank_of.items() if root in lost} | self.gone

    def has_lost(self, peer: int) -> bool:
        """Whether a rank is lost."""
        return peer in self.gone or self.ranks[peer] in self.endpoint.lost

    def why_lost(self, peer: int) -> PeerLostError | None:
        """Why nothing can be exchanged with a rank any more; None where it can."""
        reason = self.gone.get(peer) or self.endpoint.lost.get(self.ranks[peer])
        if reason is None:
            return None
        return PeerLostError(f"rank {peer} is lost: {reason}", ranks=[peer])

    def why_broken(self) -> PeerLostError | None:
        """Why no collective can be completed any more: the ranks that are lost; None: none is."""
        lost = self.lost()
        text = "; ".join(f"rank {rank} is lost: {reason}" for rank, reason in lost.items())
        return PeerLostError(text, ranks=lost) if lost else None

    def error(self, cls: type[AiodistError], message: str, **fields: Any) -> AiodistError:
        """An error that says where it happened."""
        return cls(message, group=self.group, epoch=self.epoch, **fields)
