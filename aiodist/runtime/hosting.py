"""What an operation needs of its context."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from aiodist.errors import ProtocolError

if TYPE_CHECKING:
    from aiodist.runtime.operation import Operation


class Host(Protocol):
    """What an operation needs of its context."""

    def send_message(
        self, op: Operation, peer: int, slot: int, views: Sequence[memoryview]
    ) -> None: ...

    def settle(self, dst: int, token: object) -> None:
        """What was sent to `dst` for the operation `token`, and has left, is not read any more."""
        ...

    def send_grant(self, op: Operation, peer: int, upto: int) -> None: ...

    def may_send(self, op: Operation, peer: int, nbytes: int) -> bool:
        """Whether `nbytes` may go to `peer`, of which nobody knows whether it has entered `op`.
        If not, `admitted` is called in due course."""
        ...

    def refund(self, op: Operation, peer: int) -> None:
        """`peer` has entered `op`."""
        ...

    def finished(self, op: Operation, result: Any) -> None: ...

    def failed(self, op: Operation, error: BaseException) -> None: ...

    def blame(self, op: Operation, src: int, error: ProtocolError) -> None:
        """A frame that came of `src` for `op` before this was known makes no sense."""
        ...

    def differ(self, op: Operation, others: Mapping[int, bytes]) -> None:
        """Others called something else."""
        ...

    def turn(self, op: Operation) -> None:
        """Others have called `op` with arrays of the host: this rank does as they do."""
        ...

    def why_lost(self, peer: int) -> BaseException | None:
        """Why nothing can be exchanged with `peer` any more, or None."""
        ...
