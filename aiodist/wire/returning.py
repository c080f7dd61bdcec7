"""Control messages of members that come back: to a coordinator that was away, or over a new
connection."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from aiodist.wire.messages import JoinRequest, Message, Rank, Ranks, View, control_message
from aiodist.wire.recovery import Heard
from aiodist.wire.schema import blob, integer, optional, sequence, struct

MAX_HEARD = 64
"""Most outcomes of ballots that a member tells."""


@control_message(24)
@dataclass(frozen=True, slots=True)
class Rejoin(Message):
    """Says to a coordinator that came back, or over a new connection, that the sender is rank
    `rank` of the view with this epoch and digest. `ask`: what it had asked for; `lost`, `left`:
    ranks of which it was told; `heard`: outcomes of ballots of which it was told, the oldest first.

    Replies: Rejoined; ViewWanted, then it is said again with `view`; Later, then it is said again
    after a moment; Evicted: it is no member any more.
    """

    ask: Annotated[JoinRequest, struct(JoinRequest)]
    rank: Rank
    epoch: Annotated[int, integer(1, 2**61)]
    digest: Annotated[bytes, blob(16)]
    lost: Ranks
    left: Ranks
    view: Annotated[View | None, optional(struct(View))] = None
    heard: Annotated[tuple[Heard, ...], sequence(struct(Heard), MAX_HEARD)] = ()


@control_message(25)
@dataclass(frozen=True, slots=True)
class Rejoined(Message):
    """The answer to Rejoin: the sender is a member again. `lost`, `left`: all ranks that are gone
    from its view. Where the group has gone on to another view, of which it is a member, too, these
    are empty, and that view is the answer to the vote that it has under way."""

    lost: Ranks
    left: Ranks


@control_message(26)
@dataclass(frozen=True, slots=True)
class ViewWanted(Message):
    """The answer to Rejoin of a coordinator that does not know the view: the member is to say
    it."""


@control_message(27)
@dataclass(frozen=True, slots=True)
class Later(Message):
    """The answer to Rejoin where another member has been asked for the view: come again."""
