"""What the parts of a group's engine need of the group that they work for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar

from aiodist.errors import ProtocolError
from aiodist.links.endpoint import Endpoint

Op = TypeVar("Op", contravariant=True)


class Party(Protocol):
    """The ranks of one group, as one of them sees them and reaches them.

    `rank` is this one, and there are `size` of them. `ranks` says by which root the endpoint knows
    each of them, and `id` marks the frames of this group among all that go over its links.
    """

    id: bytes
    rank: int
    size: int
    ranks: tuple[int, ...]
    endpoint: Endpoint


class Host(Protocol[Op]):
    """What an operation, of type `Op`, needs of its context."""

    def send_message(self, op: Op, peer: int, slot: int, views: Sequence[memoryview]) -> None: ...

    def settle(self, dst: int, token: object) -> None:
        """What was sent to `dst` for the operation `token`, and has left, is not read any more."""
        ...

    def send_grant(self, op: Op, peer: int, upto: int) -> None: ...

    def may_send(self, op: Op, peer: int, nbytes: int) -> bool:
        """Whether `nbytes` may go to `peer`, of which nobody knows whether it has entered `op`.
        If not, `admitted` is called in due course."""
        ...

    def refund(self, op: Op, peer: int) -> None:
        """`peer` has entered `op`."""
        ...

    def finished(self, op: Op, result: Any) -> None: ...

    def failed(self, op: Op, error: BaseException) -> None: ...

    def blame(self, op: Op, src: int, error: ProtocolError) -> None:
        """A frame that came of `src` for `op` before this was known makes no sense."""
        ...

    def differ(self, op: Op, others: Mapping[int, bytes]) -> None:
        """Others called something else."""
        ...

    def why_lost(self, peer: int) -> BaseException | None:
        """Why nothing can be exchanged with `peer` any more, or None."""
        ...
