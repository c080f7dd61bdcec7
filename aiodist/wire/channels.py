"""What participants of a channel of weights say of themselves, and how their groups are called: for
who watches a coordinator. All else in the store of a channel is for its participants alone.

Each participant is a group of one, and all of these have a store in common
(`aiodist.channels.participant`). There it says with each sign of life how far it is: so whoever
looks at the coordinator costs the participants nothing, and who is gone says no more.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Annotated, Any

import msgpack

from aiodist.wire import schema
from aiodist.wire.limits import MAX_VALUE

_OWN = re.compile(r"channel (?P<channel>.+)/(?P<who>[0-9a-f]{24})", re.DOTALL)
_PAIR = re.compile(r"channel (?P<channel>.+)/[0-9a-f]{24}/[0-9a-f]{16}", re.DOTALL)

_Version = Annotated[int | None, schema.optional(schema.integer(0, 2**62))]
_Bytes = Annotated[int, schema.integer(0, 2**62)]

PUBLISHER = "publisher"
"""The key with those who publish: a list of arrays, the first field of which is an id."""

RELEASES = "releases"
"""The key with the versions that there are: a list of arrays, which begin with the fields of
`aiodist.channels.directory.Release`."""

PUBLISHED = "published"
"""The key with what was published last, as in RELEASES. The coordinator writes it and keeps it when
the channel is empty, because numbers only grow. It is deleted to begin anew."""

_CHECK = 5
"""So many fields of a release say what it is. The next two say which share it is, of how many."""


class Said(schema.Struct):
    """How far a participant is.

    `publishes`: whether it is one who publishes. `version`: the last one that it has published, or
    that its program was given. `newest`: the newest that it knows of; that has `nbytes`, of which
    so many are `here`. `behind`: seconds since it heard first of a version newer than `version`.
    `memory`: bytes of versions in memory of its own. `sent` to other participants, and `received`
    from them: bytes since it came, without those that are mapped.

    Of differences: `saved` bytes did not have to come here since it came. `changed`: the share of
    its last version that had changed, as a publisher has found out. `chain`: how many differences
    brought the last version here; 0: it came whole. `fallbacks`: chunks since it came that no
    difference brought, and that came whole instead.
    """

    publishes: Annotated[bool, schema.flag]
    version: _Version
    newest: _Version
    nbytes: _Bytes
    here: _Bytes
    behind: Annotated[float, schema.seconds(0.0)]
    memory: _Bytes
    sent: _Bytes
    received: _Bytes
    saved: _Bytes = 0
    changed: Annotated[float, schema.seconds(0.0)] = 0.0
    chain: Annotated[int, schema.integer(0, 2**31)] = 0
    fallbacks: Annotated[int, schema.integer(0, 2**62)] = 0


def store_of(channel: str) -> str:
    """The name of the store that the participants of a channel have in common; and of each of them,
    if its program gives it none."""
    return f"channel {channel}"


def own_group(channel: str, who: str) -> str:
    """The group of one that a participant is. A group in which another one takes a version from it
    has that name, a slash, and a number."""
    return f"channel {channel}/{who}"


def participant_in(group: str) -> tuple[str, str] | None:
    """The channel and the id of the participant that a group is; None: it is none."""
    found = _OWN.fullmatch(group)
    return None if found is None else (found["channel"], found["who"])


def channel_of(group: str) -> str:
    """The channel that a group belongs to; "": it belongs to none."""
    # By its name: a group of two outlives the participant that it is named after, if that is lost.
    found = _PAIR.fullmatch(group) or _OWN.fullmatch(group)
    return "" if found is None else found["channel"]


def at(who: str) -> str:
    """The key with what a participant has said: it exists as long as that one is there."""
    return f"at/{who}"


def said_in(value: bytes | None) -> Said | None:
    """What a key of `at` says; None: nothing that can be read."""
    if value is None:
        return None
    try:
        said: Said = schema.build(Said, msgpack.unpackb(value))
    except Exception:  # msgpack raises half a dozen unrelated types, for what a member has written
        return None
    return said


def published(before: bytes | None, releases: bytes) -> bytes | None:
    """The value of PUBLISHED once there are these `releases`: the newest version of which all
    shares were published, and shares of newer ones. It never goes back."""
    found: dict[tuple[int, int, int], Any] = {}
    try:
        for value in (before, releases):
            for one in [] if value is None else msgpack.unpackb(value):
                version, (share, shares) = one[0], one[_CHECK : _CHECK + 2]
                found[int(version), int(shares), int(share)] = one[: _CHECK + 2]
    except Exception:  # whatever msgpack raises for what a member has written
        return before
    there = Counter((version, shares) for version, shares, _ in found)
    whole = max((one[0] for one, count in there.items() if count == one[1]), default=-1)
    last = {key[1:]: one for key, one in sorted(found.items()) if key[0] > whole}  # of each share
    packed = schema.pack([*(one for key, one in found.items() if key[0] == whole), *last.values()])
    return packed if len(packed) <= MAX_VALUE else before


def publishers_in(value: bytes | None) -> frozenset[str]:
    """The ids in the value of `PUBLISHER`, as far as it can be read."""
    if value is None:
        return frozenset()
    try:
        return frozenset([one[0] for one in msgpack.unpackb(value) if type(one[0]) is str])
    except Exception:  # whatever msgpack raises for what a member has written
        return frozenset()
