"""What an operation needs of the group that it belongs to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, TypeVar

from aiodist.errors import ProtocolError
from aiodist.links.party import Party

Op = TypeVar("Op", contravariant=True)


class Host(Protocol[Op]):
    """The collectives of a group, as one of them, of type `Op`, sees them. `party` leads to the
    other ranks."""

    party: Party
    pushes: int
    """Most bytes that go to a peer before it has granted them. 0: ranks are near each other, and
    wait for the grant."""

    def may_send(self, op: Op, peer: int, nbytes: int) -> bool:
        """Whether `nbytes` may go to `peer`, of which nobody knows whether it has entered `op`.
        If not, `admitted` is called in due course."""
        ...

    def may_push(self, op: Op, peer: int, nbytes: int) -> bool:
        """Whether `nbytes` may go to `peer` that it has not granted yet. If not, its grant comes in
        due course."""
        ...

    def refund(self, op: Op, peer: int) -> None:
        """`peer` has entered `op`, and has granted all that has gone to it."""
        ...

    def finished(self, op: Op, result: Any) -> None: ...

    def failed(self, op: Op, error: BaseException) -> None: ...

    def blame(self, op: Op, src: int, error: ProtocolError) -> None:
        """A frame that came of `src` for `op` before this was known makes no sense."""
        ...

    def differ(self, op: Op, others: Mapping[int, bytes]) -> None:
        """Others called something else."""
        ...
