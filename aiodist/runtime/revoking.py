"""Ending a group for all of its ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from aiodist.errors import GroupRevokedError, ProtocolError
from aiodist.wire import kinds
from aiodist.wire.frames import pack_fields

if TYPE_CHECKING:
    from aiodist.runtime.context import Context


def revoke(context: Context, by: int) -> None:
    """Rank `by` has revoked the group: fail everything, and pass the word on.

    Everybody tells everybody, so that all who live hear it, whoever dies meanwhile.
    """
    if context.ended is not None:
        return
    header = pack_fields(kinds.REVOKE, context.id, by)
    for root in context.ranks:
        if root != context.endpoint.rank:
            context.endpoint.send(root, header, urgent=True)
    who = "this rank" if by == context.rank else f"rank {by}"
    text = f"{who} revoked the group: go on with shrink() or rendezvous(), or close it"
    context.close(context.error(GroupRevokedError, text))


def heard(context: Context, fields: Sequence[Any]) -> None:
    """A REVOKE frame has come. Raises ProtocolError."""
    if len(fields) != 3 or type(fields[2]) is not int or not 0 <= fields[2] < context.size:
        raise ProtocolError("a REVOKE frame ends in a rank")
    if fields[2] == context.rank and context.ended is None:
        raise ProtocolError("a REVOKE of this rank, which has not revoked the group")
    revoke(context, fields[2])
