"""Control messages of members that come back: to a restarted coordinator, or over a new
connection."""

from __future__ import annotations

from typing import Annotated

from aiodist.wire import schema
from aiodist.wire.messages import EpochView, JoinRequest, Message, Rank, Ranks
from aiodist.wire.recovery import Heard

MAX_HEARD = 64
"""The most outcomes of ballots that a member tells."""


class Rejoin(Message, code=24):
    """Claims to a coordinator that the sender is rank `rank` of the view with this epoch and
    digest.

    Sent to a coordinator that came back, or over a new connection. `ask` is the original request.
    `lost` and `left` are ranks that the member was told of, and `heard` outcomes of ballots, the
    oldest first. Replies: Rejoined; ViewWanted (send it again with `view`); Later (send it again
    after a moment); Evicted (it is no longer a member).
    """

    ask: Annotated[JoinRequest, schema.struct(JoinRequest)]
    rank: Rank
    epoch: Annotated[int, schema.integer(1, 2**61)]
    digest: Annotated[bytes, schema.blob(16)]
    lost: Ranks
    left: Ranks
    view: Annotated[EpochView | None, schema.optional(schema.struct(EpochView))] = None
    heard: Annotated[tuple[Heard, ...], schema.sequence(schema.struct(Heard), MAX_HEARD)] = ()


class Rejoined(Message, code=25):
    """The answer to Rejoin: the sender is a member again.

    `lost` and `left` are all ranks that are gone from its view. They are empty if the group has
    gone on to another view with this member. That view is then the answer to the vote that it has
    under way.
    """

    lost: Ranks
    left: Ranks


class ViewWanted(Message, code=26):
    """The answer to Rejoin if the coordinator does not know the view: the member has to send it."""


class Later(Message, code=27):
    """The answer to Rejoin if another member has been asked for the view: try again later."""
