"""What a channel says of itself in its store: which versions there are, who stands in line for each
of them, and of whom one takes it. No I/O in here.

Whoever wants a version goes to the end of its line, and takes it from somebody who stands before::

    publisher ──> p1 ──> p2 ──> p3        one on each host: a chain, in which all hand on
                   │                      each chunk as soon as they have it
                   ├──> p4 ──> p6         p4 and p5 are on the host of p1, and map its memory
                   └──> p5                p6 is on another one, and takes from who came last

Weights may be published in shares, each by a process of its own, and then there is a `Release` for
each share: a version is there when all of them are. Who wants slices of arrays (`Place.wants`)
stands in the same line, and takes what it wants from all who have some of it, the nearest first.

Nobody ever takes from one who came later, so there is no circle in which all wait for each other.
If one is lost, those behind it take from those before it, and ask only for the chunks they lack.
One who finds nobody before him that has it, and somebody behind him that has more than he, goes to
the end of the line, and those who took from him ask others. So
the publisher sends a version once over the network, and as much again as whoever took from it and
died had not handed on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import field
from typing import Annotated, Any, TypeVar

import msgpack

from aiodist.errors import ProtocolError
from aiodist.wire import channels, schema
from aiodist.wire.messages import Name, NonEmptyName

MAX_VERSION = 2**62
"""The highest number of a version."""

MOST_RELEASES = 64
"""Most versions that a channel tells of."""

MOST_SHARES = 1024
"""Most processes that publish one version in shares."""

MOST_IN_LINE = 4096
"""Most who stand in one line: the first ones are forgotten then. A value of the store has room for
that many."""

ALIGNMENT = 64
"""Bytes: where arrays begin, and what chunks are multiples of."""

Size = Annotated[int, schema.integer(1, 2**50)]


class Release(schema.Struct):
    """A version, or one of its `shares`: a manifest of `manifest` bytes, and behind it the arrays;
    `nbytes` in all. It goes in parts: the manifest, and then chunks of `chunk` bytes. `check`: the
    CRC-32 of the manifest, which has those of the chunks. `lent`: the publisher has it in memory
    that nobody can map. Else those of its `host` fetch that from there: `offer` and `key` are the
    words (`aiodist.transports.handover`). `id`: random for each publish, and what differences name;
    none if there are none. `always`: subscribers take differences even if the line is fast.
    Releases are equal if their bytes are, wherever these lie: one that is published again after a
    failure may lie elsewhere."""

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
        """Where the arrays begin."""
        return aligned(self.manifest)

    @property
    def parts(self) -> int:
        """How many there are."""
        return 1 + -(-(self.nbytes - self.data) // self.chunk)

    def span(self, part: int) -> tuple[int, int]:
        """Where a part begins, and ends."""
        if part == 0:
            return 0, self.manifest
        start = self.data + (part - 1) * self.chunk
        return start, min(start + self.chunk, self.nbytes)

    def parts_to(self, end: int) -> int:
        """How many parts it takes to have the first `end` bytes of the arrays."""
        return 1 + -(-end // self.chunk)


class Place(schema.Struct):
    """Who stands in a line, and which memory it can map: that of `host` ("": of no other).
    `wants`: the name of the slices that it takes; "": it takes a version as a whole."""

    id: NonEmptyName
    host: Name
    wants: Name = ""


class Seat(schema.Struct):
    """Who publishes: the whole, or one of `shares`."""

    id: NonEmptyName
    host: Name
    share: Annotated[int, schema.integer(0, MOST_SHARES - 1)] = 0
    shares: Annotated[int, schema.integer(1, MOST_SHARES)] = 1

    @property
    def place(self) -> Place:
        return Place(self.id, self.host)


def aligned(nbytes: int) -> int:
    return nbytes + -nbytes % ALIGNMENT


# Keys of the store.

PUBLISHER = channels.PUBLISHER
"""Who publishes: a list of `Seat`."""

RELEASES = channels.RELEASES
"""The versions that there are: a list of `Release`, by version and share."""

PUBLISHED = channels.PUBLISHED
"""What was published last, also if the channel was empty since: a list of the first fields of
`Release`. See `published`."""


def door(who: str) -> str:
    """Set to the name of a group by whoever wants to meet that participant in it."""
    return f"door/{who}"


def meetings(channel: str, who: str) -> str:
    """How the names of these groups begin."""
    return f"channel {channel}/{who}/"


def line(version: int) -> str:
    """Who has that version, or wants it: a list of `Place`."""
    return f"line/{version}"


def want(name: str) -> str:
    """What the slices of that name are: `aiodist.channels.slices.packed_want`."""
    return f"want/{name}"


# Values of the store.

T = TypeVar("T", bound=schema.Struct)


def packed(records: Sequence[schema.Struct]) -> bytes:
    return schema.pack(list(records))


def unpacked(cls: type[T], value: bytes | None) -> list[T]:
    """The records of a key; none where there is no such key. Raises ProtocolError."""
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


def versions(known: Iterable[Release]) -> list[tuple[Release, ...]]:
    """The versions of which all shares are there, with these in order, the newest one last."""
    found: dict[tuple[int, int], dict[int, Release]] = {}
    for one in known:
        found.setdefault((one.version, one.shares), {})[one.share] = one
    return [
        tuple(by_share[share] for share in range(shares))
        for (_, shares), by_share in sorted(found.items())
        if len(by_share) == shares
    ]


def newest(known: Iterable[Release]) -> int | None:
    """The number of the newest version that is there."""
    found = versions(known)
    return found[-1][0].version if found else None


def check_higher(known: Sequence[Release], version: int, share: int = 0) -> None:
    """Raises ValueError for a version that is not higher than those that there are, and those of
    which this share was published."""
    whole = {release for shares in versions(known) for release in shares}
    taken = [one.version for one in known if one.share == share or one in whole]
    if taken and version <= max(taken):
        again = ", and its bytes are others" if version in taken else ""
        raise ValueError(
            f"version {version} cannot be published: the newest is {max(taken)}{again}. Versions"
            " only grow: publish a higher one, or begin anew with `publisher(restart=True)`"
        )


def may_be_again(known: Sequence[Release], version: int, share: int) -> bool:
    """Whether this share of a version was published before: then its bytes decide."""
    return any((one.version, one.share) == (version, share) for one in known)


def with_release(
    known: Sequence[Release], new: Release, keep: int, before: Sequence[Release] = ()
) -> list[Release]:
    """The releases that there are once `new` is published: `keep` versions are kept, and as many
    newer ones whose other shares are still to come. `before`: what was published before the channel
    was empty. Raises ValueError for one that is not higher, unless it is one of these again."""
    if new not in known and new not in before:
        check_higher([*before, *known], new.version, new.share)
    # One that is published again lies elsewhere now. A version whose number of shares is another
    # one was begun by publishers that are gone.
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


def _sorted(releases: Iterable[Release]) -> list[Release]:
    return sorted(releases, key=lambda one: (one.version, one.share))


def is_gone(known: Sequence[Release], releases: tuple[Release, ...]) -> bool:
    """Whether others have taken the place of a version. A store that has nothing newer has
    forgotten it, and will be told."""
    last = newest(known)
    return releases not in versions(known) and last is not None and last >= releases[0].version


def restored(known: Sequence[Release], own: Iterable[Release]) -> list[Release] | None:
    """What to say to a store that has lost what was told of `own`; None: nothing."""
    # A version that is gone from the store because newer ones came is not missed.
    last = newest(known)
    missing = [one for one in own if one not in known]
    if not missing or (last is not None and missing[-1].version < last):
        return None
    everything = _sorted([*known, *missing])
    kept = sorted({one.version for one in everything})[-MOST_RELEASES:]
    return [one for one in everything if one.version >= kept[0]]


def rivals(seats: Sequence[Seat], me: Seat) -> list[Seat]:
    """Those who publish what `me` is to publish, or another number of shares."""
    return [
        one
        for one in seats
        if one.id != me.id and (one.share == me.share or one.shares != me.shares)
    ]


def seated(seats: Sequence[Seat], me: Seat, gone: Sequence[Seat]) -> list[Seat] | None:
    """Those who publish, and `me` in the place of those who are `gone`; None: others have it."""
    if any(one not in gone for one in rivals(seats, me)):
        return None
    others = [one for one in seats if one not in gone and one.id != me.id]
    return sorted([*others, me], key=lambda one: one.share)


def in_line(before: Sequence[Place], me: Place) -> list[Place] | None:
    """The line with `me` at its end; None: I stand in it."""
    if me in before:
        return None
    return [*before, me][-MOST_IN_LINE:]


def behind(places: Sequence[Place], me: Place) -> list[Place]:
    """Who came later than I, the last one first, and may have what those before me have not."""
    after = places[places.index(me) + 1 :] if me in places else []
    return [one for one in reversed(after) if me.wants or not one.wants]


def at_end(before: Sequence[Place], me: Place) -> list[Place]:
    """The line with `me` at its end, whether I stood in it or not."""
    return [*(one for one in before if one != me), me]


def sources(
    places: Sequence[Place], me: Place, publishers: Sequence[Place], *, maps: bool = True
) -> list[Place]:
    """Of whom to take a version, the best first, by its line. `maps`: whether the publisher's
    memory can be mapped by those of its host."""
    before = list(places[: places.index(me)]) if me in places else list(places)
    if not me.wants:  # who takes slices has not all of it
        before = [one for one in before if not one.wants]
    # On this host the first one, so that all map one memory: that of the publisher, if they can.
    near = [one for one in before if me.host and one.host == me.host]
    near.sort(key=lambda one: one.wants != me.wants)  # their memory is as mine would be
    own = [one for one in publishers if me.host and one.host == me.host]
    near = [*own, *near] if maps else [*near, *own]
    # Elsewhere, the first one of the host that came last: nobody takes from that host yet. So each
    # host has one to hand on to; that of the publisher came first, and it is asked itself where
    # there is nobody else.
    by_host: dict[str, list[Place]] = {one.host or one.id: [] for one in publishers}
    for one in before:
        by_host.setdefault(one.host or one.id, []).append(one)
    far = [one for host in reversed(by_host.values()) for one in host[:1]]
    far += [one for host in reversed(by_host.values()) for one in host[1:]]
    far += publishers
    return near + [one for one in far if one not in near]


def distances(holders: Sequence[Place], me: Place, publishers: Sequence[Place]) -> list[int]:
    """How far each of those is whom `sources` gave: publishers are equally far, if they are on this
    host or none of them is."""
    far: list[int] = []
    kinds = [(one in publishers, bool(me.host) and one.host == me.host) for one in holders]
    for at, kind in enumerate(kinds):
        far.append(far[-1] if at and kind[0] and kind == kinds[at - 1] else at)
    return far
