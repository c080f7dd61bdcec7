"""The phases in shared memory: which pull plan they use, and the size of its pieces.

All choices depend only on what all ranks know. If ranks chose different plans or pieces, they would
wait for each other for ever, or read data that is not there yet.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from aiodist.buffers.kernels import Kernel
from aiodist.buffers.reductions import DtypeGroup
from aiodist.buffers.vector import Vector
from aiodist.engine.phase import Phase, Prepared, prepared
from aiodist.phases.base import Place
from aiodist.phases.memories import Reductions, Regions
from aiodist.schedules import pull_direct, pull_scan, pull_slices, pull_values, pull_whole
from aiodist.shared_memory.board import BULK, CROSSING, CROWDED_BULK, SMALL

WHOLE = 128 * 1024
"""The most bytes of an array that every rank reduces as a whole."""
WHOLE_SLOTS = 8 * 1024
"""The most bytes of all slots of a reduce_scatter in which each rank shows all of its slots,
although no other rank needs its own."""
WORTH = 2 * 1024 * 1024
"""How many more bytes a rank on a crowded host moves, to avoid one more meeting of all ranks."""
DEPTH = 3
"""The buffers for large arrays: one is filled, one is read, and one is for a rank that is
behind."""
CROWDED_DEPTH = 2
"""The buffers for reductions and messages if there are more ranks than cores. Ranks stay close
together, because all wait for a core, so larger pieces are better than more buffers."""
ROUNDS = 4
"""The rounds in which even small arrays go, so that ranks work at the same time."""
LEAST = 64 * 1024
"""Smaller pieces than this, in bytes, cost more overhead than they gain."""

PAUSE = 256 * 1024
"""After so many bytes the event loop may have a turn, if nothing else cuts the work into pieces."""


def piece_for(
    slots: int, itemsize: int, longest: int, rounds: int = 1, buffer: int = BULK // DEPTH
) -> int:
    """Return the elements of a piece.

    A buffer of `buffer` bytes has room for `slots` pieces. A message has up to `longest` elements
    and takes at least `rounds` rounds.
    """
    room = buffer // max(1, slots)
    wanted = max(LEAST, -(-longest * itemsize // rounds))
    return max(1, min(room, wanted) // itemsize)


def _slice_piece(place: Place, group: DtypeGroup, longest: int) -> tuple[int, int]:
    """Return the elements of a piece, and the number of buffers, if each rank reduces a slice of up
    to `longest` elements.

    What fits goes in one round, because waiting for the others costs more than smaller pieces gain.
    """
    itemsize, size = group.x.itemsize, place.size
    bulk, depth = (CROWDED_BULK, CROWDED_DEPTH) if place.crowded else (BULK, DEPTH)
    if size * longest * itemsize <= bulk:
        return max(1, longest), depth
    return piece_for(size, itemsize, longest, buffer=bulk // depth), depth


def _reduction(
    place: Place,
    group: DtypeGroup,
    plan: Prepared,
    direct: tuple[Any, ...] | None = None,
    *,
    whole: bool = False,
) -> Phase:
    """Make the phase of a reduction.

    `direct`: the algorithm and its arguments to use instead, if all arrays are in memory that all
    ranks see. `whole`: see `Phase`.
    """
    x = group.x
    memory = Reductions(x, group.out, 0, group.kernel, place.size)

    def choose(places: Mapping[int, int]) -> Prepared:
        assert direct is not None
        shown = [x] * place.size
        for peer, location in places.items():
            shown[peer] = Vector.of(place.heap.find(peer, location, x.nbytes).view(x.dtype))
        memory.show(shown)
        algorithm, *args = direct
        return prepared(algorithm, place.rank, place.size, *args)

    shared = plan.plan.shared * x.itemsize
    return Phase(plan, memory, x.itemsize, shared, None if direct is None else choose, whole)


def _reduces_whole(group: DtypeGroup) -> bool:
    """Return whether every rank reduces the whole array."""
    return group.x.nbytes <= WHOLE or not group.kernel.sliceable


def _shows_whole(place: Place, group: DtypeGroup) -> bool:
    """Return whether every rank reduces the whole array, although slices would be possible.

    Then ranks meet once instead of twice. Two ranks move no more bytes for that. More ranks do,
    which pays only if some have to wait for a core before they meet. Also, reducing must take no
    longer than copying.
    """
    kernel = group.kernel
    if not isinstance(kernel, Kernel) or kernel.loads or kernel.stores:
        return False
    more = (place.size - 2) * group.x.nbytes
    return more == 0 or (place.crowded and more <= WORTH)


def can_reduce(group: DtypeGroup) -> bool:
    """Return whether there is a pull plan for `group`. Large arrays have to be sliceable."""
    return group.x.nbytes <= SMALL or group.kernel.sliceable


def can_slice(group: DtypeGroup) -> bool:
    """Return whether slices of `group` may be reduced piece by piece."""
    return group.kernel.sliceable


def can_scan(group: DtypeGroup) -> bool:
    """Return whether there is a pull plan for the prefixes of `group`. Large ones are passed on in
    their own dtype."""
    return group.x.nbytes <= SMALL or (
        group.kernel.sliceable and not group.kernel.loads and not group.kernel.stores
    )


def all_reduce(place: Place, group: DtypeGroup) -> Phase:
    """Only a call in place may use the direct way. If every rank reduces the whole array, that way
    is not worth a second meeting."""
    length = group.x.length
    if _reduces_whole(group):
        plan = prepared(pull_whole.all_reduce, place.rank, place.size, length)
        return _reduction(place, group, plan, whole=length > 0)
    longest = -(-length // place.size)
    if _shows_whole(place, group):
        room, depth = BULK // group.x.itemsize, DEPTH
        piece = length if length <= room else room // depth
        algorithm = pull_whole.all_reduce_in_pieces
    else:
        piece, depth = _slice_piece(place, group, longest)
        algorithm = pull_slices.all_reduce
    plan = prepared(algorithm, place.rank, place.size, length, piece, depth)
    piece = piece_for(place.size, group.x.itemsize, longest)
    return _reduction(place, group, plan, (pull_direct.all_reduce, length, piece))


def reduce(place: Place, group: DtypeGroup, root: int) -> Phase:
    length = group.x.length
    if _reduces_whole(group):
        plan = prepared(pull_whole.reduce, place.rank, place.size, root, length)
        return _reduction(place, group, plan)
    piece, depth = _slice_piece(place, group, -(-length // place.size))
    plan = prepared(pull_slices.reduce, place.rank, place.size, root, length, piece, depth)
    return _reduction(place, group, plan)


def take(
    place: Place,
    places: Mapping[int, int],
    receives: Sequence[int],
    target: Sequence[memoryview],
) -> Phase:
    """Take what the other ranks have for this one from its place in their memory. Raises
    ProtocolError."""
    shown = [Vector([], np.uint8)] * place.size
    for peer, location in places.items():
        nbytes = receives[peer + 1] - receives[peer]
        shown[peer] = Vector.of(place.heap.find(peer, location, nbytes))
    plan = prepared(
        pull_direct.take, place.rank, place.size, (0,) * place.size, tuple(receives), 0, PAUSE
    )
    memory = Regions.of_bytes((), target)
    memory.show(shown)
    return Phase(plan, memory, 1, 0)


def reduce_scatter(place: Place, group: DtypeGroup) -> Phase:
    bounds = tuple(group.bounds)
    if group.x.nbytes <= WHOLE_SLOTS:
        plan = prepared(pull_whole.reduce_scatter, place.rank, place.size, bounds)
        whole = bounds[place.rank] < bounds[place.rank + 1]
        return _reduction(place, group, plan, whole=whole)
    longest = max(b - a for a, b in itertools.pairwise(bounds))
    piece, depth = _slice_piece(place, group, longest)
    plan = prepared(pull_slices.reduce_scatter, place.rank, place.size, bounds, piece, depth)
    direct = pull_direct.reduce_scatter, bounds, PAUSE // group.x.itemsize
    return _reduction(place, group, plan, direct)


def scan(place: Place, group: DtypeGroup, exclusive: bool) -> Phase:
    length = group.x.length
    if group.x.nbytes <= SMALL:
        plan = prepared(pull_whole.scan, place.rank, place.size, length, exclusive)
    else:
        piece = piece_for(1, group.x.itemsize, length, ROUNDS)
        plan = prepared(pull_scan.scan, place.rank, place.size, length, exclusive, piece, DEPTH)
    return _reduction(place, group, plan)


def broadcast(
    place: Place, root: int, source: Sequence[memoryview], target: Sequence[memoryview]
) -> Phase:
    memory = Regions.of_bytes(source, target)
    length = sum(view.nbytes for view in (source or target))
    piece = piece_for(1, 1, length, ROUNDS)
    plan = prepared(pull_values.broadcast, place.rank, place.size, root, length, piece, DEPTH)
    return Phase(plan, memory, 1, plan.plan.shared)


def all_gather(
    place: Place,
    lengths: Sequence[int],
    source: Sequence[memoryview],
    target: Sequence[memoryview],
) -> Phase:
    memory = Regions.of_bytes(source, target)
    piece = piece_for(1, 1, max(lengths), ROUNDS)
    plan = prepared(pull_values.all_gather, place.rank, place.size, tuple(lengths), piece, DEPTH)
    return Phase(plan, memory, 1, plan.plan.shared)


def exchange(
    place: Place,
    sends: tuple[int, ...],
    receives: tuple[int, ...],
    longest: int,
    source: Sequence[memoryview],
    target: Sequence[memoryview],
) -> Phase:
    memory = Regions.of_bytes(source, target)
    if place.crowded:
        # In each round all ranks need a turn on their cores, so use as few rounds as memory allows.
        depth = CROWDED_DEPTH
        piece = piece_for(place.size - 1, 1, longest, buffer=CROSSING // depth)
    else:
        depth = DEPTH
        piece = piece_for(place.size - 1, 1, longest, ROUNDS)
    rounds = -(-longest // piece)
    plan = prepared(
        pull_values.exchange, place.rank, place.size, sends, receives, rounds, piece, depth
    )
    return Phase(plan, memory, 1, plan.plan.shared)
