"""How the ranks of a group hear of verdicts: all who live, whoever dies or is cut off meanwhile.

Who gives a collective up tells everybody it can reach, and names those it cannot: whoever hears of
it passes it on to them. And when a rank is lost, the others pass on what it told them last, since
it may have died before it had told all.

Who leaves passes on what it heard last. That may be why it leaves, and others may hear of it later
than that it has left: they have a link to it, and none yet to who gave up.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from aiodist.engine.early import Key
from aiodist.engine.failures import Verdict
from aiodist.links.party import Party
from aiodist.wire import kinds
from aiodist.wire.frames import pack_fields

KEPT = 32
"""So many of the last verdicts that a rank told are kept, to be passed on when it is lost."""


class VerdictRelay:
    """Tells the verdicts of one rank of a group, and passes on those of others."""

    def __init__(self, party: Party) -> None:
        self._party = party
        self._heard: dict[int, deque[tuple[Key, Verdict]]] = {}
        self._last: tuple[Key, Verdict] | None = None  # of all that were heard

    def tell(self, key: Key, verdict: Verdict) -> None:
        """Tell all other ranks."""
        self._tell(key, verdict, range(self._party.size))

    def hear(self, src: int, key: Key, fields: Sequence[Any]) -> Verdict:
        """The verdict in an ABORT frame of `src`, whose rest is `fields`. Raises ProtocolError."""
        verdict, untold = Verdict.parse(fields, self._party.size)
        self._last = key, verdict
        self._heard.setdefault(src, deque(maxlen=KEPT)).append(self._last)
        self._tell(key, verdict, [peer for peer in untold if peer != src])
        return verdict

    def lose(self, src: int) -> None:
        """`src` is lost."""
        for key, verdict in self._heard.pop(src, ()):
            self._tell(key, verdict, range(self._party.size))

    def leave(self, *, abort: bool) -> None:
        """This rank leaves the group, and has not told the others yet."""
        # Without `abort` those without a link are left out, because a rank that leaves in order
        # waits until all that it has said was taken, and they may be busy.
        if self._last is not None:
            party = self._party
            peers = [peer for peer in range(party.size) if abort or party.link(peer) is not None]
            self._tell(*self._last, [peer for peer in peers if not party.has_lost(peer)])

    def clear(self) -> None:
        """The group has ended here."""
        self._heard.clear()

    def _tell(self, key: Key, verdict: Verdict, peers: Sequence[int]) -> None:
        party = self._party
        lost = party.endpoint.lost
        # They are lost to this rank, but may live, and be reached by others: so these are asked to
        # pass it on.
        untold = [peer for peer in peers if party.ranks[peer] in lost]
        header = pack_fields(kinds.ABORT, party.id, *key, *verdict.fields(), untold)
        for peer in peers:
            if peer != party.rank and peer not in untold:
                party.peers[peer].send(header, urgent=True)
