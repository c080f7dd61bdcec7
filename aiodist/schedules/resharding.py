"""The transfers of an array that lies in parts on some ranks and is wanted in other parts on
others.

An array is cut into boxes, one for each part that a rank holds: for example rows on four ranks,
when columns are wanted on three. A wanted box is the union of its intersections with the held
boxes. If several ranks hold the same box (replicas), any of them may send it.

    held:  0 0 0 0     wanted:  a a b b     a takes from 0 and from 1, b as well: four pieces,
           1 1 1 1              a a b b     none of which crosses twice, and nothing else does.

The least possible is moved: a rank takes what it holds itself from its own memory, and everything
else once. The plan is a pure function of what all ranks hold and want. So every rank makes the same
plan from the same descriptions, and no rank has to tell another what to do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

Interval = tuple[int, int]
"""From the first element to the one behind the last."""

Box = tuple[Interval, ...]
"""A part of an array: an interval in each dimension. `()` is the one element of a scalar."""


class BoxTransfer(NamedTuple):
    """A box that rank `src` holds, and `dst` gets; if both are the same rank, it is a copy."""

    src: int
    dst: int
    box: Box


class BoxLayout(NamedTuple):
    """The boxes of one array before and after: `held` and `wanted` by rank. A rank that has, or
    wants, no part of it has None there."""

    held: tuple[Box | None, ...]
    wanted: tuple[Box | None, ...]
    item: int = 1
    """Bytes of an element."""


class Unheld(ValueError):
    """A rank wants what no rank holds: `rank`, and the first `box` that is missing."""

    def __init__(self, rank: int, box: Box) -> None:
        super().__init__(f"rank {rank} wants {text(box)}, which no rank holds")
        self.rank = rank
        self.box = box


def text(box: Box) -> str:
    """A box as it is written in Python: ``[0:4, 2:3]``."""
    return f"[{', '.join(f'{start}:{stop}' for start, stop in box)}]"


def volume(box: Box) -> int:
    """How many elements are in `box`."""
    product = 1
    for start, stop in box:
        product *= stop - start
    return product


def intersection(a: Box, b: Box) -> Box | None:
    """The elements that are in both boxes, or None if there are none."""
    common = []
    for (a_start, a_stop), (b_start, b_stop) in zip(a, b, strict=True):
        start, stop = max(a_start, b_start), min(a_stop, b_stop)
        if start >= stop:
            return None
        common.append((start, stop))
    return tuple(common)


def remainder(box: Box, inner: Box) -> list[Box]:
    """`box` without `inner`, which lies in it, as boxes that do not overlap. They are at most two
    for each dimension, the part before `inner` and the part behind it."""
    rest = []
    for dim, ((start, stop), (first, last)) in enumerate(zip(box, inner, strict=True)):
        # In the dimensions before this one, the parts outside of `inner` have been cut off already.
        before, behind = inner[:dim], box[dim + 1 :]
        if start < first:
            rest.append((*before, (start, first), *behind))
        if last < stop:
            rest.append((*before, (last, stop), *behind))
    return rest


def blocks(box: Box, most: int) -> list[Box]:
    """`box`, cut into boxes of at most `most` elements (and at least one), in the order of a
    contiguous array. Each box is one stretch of such an array."""
    if volume(box) <= most:
        return [box]
    dim = next(dim for dim, (start, stop) in enumerate(box) if stop - start > 1)
    start, stop = box[dim]
    rows = max(1, most * (stop - start) // volume(box))
    return [
        block
        for at in range(start, stop, rows)
        for block in blocks((*box[:dim], (at, min(at + rows, stop)), *box[dim + 1 :]), most)
    ]


def plan(layouts: Iterable[BoxLayout], hosts: Sequence[int]) -> list[list[BoxTransfer]]:
    """The transfers of each array; the transfers to one rank are in the order of the held boxes.

    `hosts`: the host of each rank, as a number. If several ranks hold a box, a rank takes it from
    itself if it can, else from a rank of its host, else from any. Among ranks that are equally near
    it takes the one that has had to send the fewest bytes so far, over all arrays. Among equals
    that is the next one in rank order.

    Raises Unheld.
    """
    load = [0] * len(hosts)
    return [_transfers(layout, tuple(hosts), load) for layout in layouts]


def _transfers(layout: BoxLayout, hosts: tuple[int, ...], load: list[int]) -> list[BoxTransfer]:
    transfers = []
    for dst, pieces in enumerate(_pieces_of_all(layout.held, layout.wanted, hosts)):
        for piece in pieces:
            own = dst in piece.owners
            src = dst if own else _least_loaded(dst, piece, layout.item, load)
            transfers.append(BoxTransfer(src, dst, piece.box))
    return transfers


class Want(NamedTuple):
    """A box that a program without any part of the array wants: `held` are the boxes of the
    holders."""

    box: Box
    held: Held
    item: int
    """Bytes of an element."""


def asked_of(
    wants: Iterable[Want], holders: int, turn: int
) -> Iterator[list[tuple[int | None, Box]]]:
    """For each of `wants`, the number of a holder and the box to take from it, chosen as in `plan`.
    The holder is None for a box that is missing. `turn`: the holder that is first among equals."""
    load = [0] * holders
    for want in wants:
        yield [
            (_least_loaded(turn, piece, want.item, load) if piece.owners else None, piece.box)
            for piece in _pieces(want.box, want.held)
        ]


class _Piece(NamedTuple):
    """A part of a wanted box, with those of its holders that are equally near; there may be
    none."""

    box: Box
    owners: tuple[int, ...]


Held = tuple[_Piece, ...]
"""Boxes that are held, the nearest first."""


def _least_loaded(turn: int, piece: _Piece, item: int, load: list[int]) -> int:
    src = min(piece.owners, key=lambda rank: (load[rank], (rank - turn) % len(load)))
    load[src] += volume(piece.box) * item
    return src


@lru_cache(maxsize=256)
def _pieces_of_all(
    held: tuple[Box | None, ...], wanted: tuple[Box | None, ...], hosts: tuple[int, ...]
) -> tuple[tuple[_Piece, ...], ...]:
    """The pieces of what each rank wants. They are cached because a model has many arrays of few
    layouts."""
    found: list[tuple[_Piece, ...]] = []
    for rank, box in enumerate(wanted):
        # A rank's own boxes come first, so that no byte of them is sent by another rank.
        far = [2 - (host == hosts[rank]) - (other == rank) for other, host in enumerate(hosts)]
        pieces = () if box is None else tuple(_pieces(box, nearest_first(held, tuple(far))))
        for piece in pieces:
            if not piece.owners:
                raise Unheld(rank, piece.box)
        found.append(pieces)
    return tuple(found)


@lru_cache(maxsize=4096)
def nearest_first(held: tuple[Box | None, ...], far: tuple[int, ...]) -> Held:
    """The held boxes, by holder, in the order in which they are to be taken. `far` says how far
    each holder is; holders with equal numbers are equally far."""
    owners: dict[tuple[int, Box], list[int]] = {}
    for holder, box in enumerate(held):
        if box is not None and volume(box):
            owners.setdefault((far[holder], box), []).append(holder)
    return tuple(_Piece(box, tuple(owners[far, box])) for far, box in sorted(owners))


def _pieces(wanted: Box, held: Held) -> Iterator[_Piece]:
    missing = [wanted] if volume(wanted) else []
    for box, owners in held:
        still_missing: list[Box] = []
        for part in missing:
            common = intersection(part, box)
            if common is None:
                still_missing.append(part)
            else:
                yield _Piece(common, owners)
                still_missing += remainder(part, common)
        missing = still_missing
    for part in missing:
        yield _Piece(part, ())
