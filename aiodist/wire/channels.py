"""What participants of a channel of weights say of themselves, and the names of their groups.

The coordinator shows these. All else in the store of a channel is for its participants alone.

Each participant is a group of one, and all of them share a store (`aiodist.channels.store`).
With each sign of life a participant writes there how far it is. So showing a channel costs the
participants nothing, and a participant that is gone writes no more.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Annotated, Any

import msgpack

from aiodist.wire import schema
from aiodist.wire.limits import MAX_VALUE

_OWN = re.compile(r"channel (?P<channel>.+)/(?P<who>[0-9a-f]{24})", re.DOTALL)
_PAIR = re.compile(r"channel (?P<channel>.+)/[0-9a-f]{24}/[0-9a-f]{16}", re.DOTALL)

_Version = Annotated[int | None, schema.optional(schema.integer(0, 2**62))]
_Bytes = Annotated[int, schema.integer(0, 2**62)]

PUBLISHER = "publisher"
"""The key with the publishers: a list of arrays, whose first field is an id."""

RELEASES = "releases"
"""The key with the versions that exist: a list of arrays that begin with the fields of
`aiodist.channels.directory.Release`."""

PUBLISHED = "published"
"""The key with what was published last, as in RELEASES.

The coordinator writes it, and keeps it while the channel is empty, because version numbers only
grow. It is deleted to begin anew.
"""

_CHECK = 5
"""How many fields of a release identify it. The next two are its share, and the number of
shares."""


class Said(schema.Struct):
    """How far a participant is.

    `publishes`: it is a publisher. `version`: the last one that it has published, or that its
    program has got. `newest`: the newest that it knows of. That has `nbytes` bytes, of which `here`
    have come. `behind`: seconds since it first heard of a version newer than `version`. `memory`:
    bytes of versions in its own memory. `sent` to other participants and `received` from them:
    bytes since it came, without mapped memory.

    Of differences: `saved` bytes did not have to come here since it came. `changed`: the share of
    its last version that had changed, as a publisher has found out. `chain`: how many differences
    brought the last version here; 0: it came whole. `fallbacks`: chunks since it came that no
    difference brought, and that came whole instead.

    `whole`: bytes of `here` that are of the version as a whole. The others are of slices of it.
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
    whole: _Bytes = 0


def that_may_have(
    heard: Mapping[str, Said | None], version: int, more_than: int | None = None
) -> set[str]:
    """Return which participants may have more than so many bytes of a whole version, by what they
    have said (None: it cannot be read). `more_than` None: any of it, or slices of it."""
    return {who for who, said in heard.items() if _may_have(said, version, more_than)}


def _may_have(said: Said | None, version: int, more_than: int | None) -> bool:
    if said is None or said.newest is None or said.newest < version:
        return True  # it had not heard of the version when it said this
    if said.newest == version:
        return said.here > 0 if more_than is None else said.whole > more_than
    if said.publishes:
        return said.version is not None  # it keeps some versions
    # A subscriber forgets versions that are older than the one that its program has got.
    return said.version is None or said.version <= version


def store_of(channel: str) -> str:
    """Return the name of the store that the participants of a channel share.

    It is also the name of each participant whose program gives it none.
    """
    return f"channel {channel}"


def own_group(channel: str, who: str) -> str:
    """Return the name of the group of one that is a participant.

    A group in which another participant takes a version from it adds a slash and a number.
    """
    return f"channel {channel}/{who}"


def participant_in(group: str) -> tuple[str, str] | None:
    """Return the channel and the id of the participant that a group is, or None."""
    found = _OWN.fullmatch(group)
    return None if found is None else (found["channel"], found["who"])


def channel_of(group: str) -> str:
    """Return the channel that a group belongs to, or ""."""
    # By the name, because a group of two outlives the participant that it is named after.
    found = _PAIR.fullmatch(group) or _OWN.fullmatch(group)
    return "" if found is None else found["channel"]


def at(who: str) -> str:
    """Return the key with what a participant has said. It exists as long as the participant
    does."""
    return f"at/{who}"


def said_in(value: bytes | None) -> Said | None:
    """Return what a key of `at` says, or None if it cannot be read."""
    if value is None:
        return None
    try:
        said: Said = schema.build(Said, msgpack.unpackb(value))
    # msgpack raises half a dozen unrelated types, and a member has written the bytes
    except Exception:
        return None
    return said


def published(before: bytes | None, releases: bytes) -> bytes | None:
    """Return the value of PUBLISHED after these `releases`. It never goes back.

    It has the newest version of which all shares were published, and shares of newer versions.
    """
    found: dict[tuple[int, int, int], Any] = {}
    try:
        for value in (before, releases):
            for one in [] if value is None else msgpack.unpackb(value):
                version, (share, shares) = one[0], one[_CHECK : _CHECK + 2]
                found[int(version), int(shares), int(share)] = one[: _CHECK + 2]
    except Exception:  # whatever msgpack raises for the bytes of a member
        return before
    there = Counter((version, shares) for version, shares, _ in found)
    whole = max((one[0] for one, count in there.items() if count == one[1]), default=-1)
    last = {key[1:]: one for key, one in sorted(found.items()) if key[0] > whole}  # of each share
    packed = schema.pack([*(one for key, one in found.items() if key[0] == whole), *last.values()])
    return packed if len(packed) <= MAX_VALUE else before


def publishers_in(value: bytes | None) -> frozenset[str]:
    """Return the ids in the value of `PUBLISHER`, as far as it can be read."""
    if value is None:
        return frozenset()
    try:
        return frozenset([one[0] for one in msgpack.unpackb(value) if type(one[0]) is str])
    except Exception:  # whatever msgpack raises for the bytes of a member
        return frozenset()
