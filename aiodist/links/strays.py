"""Frames for groups that do not exist here yet.

Ranks do not make a group at the same moment. The first may use it at once, and its frames come to
ranks that do not know the group. Such frames cannot be refused, because they are not sent again.
And they look like frames for a group that will never exist. So they are kept, within two bounds.

**By peer**, in bytes (`peer.MAX_EARLY_BYTES`): a peer that sends more is lost.

**By group**, here. A group may never be made, for example if its call was cancelled on this rank
after others had begun. Each such group leaves some frames behind. In a program that goes on like
that for days, well-behaved peers would reach their limit and be lost. So with too many groups the
oldest one is given up. That is wrong only if a rank has a thousand groups still to make that its
peers use already. The call then misses frames, and runs into its deadline.
"""

from __future__ import annotations

from collections import OrderedDict

from aiodist.links.peer import Stray

MOST_GROUPS = 1024
"""How many groups' frames are kept. A group leaves a few frames of each peer, of about 1 KiB with
`peer.STRAY_COST`, so this stays well below `peer.MAX_EARLY_BYTES`."""


class Strays:
    """Stray frames by the id of their context, the oldest context first."""

    def __init__(self) -> None:
        self._kept: OrderedDict[bytes, list[Stray]] = OrderedDict()

    def keep(self, context: bytes, stray: Stray) -> list[Stray]:
        """Keep one more frame. Returns those that are dropped instead."""
        self._kept.setdefault(context, []).append(stray)
        return [] if len(self._kept) <= MOST_GROUPS else self._kept.popitem(last=False)[1]

    def take(self, context: bytes) -> list[Stray]:
        """Return the frames of a context that exists now, in the order in which they came."""
        return self._kept.pop(context, [])

    def forget(self, root: int) -> None:
        """Drop the frames of a peer that is forgotten."""
        for context, strays in list(self._kept.items()):
            strays[:] = [stray for stray in strays if stray.rank != root]
            if not strays:
                del self._kept[context]
