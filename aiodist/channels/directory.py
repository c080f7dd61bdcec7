"""The records of a channel in its store, and decisions on them; no I/O.

They list the versions, the line of each version, and tell a participant from which others to take
it. A participant that wants a version goes to the end of its line, and takes the version from one
before it::

    publisher ──> p1 ──> p2 ──> p3        one on each host: a chain, in which all hand on
                   │                      each chunk as soon as they have it
                   ├──> p4 ──> p6         p4 and p5 are on the host of p1, and map its memory
                   └──> p5                p6 is on another one, and takes from the last before it

Weights may be published in shares by several processes. Then there is a `Release` for each share,
and a version is there when all of its shares are. A participant that wants slices of arrays
(`LinePlace.wants`) stands in the same line, and takes them from all that have some of them, the
nearest first.

No participant takes from one that came later, so there is no circle of participants that wait for
each other. If one is lost, those behind it take from those before it, and ask only for the chunks
that they lack. It may happen that no one before a participant has the version, but one behind it
has more than itself. Then it goes to the end of the line, and those that took from it ask others.
So the publisher sends a version once over the network, and again only what a participant had
received but not forwarded when it died.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import field
from typing import Annotated, Any, TypeVar

import msgpack

from aiodist.errors import ProtocolError
from aiodist.phases.base import as_int
from aiodist.wire import channels, schema
from aiodist.wire.messages import Name, NonEmptyName

MAX_VERSION = 2**62
"""The highest number of a version."""

MOST_RELEASES = 64
"""The most versions that a channel lists."""

MOST_SHARES = 1024
"""The most processes that publish one version in shares."""

MOST_IN_LINE = 4096
"""The most participants in one line, because a value of the store has room for that many. The first
ones are forgotten."""

ALIGNMENT = 64
"""In bytes. Arrays begin at multiples of this, and chunks are multiples of it."""

Size = Annotated[int, schema.integer(1, 2**50)]


class Release(schema.Struct):
    """A version, or one of its `shares`: a manifest of `manifest` bytes, and behind it the arrays.

    `nbytes`: of all of it. It is sent in parts: the manifest, and then chunks of `chunk` bytes.
    `check`: the CRC-32 of the manifest, which has those of the chunks. `lent`: the publisher has it
    in memory that other processes cannot map. Else participants on its `host` fetch the memory by
    `offer` and `key` (`aiodist.transports.handover`). `id`: random for each publish, for
    differences; empty if there are none. `always`: subscribers take differences even on a fast
    line.

    Releases are equal if their bytes are, wherever they are in memory, because a version may be
    published again after a failure.
    """

    version: Annotated[int, schema.integer(0, MAX_VERSION)]
    manifest: Size
    nbytes: Size
    chunk: Size
    check: Annotated[int, schema.integer(0, 2**32 - 1)]
    share: Annotated[int, schema.integer(0, MOST_SHARES - 1)] = 0
    shares: Annotated[int, schema.integer(1, MOST_SHARES)] = 1
    lent: Annotated[bool, schema.flag] = field(default=False, compare=False)
    host: Name = field(default="", compare=False)
    offer: Annotated[str, schema.text(128)] = field(default="", compare=False)
    key: Annotated[bytes, schema.blob(64)] = field(default=b"", compare=False)
    id: Annotated[bytes, schema.blob(16)] = field(default=b"", compare=False)
    always: Annotated[bool, schema.flag] = field(default=False, compare=False)

    @property
    def data(self) -> int:
        return aligned(self.manifest)

    @property
    def parts(self) -> int:
        return 1 + -(-(self.nbytes - self.data) // self.chunk)

    def span(self, part: int) -> tuple[int, int]:
        """The start and the end of a part."""
        if part == 0:
            return 0, self.manifest
        start = self.data + (part - 1) * self.chunk
        return start, min(start + self.chunk, self.nbytes)

    def parts_to(self, end: int) -> int:
        """The number of parts that contain the first `end` bytes of the arrays."""
        return 1 + -(-end // self.chunk)


class LinePlace(schema.Struct):
    """A participant in a line.

    `host`: the host whose memory it can map ("": none). `wants`: the name of the slices that it
    takes; "": it takes the version as a whole.
    """

    id: NonEmptyName
    host: Name
    wants: Name = ""


class Seat(schema.Struct):
    """A publisher: of the whole, or of one of `shares`."""

    id: NonEmptyName
    host: Name
    share: Annotated[int, schema.integer(0, MOST_SHARES - 1)] = 0
    shares: Annotated[int, schema.integer(1, MOST_SHARES)] = 1

    @property
    def place(self) -> LinePlace:
        return LinePlace(self.id, self.host)


def aligned(nbytes: int) -> int:
    return nbytes + -nbytes % ALIGNMENT


# Keys of the store.

PUBLISHER = channels.PUBLISHER
"""The publishers: a list of `Seat`."""

RELEASES = channels.RELEASES
"""The versions that there are: a list of `Release`, by version and share."""

PUBLISHED = channels.PUBLISHED
"""What was published last, even if the channel was empty since: a list of the first fields of
`Release`. See `published`."""


def door(who: str) -> str:
    """A participant's door: others set it to the name of a group in which they want to meet."""
    return f"door/{who}"


def meetings(channel: str, who: str) -> str:
    """How the names of these groups begin."""
    return f"channel {channel}/{who}/"


def line(version: int) -> str:
    """The participants that have that version or want it: a list of `LinePlace`."""
    return f"line/{version}"


def want(name: str) -> str:
    """The slices of that name: `aiodist.channels.slices.packed_want`."""
    return f"want/{name}"


# Values of the store.

T = TypeVar("T", bound=schema.Struct)


def packed(records: Sequence[schema.Struct]) -> bytes:
    return schema.pack(list(records))


def unpacked(cls: type[T], value: bytes | None) -> list[T]:
    """The records of a key; none if there is no such key. Raises ProtocolError."""
    try:
        values: Any = [] if value is None else msgpack.unpackb(value)
        return [schema.build(cls, one) for one in values]
    except Exception as error:  # msgpack raises half a dozen unrelated types
        raise ProtocolError(f"the store of a channel holds no {cls.__name__}: {error}") from None


def published(value: bytes | None) -> list[Release]:
    """What was published last. Raises ProtocolError."""
    try:
        values: Any = [] if value is None else msgpack.unpackb(value)
        return [schema.build(Release, [*one, False, "", "", b"", b"", False]) for one in values]
    except Exception as error:  # msgpack raises half a dozen unrelated types
        raise ProtocolError(f"the store of a channel holds no {PUBLISHED}: {error}") from None


# Decisions.


def identity(releases: Iterable[Release]) -> bytes:
    """A hash that is the same for equal releases.

    It tells versions of one number apart, because numbers may begin anew.
    """
    equal = [
        (one.version, one.manifest, one.nbytes, one.chunk, one.check, one.share, one.shares)
        for one in releases
    ]
    return hashlib.blake2b(schema.pack(equal), digest_size=16).digest()


def versions(known: Iterable[Release]) -> list[tuple[Release, ...]]:
    """The versions of which all shares are there, with these in order; the newest comes last."""
    found: dict[tuple[int, int], dict[int, Release]] = {}
    for one in known:
        found.setdefault((one.version, one.shares), {})[one.share] = one
    return [
        tuple(by_share[share] for share in range(shares))
        for (_, shares), by_share in sorted(found.items())
        if len(by_share) == shares
    ]


def newest(known: Iterable[Release]) -> int | None:
    """The number of the newest version."""
    found = versions(known)
    return found[-1][0].version if found else None


def as_version(given: object) -> int:
    """Return the number of a version as a plain int. Raises TypeError or ValueError if it can be
    none."""
    expected = "a version is an int from 0 to 2**62"
    version = as_int(given, expected)
    if not 0 <= version <= MAX_VERSION:
        raise ValueError(f"{expected}, not {version}")
    return version


def check_higher(known: Sequence[Release], version: int, share: int = 0) -> None:
    """Raise ValueError unless `version` is higher than all versions, and than all that this share
    published."""
    whole = {release for shares in versions(known) for release in shares}
    taken = [one.version for one in known if one.share == share or one in whole]
    if taken and version <= max(taken):
        again = ", and its bytes are others" if version in taken else ""
        raise ValueError(
            f"version {version} cannot be published: the newest is {max(taken)}{again}. Versions"
            " only grow: publish a higher one, or begin anew with `publisher(restart=True)`"
        )


def may_be_again(known: Sequence[Release], version: int, share: int) -> bool:
    """Whether this share of a version was published before. Then its bytes decide."""
    return any((one.version, one.share) == (version, share) for one in known)


def with_release(
    known: Sequence[Release], new: Release, keep: int, before: Sequence[Release] = ()
) -> list[Release]:
    """The releases after `new` is published.

    `keep` versions are kept, and as many newer ones whose other shares are still to come. `before`:
    what was published before the channel was empty. Raises ValueError if the version is not higher,
    unless it is published again.
    """
    if new not in known and new not in before:
        check_higher([*before, *known], new.version, new.share)
    # A release that is published again replaces the old one. If the number of shares differs, the
    # old one was begun by publishers that are gone.
    others = [
        one
        for one in known
        if one.version != new.version or (one.shares == new.shares and one.share != new.share)
    ]
    known = _sorted([*others, new])
    whole = [shares[0].version for shares in versions(known)][-keep:]
    last = whole[-1] if whole else -1
    begun_since = sorted({one.version for one in known if one.version > last})[-keep:]
    kept = {*whole, *begun_since}
    return _sorted(one for one in known if one.version in kept)


def without_begun(
    known: Sequence[Release], before: Sequence[Release], me: Seat, own: Sequence[Release] = ()
) -> list[Release] | None:
    """The releases without those of versions that were never complete, by publishers whose place
    `me` has taken; None: there are none.

    Their memory is gone, and no subscriber has taken any of it. `before`: what was published last.
    `own`: what `me` itself has published, which stays.
    """
    last = newest([*before, *known])
    left = [
        one
        for one in known
        if (last is not None and one.version <= last) or one in own or not _is_rival(one, me)
    ]
    return left if len(left) < len(known) else None


def _sorted(releases: Iterable[Release]) -> list[Release]:
    return sorted(releases, key=lambda one: (one.version, one.share))


def is_gone(known: Sequence[Release], releases: tuple[Release, ...]) -> bool:
    """Whether newer versions have replaced a version.

    If the store has nothing newer, it has forgotten the version, and will be told again.
    """
    last = newest(known)
    return releases not in versions(known) and last is not None and last >= releases[0].version


def restored(known: Sequence[Release], own: Iterable[Release]) -> list[Release] | None:
    """What to write to a store that has lost the releases of `own`; None: nothing."""
    # A version that newer ones have replaced is not missed, nor is one of the same number.
    last = newest(known)
    missing = [one for one in own if not may_be_again(known, one.version, one.share)]
    if not missing or (last is not None and missing[-1].version <= last):
        return None
    everything = _sorted([*known, *missing])
    kept = sorted({one.version for one in everything})[-MOST_RELEASES:]
    return [one for one in everything if one.version >= kept[0]]


def rivals(seats: Sequence[Seat], me: Seat) -> list[Seat]:
    """Other publishers of what `me` publishes, or of another number of shares."""
    return [one for one in seats if one.id != me.id and _is_rival(one, me)]


def _is_rival(one: Seat | Release, me: Seat) -> bool:
    return one.share == me.share or one.shares != me.shares


def seated(seats: Sequence[Seat], me: Seat, gone: Sequence[Seat]) -> list[Seat] | None:
    """The publishers, with `me` instead of those that are `gone`; None: another one has the
    place."""
    if any(one not in gone for one in rivals(seats, me)):
        return None
    others = [one for one in seats if one not in gone and one.id != me.id]
    return sorted([*others, me], key=lambda one: one.share)


def in_line(before: Sequence[LinePlace], me: LinePlace) -> list[LinePlace] | None:
    """The line with `me` at its end; None if `me` is in it."""
    if me in before:
        return None
    return [*before, me][-MOST_IN_LINE:]


def behind(places: Sequence[LinePlace], me: LinePlace) -> list[LinePlace]:
    """Those behind `me` in line, the last one first, that may have what those before it have
    not."""
    after = places[places.index(me) + 1 :] if me in places else []
    return [one for one in reversed(after) if me.wants or not one.wants]


def at_end(before: Sequence[LinePlace], me: LinePlace) -> list[LinePlace]:
    return [*(one for one in before if one != me), me]


def sources(
    places: Sequence[LinePlace],
    me: LinePlace,
    publishers: Sequence[LinePlace],
    *,
    maps: bool = True,
) -> list[LinePlace]:
    """From whom to take a version, the best first, by its line.

    `maps`: whether participants on the publisher's host can map its memory.
    """
    before = list(places[: places.index(me)]) if me in places else list(places)
    if not me.wants:  # a participant that takes slices has not all of it
        before = [one for one in before if not one.wants]
    # On this host prefer the first one, so that all map one memory: that of the publisher, if
    # possible.
    near = [one for one in before if me.host and one.host == me.host]
    # those with the same slices first, because their memory is the same as mine
    near.sort(key=lambda one: one.wants != me.wants)
    own = [one for one in publishers if me.host and one.host == me.host]
    near = [*own, *near] if maps else [*near, *own]
    # On other hosts, prefer the first one of the host that came last, because no participant takes
    # from it yet. So each host forwards to one other. The host of the publisher came first, and the
    # publisher itself is asked if there is no other.
    by_host: dict[str, list[LinePlace]] = {one.host or one.id: [] for one in publishers}
    for one in before:
        by_host.setdefault(one.host or one.id, []).append(one)
    far = [one for host in reversed(by_host.values()) for one in host[:1]]
    far += [one for host in reversed(by_host.values()) for one in host[1:]]
    far += publishers
    return near + [one for one in far if one not in near]


def distances(
    holders: Sequence[LinePlace], me: LinePlace, publishers: Sequence[LinePlace]
) -> list[int]:
    """How far each of the holders is that `sources` gave.

    Publishers are equally far, if all or none of them are on this host.
    """
    far: list[int] = []
    kinds = [(one in publishers, bool(me.host) and one.host == me.host) for one in holders]
    for at, kind in enumerate(kinds):
        far.append(far[-1] if at and kind[0] and kind == kinds[at - 1] else at)
    return far
