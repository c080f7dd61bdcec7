"""Slices of the arrays of a version: what somebody wants of it, what is there of that, and what of
all that there is may be cut out for others. No I/O in here.

What one wants is a box of each array, as `aiodist.schedules.resharding` has it. What comes are
pieces of these, from whoever has them, some of them together in one parcel. They are handed on by
blocks of at most `manifest.CHUNK` bytes, each as soon as it is there.
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
from aiodist.channels.directory import Release
from aiodist.channels.holding import Coming, Holding
from aiodist.channels.manifest import Leaf, Manifest
from aiodist.channels.trees import joined, whole
from aiodist.errors import ProtocolError
from aiodist.schedules import resharding
from aiodist.schedules.resharding import Box, intersection, text, volume

Want = Mapping[str, Box]
"""A box of each array that is wanted, by where the array is in the tree."""


class Piece(NamedTuple):
    """A box of the array that is at `key`."""

    key: str
    box: Box


Parcel = Sequence[Piece]
"""What comes at once, with one check."""


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
    """The name of what is wanted: two who want the same have the same name for it."""
    return hashlib.blake2b(packed, digest_size=16).hexdigest()


def pieces_in(said: Any) -> list[Piece]:
    """A parcel that somebody has asked for. Raises ProtocolError."""
    try:
        return [Piece(str(key), _box(box)) for key, box in said]
    except (TypeError, ValueError) as error:
        raise ProtocolError(f"a participant asked for {said!r}: {error}") from None


def _box(said: Any) -> Box:
    return tuple((int(start), int(stop)) for start, stop in said)


class Arrays:
    """The arrays of a version, by where they are in its tree: `leaves`, of all its shares."""

    def __init__(self, releases: tuple[Release, ...], packed: Sequence[bytes]) -> None:
        """Of these shares, with their manifests. Raises ValueError where shares do not agree on an
        array, ProtocolError for what is no manifest."""
        self.releases = releases
        self.packed = packed
        self.manifests = [
            Manifest.read(memoryview(one), release)
            for one, release in zip(packed, releases, strict=True)
        ]
        self.leaves: dict[str, list[Leaf | None]] = {}  # by share; None where it has not got it
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
        """That of any share."""
        return next(leaf for leaf in self.leaves[key] if leaf is not None)

    def item(self, key: str) -> int:
        """Bytes of an element."""
        return carrier(self.leaf(key).spec.name).itemsize

    def all(self) -> dict[str, Box]:
        """All that there is."""
        return {key: whole(self.leaf(key).extent.shape) for key in self.leaves}

    def of_share(self, share: int) -> dict[str, Box]:
        """What a share has."""
        return {
            key: leaf.extent.box
            for key, of_shares in self.leaves.items()
            if (leaf := of_shares[share]) is not None
        }

    def boxes(self, key: str) -> list[Box | None]:
        """What each share has of an array."""
        return [leaf and leaf.extent.box for leaf in self.leaves[key]]

    def check(self, want: Want) -> None:
        """Raises ValueError where something is wanted that no share has."""
        for key, box in want.items():
            shares = len(self.manifests)
            held = resharding.nearest_first(tuple(self.boxes(key)), (0,) * shares)
            (asked,) = resharding.asked_of([resharding.Want(box, held, 1)], shares, 0)
            for share, missing in asked:
                if share is None:
                    raise ValueError(
                        f"{key}: {text(box)} is wanted, and nobody publishes {text(missing)}"
                    )


def _described(leaf: Leaf) -> tuple[str, tuple[int, ...]]:
    return leaf.spec.name, leaf.extent.shape


class Source(Protocol):
    """That of which pieces can be cut out, by and by."""

    def needed(self, piece: Piece) -> set[int]:
        """What has to be there for it. Raises ProtocolError where it will never be."""
        ...

    def has(self, needed: set[int]) -> bool: ...

    def view(self, piece: Piece) -> Flat: ...

    def check(self, needed: set[int]) -> None:
        """Raises ProtocolError where that is not what it was, for it lies in memory of a user."""
        ...


class Lot(Coming):
    """What somebody wants of a version, and what is here of it.

    `todo`: what nobody was asked for yet. Of what was asked for, each piece is either `filled` or
    given up (`lack`).
    """

    def __init__(self, arrays: Arrays, want: Want) -> None:
        super().__init__(arrays.releases[0].version)
        self.arrays = arrays
        self.want = want
        self.packed = packed_want(want)
        self.name = name_of(self.packed)
        self.memory: dict[str, Flat] = {}
        self._blocks: list[Piece] = []
        self._of_key: dict[str, range] = {}
        for key in [key for key in arrays.leaves if key in want]:  # in the publishers' order
            box, dtype = want[key], carrier(arrays.leaf(key).spec.name)
            self.memory[key] = np.empty([stop - start for start, stop in box], dtype)
            first = len(self._blocks)
            if volume(box):
                most = max(1, manifest.CHUNK // dtype.itemsize)
                self._blocks += [Piece(key, one) for one in resharding.blocks(box, most)]
            self._of_key[key] = range(first, len(self._blocks))
        self.todo = list(self._blocks)
        self._left = [volume(block.box) for block in self._blocks]
        self._missing = sum(self._left)

    @property
    def is_whole(self) -> bool:
        return not self._missing

    @property
    def here(self) -> int:
        return sum(
            memory.itemsize * (memory.size - sum(self._left[at] for at in self._of_key[key]))
            for key, memory in self.memory.items()
        )

    @property
    def own_bytes(self) -> int:
        return sum(memory.nbytes for memory in self.memory.values())

    @property
    def has_leaves(self) -> bool:
        """Whether it is known which arrays there are."""
        return True

    def leaves(self) -> list[Leaf]:
        return [self.arrays.leaf(key) for key in self.memory]

    def has_leaf(self, leaf: Leaf) -> bool:
        """Whether all of it that is wanted is here."""
        return not any(self._left[at] for at in self._of_key[leaf.key])

    def fill(self, piece: Piece) -> None:
        """It is there."""
        for at in self.needed(piece):
            common = intersection(self._blocks[at].box, piece.box)
            assert common is not None
            self._left[at] -= volume(common)
        self._missing -= volume(piece.box)

    def lack(self, parcels: Iterable[Parcel]) -> None:
        """They do not come, and have to come from somebody else."""
        for parcel in parcels:
            self.todo += parcel

    def needed(self, piece: Piece) -> set[int]:
        want = self.want.get(piece.key)
        if want is None or not _lies_in(piece.box, want):
            raise ProtocolError(f"{piece.key}{text(piece.box)} is nothing that is wanted here")
        numbers = self._of_key[piece.key]
        blocks = self._blocks
        return {at for at in numbers if intersection(blocks[at].box, piece.box) is not None}

    def tree(self) -> Any:
        """The tree of the version, whose arrays are views of what is here, or copies."""
        return joined([manifest.tree_of(one, self.read) for one in self.arrays.manifests])

    def read(self, leaf: Leaf) -> Any:
        """An array, as users get it."""
        return manifest.shown(self.memory[leaf.key].view(), leaf.spec, leaf.name)

    def lying(self, leaf: Leaf) -> Flat:
        """An array, as numpy holds its elements."""
        return self.memory[leaf.key]

    def has(self, needed: set[int]) -> bool:
        return not any(self._left[at] for at in needed)

    def view(self, piece: Piece) -> Flat:
        return _cut(self.memory[piece.key], self.want[piece.key], piece.box)

    def check(self, needed: set[int]) -> None:
        """It was, when it came."""


class Whole:
    """A version, or a share of it, as a source of pieces."""

    def __init__(self, holding: Holding) -> None:
        """Of one whose manifest is there."""
        self._holding = holding
        self._leaves = {leaf.key: leaf for leaf in manifest.leaves(holding.manifest)}

    def needed(self, piece: Piece) -> set[int]:
        leaf = self._leaves.get(piece.key)
        if leaf is None or not _lies_in(piece.box, leaf.extent.box):
            raise ProtocolError(f"{piece.key}{text(piece.box)} is nothing that is held here")
        # From the first row of it that is needed to the last.
        item = carrier(leaf.spec.name).itemsize
        steps = [item]
        for length in reversed(leaf.spec.shape[1:]):
            steps.insert(0, steps[0] * length)
        ends = zip(piece.box, leaf.extent.box, steps, strict=False)
        first = leaf.start + sum((start - at) * step for (start, _), (at, _), step in ends)
        ends = zip(piece.box, leaf.extent.box, steps, strict=False)
        last = leaf.start + sum((stop - 1 - at) * step for (_, stop), (at, _), step in ends)
        release = self._holding.release
        return set(range(release.parts_to(first + 1) - 1, release.parts_to(last + item)))

    def has(self, needed: set[int]) -> bool:
        return max(needed, default=0) < self._holding.filled

    def view(self, piece: Piece) -> Flat:
        leaf = self._leaves[piece.key]
        return _cut(self._holding.lying(leaf), leaf.extent.box, piece.box)

    def check(self, needed: set[int]) -> None:
        if self._holding.release.lent:
            for part in sorted(needed):
                self._holding.check(part)


def _lies_in(box: Box, held: Box) -> bool:
    return len(box) == len(held) and intersection(box, held) == box


def _cut(array: Flat, held: Box, box: Box) -> Flat:
    ends = zip(box, held, strict=True)
    index: Any = (*[slice(start - at, stop - at) for (start, stop), (at, _) in ends], ...)
    found: Flat = array[index]  # a view, even where there are no dimensions
    return found


def packed_parcel(source: Source, parcel: Parcel) -> tuple[Flat, int]:
    """The bytes of a parcel, and their CRC-32; may run in a thread. Raises ProtocolError."""
    views = [source.view(piece) for piece in parcel]
    if len(views) == 1 and views[0].flags.c_contiguous:
        data = views[0].reshape(-1).view(np.uint8)
    else:
        data = np.empty(sum(view.nbytes for view in views), np.uint8)
        for view, place in zip(views, _places(data, views), strict=True):
            np.copyto(place, view)
    check = crc32(data.data)
    # After that, for what is lent may be written at any time.
    source.check({part for piece in parcel for part in source.needed(piece)})
    return data, check


def unpacked_parcel(data: Flat, check: int, lot: Lot, parcel: Parcel) -> None:
    """Have a parcel where it goes, if it is not there; may run in a thread. Raises
    ProtocolError."""
    if crc32(data.data) != check:
        raise ProtocolError(f"a parcel of version {lot.version} came damaged")
    views = [lot.view(piece) for piece in parcel]
    for view, place in zip(views, _places(data, views), strict=True):
        if not np.may_share_memory(view, place):
            np.copyto(view, place)


def _places(data: Flat, views: Sequence[Flat]) -> list[Flat]:
    """Where arrays like `views` lie in `data`, one behind the other."""
    places, start = [], 0
    for view in views:
        stretch = data[start : start + view.nbytes]
        places.append(stretch.view(view.dtype).reshape(view.shape))
        start += view.nbytes
    return places


def room_for(lot: Lot, parcel: Parcel) -> Flat:
    """Memory that a parcel is to come to: its own place, if that is one stretch."""
    views = [lot.view(piece) for piece in parcel]
    if len(views) == 1 and views[0].flags.c_contiguous:
        return views[0].reshape(-1).view(np.uint8)
    return np.empty(sum(view.nbytes for view in views), np.uint8)


def parcels(pieces: Iterable[Piece], arrays: Arrays) -> list[list[Piece]]:
    """Pieces in parcels of about a chunk."""
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


def asked_of(
    lot: Lot, held: Sequence[Want], far: Sequence[int], turn: int
) -> tuple[list[list[Piece]], list[Piece]]:
    """Which pieces of what is to do are to be asked of each holder, and which nobody has."""
    asks: list[list[Piece]] = [[] for _ in held]
    lacking: list[Piece] = []
    wants: list[resharding.Want] = []
    for key, box in lot.todo:
        boxes = tuple([one.get(key) for one in held])
        ordered = resharding.nearest_first(boxes, tuple(far))
        wants.append(resharding.Want(box, ordered, lot.arrays.item(key)))
    for block, asked in zip(lot.todo, resharding.asked_of(wants, len(held), turn), strict=True):
        for src, box in asked:
            (lacking if src is None else asks[src]).append(Piece(block.key, box))
    return asks, lacking
