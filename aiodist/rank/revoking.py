"""Ending a group for all of its ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from aiodist.errors import AiodistError, GroupRevokedError, ProtocolError
from aiodist.wire import kinds


class Revocable(Protocol):
    """A group that can be ended. `ended` is what has ended it here, if anything did."""

    rank: int
    size: int
    ended: AiodistError | None

    def say(self, peer: int, kind: int, *fields: Any) -> None:
        """Sends `peer` a word."""
        ...

    def error(self, cls: type[AiodistError], message: str) -> AiodistError:
        """Returns an error that says where it happened."""
        ...

    def close(self, error: AiodistError) -> None:
        """Fails all that is pending, and whatever is called later, with `error`."""
        ...


def revoke(context: Revocable, by: int) -> None:
    """Rank `by` has revoked the group: fail everything, and pass the word on.

    Everybody tells everybody, so that all who live hear it, whoever dies meanwhile.
    """
    if context.ended is not None:
        return
    for peer in range(context.size):
        if peer != context.rank:
            context.say(peer, kinds.REVOKE, by)
    who = "this rank" if by == context.rank else f"rank {by}"
    text = f"{who} revoked the group: go on with shrink() or rendezvous(), or close it"
    context.close(context.error(GroupRevokedError, text))


def heard(context: Revocable, fields: Sequence[Any]) -> None:
    """A REVOKE frame has come. Raises ProtocolError."""
    if len(fields) != 3 or type(fields[2]) is not int or not 0 <= fields[2] < context.size:
        raise ProtocolError("a REVOKE frame ends in a rank")
    if fields[2] == context.rank and context.ended is None:
        raise ProtocolError("a REVOKE of this rank, which has not revoked the group")
    revoke(context, fields[2])
