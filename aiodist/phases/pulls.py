"""The phases in shared memory: which pull plan, in what pieces.

All choices are functions of what all ranks know. Ranks that chose different plans, or pieces of
different sizes, would wait for each other's steps for ever, or read what is not there yet.
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
"""Most bytes of an array that everyone reduces for itself."""
WHOLE_SLOTS = 8 * 1024
"""Most bytes of all slots of a reduce_scatter in which each rank shows all of them, though nobody
else reads its own."""
WORTH = 2 * 1024 * 1024
"""Bytes more that a crowded rank moves rather than meet all others once more."""
DEPTH = 3
"""Buffers through which large arrays go: one is filled, one is read, one is behind."""
CROWDED_DEPTH = 2
"""Buffers of reductions and messages where there are more ranks than cores: nobody is far behind,
as all others wait for who has the core, and pieces are larger."""
ROUNDS = 4
"""Rounds in which even small ones go, so that ranks work at the same time."""
LEAST = 64 * 1024
"""Bytes of a piece under which its own overhead is more than what it carries."""

PAUSE = 256 * 1024
"""Bytes after which the event loop may have a turn, where nothing else cuts the work in pieces."""


def piece_for(
    slots: int, itemsize: int, longest: int, rounds: int = 1, buffer: int = BULK // DEPTH
) -> int:
    """Elements of a piece, where each buffer, of so many bytes, has room for `slots` of them, and
    no message is of more than `longest` elements, to be moved in at least so many `rounds`."""
    room = buffer // max(1, slots)
    wanted = max(LEAST, -(-longest * itemsize // rounds))
    return max(1, min(room, wanted) // itemsize)


def _slice_piece(place: Place, group: DtypeGroup, longest: int) -> tuple[int, int]:
    """Elements of a piece, where each rank reduces a slice of up to `longest` elements, and the
    number of buffers. What fits goes in one round: to wait for the others costs more than smaller
    pieces gain."""
    itemsize, size = group.x.itemsize, place.size
    bulk, depth = (CROWDED_BULK, CROWDED_DEPTH) if place.crowded else (BULK, DEPTH)
    if size * longest * itemsize <= bulk:
        return max(1, longest), depth
    return piece_for(size, itemsize, longest, buffer=bulk // depth), depth


def _reduction(
    place: Place, group: DtypeGroup, plan: Prepared, direct: tuple[Any, ...] | None = None
) -> Phase:
    """`direct`: the algorithm, and its arguments, where all lie in memory that all see."""
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
    return Phase(plan, memory, x.itemsize, shared, None if direct is None else choose)


def _reduces_whole(group: DtypeGroup) -> bool:
    """Whether everyone reduces all of it."""
    return group.x.nbytes <= WHOLE or not group.kernel.sliceable


def _shows_whole(place: Place, group: DtypeGroup) -> bool:
    """Whether everyone reduces all of it, though slices could be: that is to meet once, not twice.

    Two ranks move no more bytes for that. More do, which is worth it where some have to wait for
    the core of others before they meet. In any case to reduce must take no longer than to copy.
    """
    kernel = group.kernel
    if not isinstance(kernel, Kernel) or kernel.loads or kernel.stores:
        return False
    more = (place.size - 2) * group.x.nbytes
    return more == 0 or (place.crowded and more <= WORTH)


def can_reduce(group: DtypeGroup) -> bool:
    """Whether there is a pull plan for it: large arrays have to be sliceable."""
    return group.x.nbytes <= SMALL or group.kernel.sliceable


def can_slice(group: DtypeGroup) -> bool:
    """Whether slices of it may be reduced piece by piece."""
    return group.kernel.sliceable


def can_scan(group: DtypeGroup) -> bool:
    """Whether there is a pull plan for its prefixes: large ones are passed on in its own dtype."""
    return group.x.nbytes <= SMALL or (
        group.kernel.sliceable and not group.kernel.loads and not group.kernel.stores
    )


def all_reduce(place: Place, group: DtypeGroup) -> Phase:
    """The phase may go the direct way in place alone. Where everyone reduces all, that way is not
    worth the second wait."""
    length = group.x.length
    if _reduces_whole(group):
        plan = prepared(pull_whole.all_reduce, place.rank, place.size, length)
        return _reduction(place, group, plan)._replace(whole=length > 0)
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
    """What the other ranks have for this one, from where it lies. Raises ProtocolError."""
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
        return _reduction(place, group, plan)._replace(whole=whole)
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
        # A round is a turn of all ranks on their cores, so there are as few as there is room for.
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
