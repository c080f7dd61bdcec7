"""How all living ranks of a group hear of verdicts, even if some die or are cut off meanwhile.

A rank that gives a collective up tells all ranks that it can reach, and names those that it cannot.
Each rank that hears it passes it on to these. If a rank is lost, the others pass on its last
verdicts, because it may have died before it had told everyone.

A rank that leaves passes on the newest verdicts that it heard, because they may be why it leaves.
Others may hear of a verdict later than of the leave: they have a link to this rank, and perhaps
none yet to the one that gave up. Ranks without a link hear of the leave from the coordinator. They
wait a moment for a verdict before they fail (`Ends`).
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
"""How many of the last verdicts of a rank are kept, to pass them on when it is lost."""
NEWEST = 8
"""How many verdicts a rank that leaves passes on to each other rank."""


class VerdictRelay:
    """Tells the verdicts of one rank of a group, and passes on those of others."""

    def __init__(self, party: Party) -> None:
        self._party = party
        self._heard: dict[int, deque[tuple[Key, Verdict]]] = {}
        self._newest: dict[Key, Verdict] = {}  # of all ranks, the newest last

    def tell(self, key: Key, verdict: Verdict) -> None:
        """Tell all other ranks."""
        self._tell(key, verdict, range(self._party.size))

    def hear(self, src: int, key: Key, fields: Sequence[Any]) -> Verdict:
        """Return the verdict in an ABORT frame of `src`, whose rest is `fields`. Raises
        ProtocolError."""
        verdict, untold = Verdict.parse(fields, self._party.size)
        self._heard.setdefault(src, deque(maxlen=KEPT)).append((key, verdict))
        self._newest.pop(key, None)
        self._newest[key] = verdict
        if len(self._newest) > NEWEST:
            del self._newest[next(iter(self._newest))]
        self._tell(key, verdict, [peer for peer in untold if peer != src])
        return verdict

    def lose(self, src: int) -> None:
        """Pass on the verdicts of `src`, which is lost."""
        for key, verdict in self._heard.pop(src, ()):
            self._tell(key, verdict, range(self._party.size))

    def leave(self, *, abort: bool) -> None:
        """Pass on the newest verdicts that were heard, because this rank leaves the group."""
        # Without `abort`, make no links for that, because ranks without a link may be busy. A rank
        # that leaves in order would wait until they have taken its frames.
        party = self._party
        peers = [peer for peer in range(party.size) if not party.has_lost(peer)]
        for key, verdict in self._newest.items():
            self._tell(key, verdict, peers, dial=abort)

    def clear(self) -> None:
        """Forget everything, because the group has ended here."""
        self._heard.clear()
        self._newest.clear()

    def _tell(self, key: Key, verdict: Verdict, peers: Sequence[int], *, dial: bool = True) -> None:
        party = self._party
        lost = party.endpoint.lost
        # These are lost to this rank, but may be alive and reachable for others. So the others are
        # asked to tell them.
        untold = [peer for peer in peers if party.ranks[peer] in lost]
        header = pack_fields(kinds.ABORT, party.id, *key, *verdict.fields(), untold)
        for peer in peers:
            if peer != party.rank and peer not in untold:
                party.peers[peer].send(header, urgent=True, dial=dial)
