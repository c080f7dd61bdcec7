"""What a channel says of itself in its store: which versions there are, who stands in line for each
of them, and of whom one takes it. No I/O in here.

Whoever wants a version goes to the end of its line, and takes it from somebody who stands before::

    publisher ──> p1 ──> p2 ──> p3        one on each host: a chain, in which all hand on
                   │                      each chunk as soon as they have it
                   ├──> p4 ──> p6         p4 and p5 are on the host of p1, and map its memory
                   └──> p5                p6 is on another one, and takes from who came last

Nobody ever takes from one who came later, so there is no circle in which all wait for each other.
If one is lost, those behind it take from those before it, and ask only for the chunks they lack. So
the publisher sends a version once over the network, and as much again as whoever took from it and
died had not handed on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, TypeVar

import msgpack

from aiodist.errors import ProtocolError
from aiodist.wire import schema
from aiodist.wire.messages import Name, NonEmptyName

MAX_VERSION = 2**62
"""The highest number of a version."""

MOST_RELEASES = 64
"""Most versions that a channel tells of."""

MOST_IN_LINE = 4096
"""Most who stand in one line: the first ones are forgotten then. A value of the store has room for
that many."""

ALIGNMENT = 64
"""Bytes: where arrays begin, and what chunks are multiples of."""

Size = Annotated[int, schema.integer(1, 2**50)]


class Release(schema.Struct):
    """A version: a manifest of `manifest` bytes, and behind it the arrays; `nbytes` in all. It goes
    in parts: the manifest, and then chunks of `chunk` bytes. `check`: the CRC-32 of the manifest,
    which has those of the chunks."""

    version: Annotated[int, schema.integer(0, MAX_VERSION)]
    manifest: Size
    nbytes: Size
    chunk: Size
    check: Annotated[int, schema.integer(0, 2**32 - 1)]

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
    """Who stands in a line, and which memory it can map: that of `host` ("": of no other)."""

    id: NonEmptyName
    host: Name


def aligned(nbytes: int) -> int:
    return nbytes + -nbytes % ALIGNMENT


# Keys of the store.

PUBLISHER = "publisher"
"""Who publishes: a `Place`."""

RELEASES = "releases"
"""The versions that there are: a list of `Release`, by version."""


def at(who: str) -> str:
    """Exists as long as that participant is there."""
    return f"at/{who}"


def door(who: str) -> str:
    """Set to the name of a group by whoever wants to meet that participant in it."""
    return f"door/{who}"


def line(version: int) -> str:
    """Who has that version, or wants it: a list of `Place`."""
    return f"line/{version}"


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


# Decisions.


def check_higher(known: Sequence[Release], version: int) -> None:
    """Raises ValueError for a version that is not higher than those that there are."""
    if known and version <= known[-1].version:
        raise ValueError(
            f"version {version} cannot be published: the newest is {known[-1].version}, and"
            " versions only grow"
        )


def with_release(known: list[Release], new: Release, keep: int) -> list[Release]:
    """The versions that there are once `new` is published, of which `keep` are kept. Raises
    ValueError for one that is not higher."""
    if new in known:  # it was, and the answer was lost
        return known[-keep:]
    check_higher(known, new.version)
    return [*known, new][-keep:]


def is_gone(known: Sequence[Release], release: Release) -> bool:
    """Whether others have taken its place. A store that has nothing newer has forgotten it, and
    will be told."""
    return release not in known and bool(known) and known[-1].version >= release.version


def restored(known: Sequence[Release], own: Iterable[Release]) -> list[Release] | None:
    """What to say to a store that has lost what was told of `own`; None: nothing."""
    missing = [one for one in own if one not in known]
    # A version that is gone from the store because newer ones came is not missed.
    if not missing or (known and missing[-1].version < known[-1].version):
        return None
    return sorted([*known, *missing], key=lambda one: one.version)[-MOST_RELEASES:]


def in_line(before: Sequence[Place], me: Place) -> list[Place] | None:
    """The line with `me` at its end; None: I stand in it."""
    if any(one.id == me.id for one in before):
        return None
    return [*before, me][-MOST_IN_LINE:]


def sources(places: Sequence[Place], me: Place, publisher: Place | None) -> list[Place]:
    """Of whom to take a version, the best first, by its line."""
    before: list[Place] = []
    for one in places:
        if one.id == me.id:
            break
        before.append(one)
    # On this host the first one, so that all map one memory; elsewhere who came last, so that each
    # has one to hand on to, and the publisher only where there is nobody else.
    everybody = before if publisher is None else [publisher, *before]
    near = [one for one in everybody if me.host and one.host == me.host]
    return near + [one for one in reversed(everybody) if not me.host or one.host != me.host]
