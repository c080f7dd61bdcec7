"""Slices of the arrays of a version: what a participant wants, and what it can give; no I/O.

A participant wants a box of each array, as in `aiodist.schedules.resharding`. Pieces of these come
from any participant that has them, several of them in one parcel. They are forwarded in blocks of
at most `manifest.CHUNK` bytes, each as soon as it is there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgpack
import numpy as np

from aiodist.buffers.arrays import Flat
from aiodist.buffers.dtypes import carrier
from aiodist.channels import manifest
from aiodist.channels.checks import crc32
from aiodist.channels.differences import encode, width_of
from aiodist.channels.directory import Release
from aiodist.channels.holding import Holding
from aiodist.channels.manifest import Leaf, Manifest
from aiodist.channels.trees import whole
from aiodist.errors import ProtocolError
from aiodist.schedules import resharding
from aiodist.schedules.resharding import Box, intersection, text, volume

Want = Mapping[str, Box]
"""A box of each wanted array, by the place of the array in the tree."""


class Piece(NamedTuple):
    """A box of the array at `key`."""

    key: str
    box: Box


Parcel = Sequence[Piece]
"""Pieces that are sent together, with one check."""


class CodedParcel(NamedTuple):
    """The difference of a parcel, the CRC-32 of the newer one, and how many bytes that has."""

    code: bytes
    check: int
    nbytes: int


def packed_want(want: Want) -> bytes:
    packed: bytes = msgpack.packb(sorted(want.items()))
    return packed


def unpacked_want(packed: bytes) -> dict[str, Box]:
    """Raises ProtocolError."""
    try:
        return {str(key): _box(box) for key, box in msgpack.unpackb(packed)}
    except Exception as error:  # msgpack raises half a dozen unrelated types
        raise ProtocolError(f"the store of a channel holds no slices: {error}") from None


def name_of(packed: bytes) -> str:
    """A name for slices. Equal slices have the same name."""
    return hashlib.blake2b(packed, digest_size=16).hexdigest()


def pieces_in(said: Any) -> list[Piece]:
    """A parcel that another participant asked for. Raises ProtocolError."""
    try:
        parcel = [Piece(str(key), _box(box)) for key, box in said]
    except (TypeError, ValueError, OverflowError) as error:
        raise ProtocolError(f"a participant asked for {said!r}: {error}") from None
    if not parcel:
        raise ProtocolError("a participant asked for a parcel of nothing")
    return parcel


def _box(said: Any) -> Box:
    return tuple((int(start), int(stop)) for start, stop in said)


class Arrays:
    """The arrays of a version, of all its shares: `leaves`, by their place in the tree."""

    def __init__(self, releases: tuple[Release, ...], packed: Sequence[bytes]) -> None:
        """`packed`: the manifests of these shares.

        Raises ValueError if shares do not agree on an array, ProtocolError if a manifest is
        invalid.
        """
        self.releases = releases
        self.packed = packed
        self.manifests = [
            Manifest.read(memoryview(one), release)
            for one, release in zip(packed, releases, strict=True)
        ]
        self.leaves: dict[str, list[Leaf | None]] = {}  # by share; None if a share lacks the array
        for share, one in enumerate(self.manifests):
            for leaf in manifest.leaves(one):
                of_shares = self.leaves.setdefault(leaf.key, [None] * len(packed))
                known = next((other for other in of_shares if other is not None), leaf)
                if _described(leaf) != _described(known):
                    raise ValueError(
                        f"{leaf.key}: share {share} is of {_described(leaf)}, another share of"
                        f" {_described(known)}"
                    )
                of_shares[share] = leaf

    def leaf(self, key: str) -> Leaf:
        """The array with that key, in the description of any share."""
        return next(leaf for leaf in self.leaves[key] if leaf is not None)

    def item(self, key: str) -> int:
        return carrier(self.leaf(key).spec.name).itemsize

    def all(self) -> dict[str, Box]:
        return {key: whole(self.leaf(key).extent.shape) for key in self.leaves}

    def of_share(self, share: int) -> dict[str, Box]:
        return {
            key: leaf.extent.box
            for key, of_shares in self.leaves.items()
            if (leaf := of_shares[share]) is not None
        }

    def boxes(self, key: str) -> list[Box | None]:
        """For each share, its box of an array."""
        return [leaf and leaf.extent.box for leaf in self.leaves[key]]

    def check(self, want: Want) -> None:
        """Raise ValueError if no share has a wanted slice."""
        for key, box in want.items():
            shares = len(self.manifests)
            held = resharding.nearest_first(tuple(self.boxes(key)), (0,) * shares)
            (asked,) = resharding.asked_of([resharding.Want(box, held, 1)], shares, 0)
            for share, missing in asked:
                if share is None:
                    raise ValueError(
                        f"{key}: {text(box)} is wanted, and no publisher has {text(missing)}"
                    )


def _described(leaf: Leaf) -> tuple[str, tuple[int, ...]]:
    return leaf.spec.name, leaf.extent.shape


class Source(Protocol):
    """Data from which pieces can be cut while it comes: a version, or slices of one."""

    def needed(self, piece: Piece) -> set[int]:
        """The blocks that a piece needs. Raises ProtocolError if they will never come."""
        ...

    def has(self, needed: set[int]) -> bool: ...

    def view(self, piece: Piece) -> Flat: ...

    def check(self, needed: set[int]) -> None:
        """Raise ProtocolError if data has changed, which can happen in memory of a user."""
        ...


class WholeVersion:
    """A version, or a share of it, as a source of pieces."""

    def __init__(self, holding: Holding) -> None:
        """The manifest of `holding` must be there."""
        self._holding = holding
        self._leaves = {leaf.key: leaf for leaf in manifest.leaves(holding.manifest)}

    def needed(self, piece: Piece) -> set[int]:
        leaf = self._leaves.get(piece.key)
        if leaf is None or not lies_in(piece.box, leaf.extent.box):
            raise _not_held(piece)
        # From the first needed row to the last.
        item = self._item(piece.key)
        steps = [item]
        for length in reversed(leaf.spec.shape[1:]):
            steps.insert(0, steps[0] * length)
        ends = zip(piece.box, leaf.extent.box, steps, strict=False)
        first = leaf.start + sum((start - at) * step for (start, _), (at, _), step in ends)
        ends = zip(piece.box, leaf.extent.box, steps, strict=False)
        last = leaf.start + sum((stop - 1 - at) * step for (_, stop), (at, _), step in ends)
        release = self._holding.release
        return set(range(release.parts_to(first + 1) - 1, release.parts_to(last + item)))

    def around(self, pieces: Iterable[Piece]) -> tuple[list[tuple[str, Box, int]], int]:
        """The least boxes that contain these pieces, with their element sizes, and the bytes of the
        pieces.

        Raises ProtocolError.
        """
        found: dict[str, Box] = {}
        nbytes = 0
        for piece in pieces:
            key, box = piece
            leaf = self._leaves.get(key)
            if leaf is None or len(leaf.spec.shape) != len(box):
                raise _not_held(piece)
            ends = zip(found.get(key, box), box, strict=True)
            found[key] = tuple((min(a, c), max(b, d)) for (a, b), (c, d) in ends)
            nbytes += volume(box) * self._item(key)
        return [(key, box, self._item(key)) for key, box in found.items()], nbytes

    def _item(self, key: str) -> int:
        return carrier(self._leaves[key].spec.name).itemsize

    def has(self, needed: set[int]) -> bool:
        return max(needed, default=0) < self._holding.filled

    def view(self, piece: Piece) -> Flat:
        leaf = self._leaves[piece.key]
        return cut(self._holding.lying(leaf), leaf.extent.box, piece.box)

    def check(self, needed: set[int]) -> None:
        if self._holding.release.lent:
            for part in sorted(needed):
                self._holding.check(part)


def _not_held(piece: Piece) -> ProtocolError:
    return ProtocolError(f"{piece.key}{text(piece.box)} is not held here")


def lies_in(box: Box, held: Box) -> bool:
    return len(box) == len(held) and intersection(box, held) == box


def cut(array: Flat, held: Box, box: Box) -> Flat:
    ends = zip(box, held, strict=True)
    index: Any = (*[slice(start - at, stop - at) for (start, stop), (at, _) in ends], ...)
    found: Flat = array[index]  # a view, even without dimensions
    return found


def packed_parcel(source: Source, parcel: Parcel) -> tuple[Flat, int]:
    """The bytes of a parcel, and their CRC-32; may run in a thread. Raises ProtocolError."""
    data = joined_views([source.view(piece) for piece in parcel])
    check = crc32(data.data)
    # Check after the copy, because lent memory may be written at any time.
    source.check({part for piece in parcel for part in source.needed(piece)})
    return data, check


def coded_parcel(source: Source, base: Source, parcel: Parcel) -> CodedParcel | None:
    """The difference between two versions of a parcel; None: the older one has other arrays. May
    run in a thread."""
    try:
        for piece in parcel:
            base.needed(piece)
    except ProtocolError:
        return None
    data, check = packed_parcel(source, parcel)
    before = joined_views([base.view(piece) for piece in parcel])
    if len(before) != len(data):
        return None
    width = min(width_of(source.view(piece).dtype) for piece in parcel)
    return CodedParcel(encode(before, data, width).code, check, len(data))


def joined_views(views: Sequence[Flat]) -> Flat:
    """The bytes of some arrays, one behind the other; a copy if they do not lie like that."""
    if len(views) == 1 and views[0].flags.c_contiguous:
        return views[0].reshape(-1).view(np.uint8)
    data = np.empty(sum(view.nbytes for view in views), np.uint8)
    for view, place in zip(views, places(data, views), strict=True):
        np.copyto(place, view)
    return data


def places(data: Flat, views: Sequence[Flat]) -> list[Flat]:
    """Views of `data` in the shapes of `views`, one behind the other."""
    found, start = [], 0
    for view in views:
        stretch = data[start : start + view.nbytes]
        found.append(stretch.view(view.dtype).reshape(view.shape))
        start += view.nbytes
    return found


def parcels(pieces: Iterable[Piece], arrays: Arrays) -> list[list[Piece]]:
    """Group pieces into parcels of about one chunk."""
    found: list[list[Piece]] = []
    room = 0
    for piece in pieces:
        nbytes = volume(piece.box) * arrays.item(piece.key)
        if nbytes > room:
            found.append([])
            room = manifest.CHUNK
        found[-1].append(piece)
        room -= nbytes
    return found
