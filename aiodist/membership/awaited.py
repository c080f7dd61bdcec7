"""What a member waits for at the coordinator: votes, joining members, or keys of the store.

The coordinator knows this itself. So it can tell even if the event loop of the member is blocked.
Seconds count from the member's request, and start again after a restart of the coordinator.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from aiodist.membership.ballots import Ballot
from aiodist.membership.culprits import PendingOperation
from aiodist.membership.group import GroupState
from aiodist.wire.activity import bits_of
from aiodist.wire.recovery import Purpose

MOST_KEYS = 3
"""The number of keys of one wait that a text names."""
MOST_TEXT = 64
"""The number of characters of a key that a text shows."""


def waits_of(group: GroupState, conn: int, now: float) -> Iterator[PendingOperation]:
    """Yield what `conn`, a member of `group`, waits for."""
    for ballot in group.ballots.of(conn):
        _, vote = ballot.votes[conn]
        yield PendingOperation(
            key=(vote.context, f"{vote.purpose}", None),
            what=f"{vote.purpose} #{vote.number}",
            seconds=now - ballot.since[conn],
            missing=bits_of(_not_voted(group, ballot)),
            lacking=_joiners_text(group, ballot),
        )
    # No rank is known to owe a key, because any process may set it.
    for since, keys in group.store.waits(conn):
        yield PendingOperation(
            (b"", "store.wait", None), "store.wait", now - since, 0, _keys_text(keys)
        )


def _not_voted(group: GroupState, ballot: Ballot) -> list[int]:
    """The ranks that have not voted, including absent ones that may come back to do so."""
    conns = group.ballots.missing(group.members, ballot.key)
    return [
        *[group.members[conn].rank for conn in conns],
        *[group.ranks[one] for one in ballot.waits_for(group.absent)],
    ]


def _joiners_text(group: GroupState, ballot: Ballot) -> str:
    """How many more processes have to join a rendezvous that all members have called; else ""."""
    if ballot.purpose is not Purpose.RENDEZVOUS or _not_voted(group, ballot):
        return ""
    least, _ = group.bounds(ballot)
    more = least - len(group.members) - len(group.joiners)
    if more < 1:  # the join window is open
        return ""
    return f"{more} more {'has' if more == 1 else 'have'} to join"


def _keys_text(keys: Sequence[str]) -> str:
    """For example "key 'weights' is not set"."""
    named = [repr(key if len(key) <= MOST_TEXT else f"{key[:MOST_TEXT]}...") for key in keys]
    if len(named) == 1:
        return f"key {named[0]} is not set"
    more = len(named) - MOST_KEYS
    others = f" and {more} more" if more > 0 else ""
    return f"keys {', '.join(named[:MOST_KEYS])}{others} are not set"
