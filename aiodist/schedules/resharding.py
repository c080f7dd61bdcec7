"""Who sends which part of an array to whom, when an array that lies in parts on some ranks is to
lie in other parts on others.

An array is cut into boxes, one for each part that a rank holds: rows on four ranks, say, where
columns are wanted on three. A box that is wanted is the union of its intersections with the boxes
that are held. Where several ranks hold the same box (replicas), any of them may send it.

    held:  0 0 0 0     wanted:  a a b b     a takes from 0 and from 1, b as well: four pieces,
           1 1 1 1              a a b b     none of which crosses twice, and nothing else does.

What is moved is the least there is: a rank takes what it holds itself from its own memory, and all
else once. The plan is a pure function of what all ranks hold and want, so that every rank makes the
same one from the same descriptions, and nobody has to tell anybody what to do.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

Interval = tuple[int, int]
"""From the first element to the one behind the last."""

Box = tuple[Interval, ...]
"""A part of an array: an interval in each dimension. `()` is the one element of a scalar."""


class Transfer(NamedTuple):
    """A box that rank `src` holds, and `dst` gets (from itself, where both are the same)."""

    src: int
    dst: int
    box: Box


class Layout(NamedTuple):
    """Where one array lies, and where it is to lie: `held` and `wanted` by rank, None for a rank
    that has, or wants, no part of it."""

    held: tuple[Box | None, ...]
    wanted: tuple[Box | None, ...]
    item: int = 1
    """Bytes of an element."""


class Unheld(ValueError):
    """A rank wants what no rank holds: `rank`, and the first `box` of which that is so."""

    def __init__(self, rank: int, box: Box) -> None:
        super().__init__(f"rank {rank} wants {text(box)}, which no rank holds")
        self.rank = rank
        self.box = box


def text(box: Box) -> str:
    """A box as it is written in Python: ``[0:4, 2:3]``."""
    return f"[{', '.join(f'{start}:{stop}' for start, stop in box)}]"


def volume(box: Box) -> int:
    """How many elements there are in `box`."""
    product = 1
    for start, stop in box:
        product *= stop - start
    return product


def intersection(a: Box, b: Box) -> Box | None:
    """What is in both; None where that is nothing."""
    common = []
    for (a_start, a_stop), (b_start, b_stop) in zip(a, b, strict=True):
        start, stop = max(a_start, b_start), min(a_stop, b_stop)
        if start >= stop:
            return None
        common.append((start, stop))
    return tuple(common)


def remainder(box: Box, inner: Box) -> list[Box]:
    """`box` without `inner`, which lies in it, as boxes that do not overlap: at most two for each
    dimension, those before and behind `inner` in it."""
    rest = []
    for dim, ((start, stop), (first, last)) in enumerate(zip(box, inner, strict=True)):
        # In the dimensions before this one, what is outside of `inner` has been cut off already.
        before, behind = inner[:dim], box[dim + 1 :]
        if start < first:
            rest.append((*before, (start, first), *behind))
        if last < stop:
            rest.append((*before, (last, stop), *behind))
    return rest


def plan(layouts: Iterable[Layout], hosts: Sequence[int]) -> list[list[Transfer]]:
    """The transfers of each array, those to one rank in the order of the boxes that are held.

    `hosts`: the host of each rank, as a number. Who gets a box that several ranks hold takes it
    from itself, if it can, else from a rank of its host, else from any: from the one that has had
    to send the fewest bytes so far, over all arrays, the next one in rank order among equals.

    Raises Unheld.
    """
    load = [0] * len(hosts)
    return [_transfers(layout, hosts, load) for layout in layouts]


def _transfers(layout: Layout, hosts: Sequence[int], load: list[int]) -> list[Transfer]:
    transfers = []
    for dst, pieces in enumerate(_pieces_of_all(layout.held, layout.wanted)):
        for box, owners in pieces:
            src = dst if dst in owners else _least_loaded(dst, owners, hosts, load)
            if src != dst:
                load[src] += volume(box) * layout.item
            transfers.append(Transfer(src, dst, box))
    return transfers


def _least_loaded(
    dst: int, owners: Sequence[int], hosts: Sequence[int], load: Sequence[int]
) -> int:
    near = [rank for rank in owners if hosts[rank] == hosts[dst]] or owners
    return min(near, key=lambda rank: (load[rank], (rank - dst) % len(hosts)))


Pieces = tuple[tuple[Box, tuple[int, ...]], ...]
"""Boxes that make up a box that is wanted, each with the ranks that hold it."""


@lru_cache(maxsize=256)
def _pieces_of_all(
    held: tuple[Box | None, ...], wanted: tuple[Box | None, ...]
) -> tuple[Pieces, ...]:
    """The pieces of what each rank wants. Kept, since a model has many arrays of few layouts."""
    owners: dict[Box, list[int]] = {}
    for rank, box in enumerate(held):
        if box is not None and volume(box):
            owners.setdefault(box, []).append(rank)
    return tuple(
        () if box is None else tuple(_pieces(rank, box, owners)) for rank, box in enumerate(wanted)
    )


def _pieces(
    rank: int, wanted: Box, owners: dict[Box, list[int]]
) -> Iterable[tuple[Box, tuple[int, ...]]]:
    if not volume(wanted):
        return
    missing = [wanted]
    # What this rank holds itself comes first: no byte of it is to come from elsewhere.
    for box in sorted(owners, key=lambda box: (rank not in owners[box], box)):
        still_missing: list[Box] = []
        for part in missing:
            common = intersection(part, box)
            if common is None:
                still_missing.append(part)
            else:
                yield common, tuple(owners[box])
                still_missing += remainder(part, common)
        missing = still_missing
        if not missing:
            return
    raise Unheld(rank, missing[0])
