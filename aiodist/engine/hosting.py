"""What an operation needs of its group."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, TypeVar

from aiodist.errors import ProtocolError
from aiodist.links.party import Party

Op = TypeVar("Op", contravariant=True)


class Host(Protocol[Op]):
    """The collectives of a group, as an operation of type `Op` sees them. `party` leads to other
    ranks."""

    party: Party
    pushes: int
    """The most bytes that go to a peer before it grants them. 0: ranks are near, and wait for the
    grant."""

    def may_send(self, op: Op, peer: int, nbytes: int) -> bool:
        """Returns whether `nbytes` may go to `peer`, which may not have entered `op`. If not,
        `admitted` is called later."""
        ...

    def may_push(self, op: Op, peer: int, nbytes: int) -> bool:
        """Returns whether `nbytes` may go to `peer` before its grant. If not, its grant comes
        later."""
        ...

    def goes_unasked(self, op: Op, peer: int, nbytes: int) -> None:
        """Counts `nbytes` that have gone to `peer`, although it may not have entered `op`."""
        ...

    def refund(self, op: Op, peer: int) -> None:
        """Notes that `peer` has entered `op`, and has granted everything that went to it."""
        ...

    def finished(self, op: Op, result: Any) -> None: ...

    def failed(self, op: Op, error: BaseException) -> None: ...

    def blame(self, op: Op, src: int, error: ProtocolError) -> None:
        """Fails `op`, because a frame that came earlier from `src` turns out to be nonsense."""
        ...

    def differ(self, op: Op, others: Mapping[int, bytes]) -> None:
        """Fails `op`, because other ranks called something else."""
        ...
