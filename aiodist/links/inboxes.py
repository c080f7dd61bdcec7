"""The groups of a membership that frames are for: open ones, closed ones, and those not made yet.

**Not made yet.** Ranks do not make a group at the same moment. The first may use it at once, and
its frames come to ranks that do not know the group. Such frames cannot be refused, because they are
not sent again. And they look like frames for a group that will never exist. So they are kept,
within two bounds.

**By peer**, in bytes (`aiodist.links.peer.MAX_EARLY_BYTES`): a peer that sends more is lost.

**By group**, here. A group may never be made, for example if its call was cancelled on this rank
after others had begun. Each such group leaves some frames behind. In a program that goes on like
that for days, well-behaved peers would reach their limit and be lost. So with too many groups the
oldest one is given up. That is wrong only if a rank has a thousand groups still to make that its
peers use already. The call then misses frames, and runs into its deadline.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, Protocol

from aiodist.errors import AiodistError
from aiodist.transports.base import Landing
from aiodist.work import Work

MAX_CLOSED = 4096
"""How many closed groups are remembered, to tell their late frames from garbage."""
MOST_GROUPS = 1024
"""How many groups' frames are kept. A group leaves a few frames of each peer, of about 1 KiB with
`aiodist.links.peer.STRAY_COST`, so this stays well below `aiodist.links.peer.MAX_EARLY_BYTES`."""


class Inbox(Protocol):
    """Takes the frames of one group: a context."""

    ended: AiodistError | None
    ranks: tuple[int, ...]

    @property
    def id(self) -> bytes: ...

    @property
    def pending(self) -> list[Work[Any]]: ...

    def ruled(self) -> None:
        """Look again which ranks are lost, because the coordinator has ruled or never will."""
        ...

    def frame(self, root: int, fields: list[Any], nbytes: int) -> Landing | None: ...

    def rank_lost(self, root: int, reason: str) -> None: ...

    def close(self, error: AiodistError) -> None: ...


class StrayHome(Protocol):
    """The endpoint to which a stray frame came."""

    def keep(self, stray: Stray, /) -> None:
        """Keep it, because its payload has come, until its group is made."""
        ...


@dataclass(eq=False, slots=True)
class Stray:
    """A frame for a group that does not exist here yet: the landing of its payload."""

    home: StrayHome
    rank: int
    fields: list[Any]
    memory: memoryview
    cost: int

    def landed(self) -> None:
        self.home.keep(self)


class Inboxes:
    """The contexts of one endpoint, by the id in frames."""

    def __init__(self) -> None:
        self.open: dict[bytes, Inbox] = {}
        self.closed: OrderedDict[bytes, tuple[str, set[int]]] = OrderedDict()
        """The last MAX_CLOSED contexts that have ended, the reasons, and the peers that were
        answered."""
        self._strays: OrderedDict[bytes, list[Stray]] = OrderedDict()
        """Frames of contexts that do not exist yet, by their ids, the oldest context first."""

    def close(self, context: bytes, reason: str) -> None:
        """Drop further frames of a context, because it has ended."""
        self.open.pop(context, None)
        self.closed[context] = reason, set()
        if len(self.closed) > MAX_CLOSED:
            self.closed.popitem(last=False)

    def answer(self, context: bytes, root: int) -> str | None:
        """Return why a context has ended, for a frame of peer `root`; None if it was answered."""
        # Once, because a peer that sends without reading would fill this rank's memory with
        # answers.
        reason, answered = self.closed[context]
        if root in answered:
            return None
        answered.add(root)
        return reason

    def keep(self, context: bytes, stray: Stray) -> list[Stray]:
        """Keep one more frame. Returns those that are dropped instead."""
        self._strays.setdefault(context, []).append(stray)
        return [] if len(self._strays) <= MOST_GROUPS else self._strays.popitem(last=False)[1]

    def take(self, context: bytes) -> list[Stray]:
        """Return the frames of a context that exists now, in the order in which they came."""
        return self._strays.pop(context, [])

    def forget(self, root: int) -> None:
        """Drop the frames of a peer that is forgotten."""
        for context, strays in list(self._strays.items()):
            strays[:] = [stray for stray in strays if stray.rank != root]
            if not strays:
                del self._strays[context]
