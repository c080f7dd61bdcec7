"""The wanted slices of a version, and what is here of them.

A lot is in one piece of memory, one array behind the other, as whole versions are. So other
participants on the host can map it, and share it if they want the same slices.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from aiodist.buffers.arrays import Flat
from aiodist.buffers.dtypes import carrier
from aiodist.channels import manifest
from aiodist.channels.checks import crc32
from aiodist.channels.differences import decode
from aiodist.channels.directory import Release, aligned
from aiodist.channels.holding import ComingVersion, own_memory
from aiodist.channels.manifest import Leaf
from aiodist.channels.memory import Spare, VersionMemory
from aiodist.channels.slices import (
    Arrays,
    Parcel,
    Piece,
    Source,
    Want,
    cut,
    joined_views,
    lies_in,
    name_of,
    packed_want,
    places,
)
from aiodist.channels.trees import joined
from aiodist.errors import ProtocolError
from aiodist.schedules import resharding
from aiodist.schedules.resharding import intersection, text, volume


class Lot(ComingVersion):
    """The wanted slices of a version, and what is here of them.

    `todo`: pieces that were not yet asked for. Each piece that was asked for is later `filled` or
    given up (`lack`). `memory`: None before any piece comes; then own memory of `nbytes` from
    `spare`, or that of another participant on the host with the same slices.
    """

    def __init__(self, arrays: Arrays, want: Want, spare: Spare | None = None) -> None:
        self.packed = packed_want(want)
        super().__init__(arrays.releases[0].version, name_of(self.packed))
        self.arrays = arrays
        self.want = want
        self.nbytes = 0
        self._spare = spare
        self._lying: dict[str, Flat] = {}
        self._blocks: list[Piece] = []
        self._of_key: dict[str, range] = {}
        for key in [key for key in arrays.leaves if key in want]:  # in the publishers' order
            box, item = want[key], arrays.item(key)
            first = len(self._blocks)
            if volume(box):
                most = max(1, manifest.CHUNK // item)
                self._blocks += [Piece(key, one) for one in resharding.blocks(box, most)]
            self._of_key[key] = range(first, len(self._blocks))
            self.nbytes += aligned(volume(box) * item)
        self.todo = list(self._blocks)
        self._left = [volume(block.box) for block in self._blocks]
        self._missing = sum(self._left)
        if not self._missing:
            self.take(VersionMemory(1, shared=False))

    @property
    def is_whole(self) -> bool:
        return not self._missing

    @property
    def id(self) -> bytes:
        ids = [one.id for one in self.releases]
        if len(ids) == 1 or not all(ids):
            return min(ids)
        return hashlib.blake2b(b"".join(ids), digest_size=16).digest()

    @property
    def releases(self) -> tuple[Release, ...]:
        return self.arrays.releases

    def is_base_of(self, newer: Lot) -> bool:
        """Whether differences can lead from this one to a newer version of the same slices."""
        return (
            bool(self.id and newer.id)
            and self.is_whole
            and self.version < newer.version
            and self.name == newer.name
            and all(self.arrays.item(key) == newer.arrays.item(key) for key in self.want)
        )

    @property
    def here(self) -> int:
        return sum(
            self.arrays.item(key) * (volume(self.want[key]) - sum(self._left[at] for at in numbers))
            for key, numbers in self._of_key.items()
        )

    def take(self, memory: VersionMemory) -> None:
        if self.memory is not None:
            self.memory.close()
        self.memory = memory
        lying, start = np.frombuffer(memory.view, np.uint8), 0
        for key in self._of_key:
            dtype = carrier(self.arrays.leaf(key).spec.name)
            shape = [last - first for first, last in self.want[key]]
            stop = start + volume(self.want[key]) * dtype.itemsize
            self._lying[key] = lying[start:stop].view(dtype).reshape(shape)
            start = aligned(stop)
        self.tell()

    async def make_own(self, *, shared: bool) -> None:
        """Get own memory, and copy what is here of another one's. Raises MemoryError."""
        nbytes, before, spare = self.nbytes, self.memory, self._spare
        if before is None:
            self.take(VersionMemory(nbytes, shared=shared, spare=spare))
        elif not before.is_own:
            self.take(await own_memory(nbytes, before, nbytes, shared=shared, spare=spare))

    def _let_go(self) -> None:
        super()._let_go()
        self._lying.clear()
        if self.memory is not None:
            self.memory.close()
            self.memory = None

    @property
    def has_leaves(self) -> bool:
        return True

    def leaves(self) -> list[Leaf]:
        return [self.arrays.leaf(key) for key in self._of_key]

    def has_leaf(self, leaf: Leaf) -> bool:
        """Whether all wanted elements of an array are here."""
        # An empty array lacks nothing, but without memory there is nothing to read either.
        return leaf.key in self._lying and self.has({*self._of_key[leaf.key]})

    def fill(self, piece: Piece) -> None:
        for at in self.needed(piece):
            common = intersection(self._blocks[at].box, piece.box)
            assert common is not None
            self._left[at] -= volume(common)
        self._missing -= volume(piece.box)

    def nbytes_of(self, parcel: Parcel) -> int:
        return sum(volume(piece.box) * self.arrays.item(piece.key) for piece in parcel)

    def lack(self, parcels: Iterable[Parcel]) -> None:
        """Note that `parcels` do not come, so they have to come from another source."""
        for parcel in parcels:
            self.todo += parcel

    def needed(self, piece: Piece) -> set[int]:
        want = self.want.get(piece.key)
        if want is None or not lies_in(piece.box, want):
            raise ProtocolError(f"{piece.key}{text(piece.box)} is not wanted here")
        numbers = self._of_key[piece.key]
        blocks = self._blocks
        return {at for at in numbers if intersection(blocks[at].box, piece.box) is not None}

    def tree(self) -> Any:
        """The tree of the version. Its arrays are views of what is here, or copies."""
        return joined([manifest.tree_of(one, self.read) for one in self.arrays.manifests])

    def read(self, leaf: Leaf) -> Any:
        """An array, in the form that users get."""
        return manifest.shown(self._lying[leaf.key].view(), leaf.spec, leaf.name)

    def lying(self, leaf: Leaf) -> Flat:
        return self._lying[leaf.key]

    def has(self, needed: set[int]) -> bool:
        return not any(self._left[at] for at in needed)

    def view(self, piece: Piece) -> Flat:
        return cut(self._lying[piece.key], self.want[piece.key], piece.box)

    def check(self, needed: set[int]) -> None:
        """Nothing to do, because all data in a lot was checked when it came."""


def unpacked_parcel(data: Flat, check: int, lot: Lot, parcel: Parcel) -> None:
    """Copy a parcel to its place, if it is not there. May run in a thread.

    Raises ProtocolError if it is damaged.
    """
    if crc32(data.data) != check:
        raise ProtocolError(f"a parcel of version {lot.version} came damaged")
    views = [lot.view(piece) for piece in parcel]
    for view, place in zip(views, places(data, views), strict=True):
        if not np.may_share_memory(view, place):
            np.copyto(view, place)


def decoded_parcel(code: bytes, check: int, base: Lot, lot: Lot, parcel: Parcel) -> None:
    """Make a parcel from that of an older version, by its difference. May run in a thread.

    Raises ProtocolError if the result is not what was published.
    """
    data = room_for(lot, parcel)
    decode(code, joined_views([base.view(piece) for piece in parcel]), data)
    unpacked_parcel(data, check, lot, parcel)


def copy(source: Source, lot: Lot, parcel: Parcel) -> None:
    """Copy a parcel from mapped memory; may run in a thread. Raises ProtocolError."""
    for piece in parcel:
        np.copyto(lot.view(piece), source.view(piece))


def room_for(lot: Lot, parcel: Parcel) -> Flat:
    """Memory to receive a parcel: its own place, if that is contiguous."""
    views = [lot.view(piece) for piece in parcel]
    if len(views) == 1 and views[0].flags.c_contiguous:
        return views[0].reshape(-1).view(np.uint8)
    return np.empty(sum(view.nbytes for view in views), np.uint8)


def asked_of(
    lot: Lot, held: Sequence[Want], far: Sequence[int], turn: int
) -> tuple[list[list[Piece]], list[Piece]]:
    """The pieces to ask of each holder, and the pieces that no holder has."""
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
