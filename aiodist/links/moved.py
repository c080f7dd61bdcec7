"""Counts of what the ranks of a membership call and move."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeAlias

from aiodist.compiled import core
from aiodist.links.peer import Peer
from aiodist.transports.base import Link


class MovedCounts:
    """Counts of bytes. The compiled part has the same, and adds to them."""

    __slots__ = ("received", "sent")

    sent: int
    """Sent to others, or shown to them."""
    received: int
    """Received, or read."""


if TYPE_CHECKING:
    CoreCounts: TypeAlias = MovedCounts
else:
    CoreCounts = MovedCounts if core is None else core.Counts


class Moved(CoreCounts):
    """Counts that begin at 0."""

    __slots__ = ()

    def __init__(self) -> None:
        self.sent = 0
        self.received = 0

    def add(self, sent: int, received: int) -> None:
        """Count further bytes."""
        self.sent += sent
        self.received += received


class Traffic:
    """What the groups of one membership have called and moved. `peers`: those that are not
    forgotten, by root."""

    def __init__(self, peers: Mapping[int, Peer]) -> None:
        self.moved = Moved()  # payload bytes through shared memory
        self.called = 0  # collectives in contexts that have ended
        self.saved = 0  # bytes that did not have to be sent, because codecs made them fewer
        self._peers = peers
        self._gone: defaultdict[str, Moved] = defaultdict(Moved)
        """The counts of links to forgotten peers, by transport."""

    def keep(self, link: Link) -> None:
        """Keep the counts of a link whose peer is forgotten."""
        self._gone[link.kind].add(link.sent_bytes, link.received_bytes)

    @property
    def payload(self) -> tuple[int, int]:
        """Payload bytes sent and received so far, over all links and through shared memory.

        Safe to read from any thread.
        """
        moved = self.by_transport.values()
        return sum([sent for sent, _ in moved]), sum([received for _, received in moved])

    @property
    def by_transport(self) -> dict[str, tuple[int, int]]:
        """The `payload` by transport. "memory" is shared memory."""
        found = {"memory": (self.moved.sent, self.moved.received)}
        found |= {kind: (gone.sent, gone.received) for kind, gone in list(self._gone.items())}
        for peer in list(self._peers.values()):
            if (link := peer.link) is not None:
                sent, received = found.get(link.kind, (0, 0))
                found[link.kind] = sent + link.sent_bytes, received + link.received_bytes
        return found
