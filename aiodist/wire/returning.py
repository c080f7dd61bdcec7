"""Control messages of members that come back: to a coordinator that was away, or over a new
connection."""

from __future__ import annotations

from typing import Annotated

from aiodist.wire import schema
from aiodist.wire.messages import JoinRequest, Message, Rank, Ranks, View
from aiodist.wire.recovery import Heard

MAX_HEARD = 64
"""Most outcomes of ballots that a member tells."""


class Rejoin(Message, code=24):
    """Says to a coordinator that came back, or over a new connection, that the sender is rank
    `rank` of the view with this epoch and digest. `ask`: what it had asked for; `lost`, `left`:
    ranks of which it was told; `heard`: outcomes of ballots of which it was told, the oldest first.

    Replies: Rejoined; ViewWanted, then it is said again with `view`; Later, then it is said again
    after a moment; Evicted: it is no member any more.
    """

    ask: Annotated[JoinRequest, schema.struct(JoinRequest)]
    rank: Rank
    epoch: Annotated[int, schema.integer(1, 2**61)]
    digest: Annotated[bytes, schema.blob(16)]
    lost: Ranks
    left: Ranks
    view: Annotated[View | None, schema.optional(schema.struct(View))] = None
    heard: Annotated[tuple[Heard, ...], schema.sequence(schema.struct(Heard), MAX_HEARD)] = ()


class Rejoined(Message, code=25):
    """The answer to Rejoin: the sender is a member again. `lost`, `left`: all ranks that are gone
    from its view. Where the group has gone on to another view, of which it is a member, too, these
    are empty, and that view is the answer to the vote that it has under way."""

    lost: Ranks
    left: Ranks


class ViewWanted(Message, code=26):
    """The answer to Rejoin of a coordinator that does not know the view: the member is to say
    it."""


class Later(Message, code=27):
    """The answer to Rejoin where another member has been asked for the view: come again."""
