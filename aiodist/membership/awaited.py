"""What a member waits for at the coordinator: votes of others, members to join, keys of the store.

The coordinator knows that itself, so it can tell of members whose event loop does not turn, too.
Seconds count from when it was asked; anew after a restart.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from aiodist.membership.ballots import Ballot
from aiodist.membership.culprits import Waiting
from aiodist.membership.group import Group
from aiodist.wire.activity import bits_of
from aiodist.wire.recovery import Purpose

MOST_KEYS = 3
"""So many keys of one wait are named."""
MOST_TEXT = 64
"""Most characters of a key that are shown."""


def waits_of(group: Group, conn: int, now: float) -> Iterator[Waiting]:
    """What `conn`, a member of `group`, waits for."""
    for ballot in group.ballots.of(conn):
        _, vote = ballot.votes[conn]
        yield Waiting(
            key=(vote.context, f"{vote.purpose}", None),
            what=f"{vote.purpose} #{vote.number}",
            seconds=now - ballot.since[conn],
            missing=bits_of(_not_voted(group, ballot)),
            lacking=_joiners_text(group, ballot),
        )
    # No rank is known to owe a key, and who sets it need not be a rank at all.
    for since, keys in group.store.waits(conn):
        yield Waiting((b"", "store.wait", None), "store.wait", now - since, 0, _keys_text(keys))


def _not_voted(group: Group, ballot: Ballot) -> list[int]:
    """The ranks of those who have not voted; also who may come back to do so."""
    conns = group.ballots.missing(group.members, ballot.key)
    return [
        *[group.members[conn].rank for conn in conns],
        *[group.ranks[one] for one in ballot.waits_for(group.absent)],
    ]


def _joiners_text(group: Group, ballot: Ballot) -> str:
    """How many have to join a rendezvous that all members have called; else ""."""
    if ballot.purpose is not Purpose.RENDEZVOUS or _not_voted(group, ballot):
        return ""
    least, _ = group.bounds(ballot)
    more = least - len(group.members) - len(group.joiners)
    if more < 1:  # the join window is open
        return ""
    return f"{more} more {'has' if more == 1 else 'have'} to join"


def _keys_text(keys: Sequence[str]) -> str:
    """ "key 'weights' is not set"."""
    named = [repr(key if len(key) <= MOST_TEXT else f"{key[:MOST_TEXT]}...") for key in keys]
    if len(named) == 1:
        return f"key {named[0]} is not set"
    more = len(named) - MOST_KEYS
    others = f" and {more} more" if more > 0 else ""
    return f"keys {', '.join(named[:MOST_KEYS])}{others} are not set"
