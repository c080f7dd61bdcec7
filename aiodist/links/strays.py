"""Frames for groups that are not made here yet.

Ranks do not make a group at the same moment: who has it first may use it at once, and its frames
come to ranks that do not know of that group. They cannot be refused, as they are not sent again;
and nobody here can tell them from frames for a group that will never be. So they are kept, and what
is kept is bounded twice.

**By peer**, in bytes (`peer.MAX_EARLY_BYTES`): who sends more than that is lost.

**By group**, here. A group may never be made: its call was cancelled on this rank, say, while the
others had begun. Each of them leaves some frames behind. A program that goes on like that for days
would have well-behaved peers come to that limit, and lose them. So of many groups the one that has
waited longest is given up. That is wrong only where a rank has a thousand groups still to make that
its peers use already; then what they sent first is missing, and the call runs into its deadline.
"""

from __future__ import annotations

from collections import OrderedDict

from aiodist.links.peer import Stray

MOST_GROUPS = 1024
"""Groups whose frames are kept. Each leaves a few frames of each peer, of about 1 KiB as
`peer.STRAY_COST` has it, so this is well below `peer.MAX_EARLY_BYTES`."""


class Strays:
    """Stray frames by the id of their context, the context that has waited longest first."""

    def __init__(self) -> None:
        self._kept: OrderedDict[bytes, list[Stray]] = OrderedDict()

    def keep(self, context: bytes, stray: Stray) -> list[Stray]:
        """Keep one more; those that are dropped in its place."""
        self._kept.setdefault(context, []).append(stray)
        return [] if len(self._kept) <= MOST_GROUPS else self._kept.popitem(last=False)[1]

    def take(self, context: bytes) -> list[Stray]:
        """Frames of a context that is there now, in the order in which they came."""
        return self._kept.pop(context, [])

    def forget(self, root: int) -> None:
        """Drop what a peer has sent that is none any more."""
        for context, strays in list(self._kept.items()):
            strays[:] = [stray for stray in strays if stray.rank != root]
            if not strays:
                del self._kept[context]
