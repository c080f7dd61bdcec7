"""The phases of groups that span hosts: which mixed plan, in what pieces.

All choices are functions of what all ranks know. Ranks that chose different plans, or pieces of
different sizes, would wait for each other's steps for ever, or read what is not there yet.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from aiodist.buffers.reductions import DtypeGroup
from aiodist.engine.phase import Phase, Prepared, prepared
from aiodist.phases.base import Place
from aiodist.phases.memories import Partials, Regions
from aiodist.schedules import team_slices, team_values, team_whole
from aiodist.schedules.selection import SCRATCH_LIMIT, window_for
from aiodist.schedules.teams import in_order, most_duties, team_view
from aiodist.shared_memory.board import CROSSING
from aiodist.wire.frames import MAX_PAYLOAD

WHOLE = 64 * 1024
"""Most bytes of an array that the first rank of a host reduces for all. Also in an accumulator of
four times its width (float8 in float32) it fits into a frame."""
ROUNDS = 4
"""Rounds in which even small ones go, so that links and ranks are busy at the same time."""
LEAST = 64 * 1024
"""Bytes of a piece under which its own overhead is more than what it carries."""


def piece_for(slots: int, itemsize: int, longest: int, widest: int = 1) -> int:
    """Elements of a piece, where each of two buffers has room for `slots` of them, and none is of
    more than `longest` elements, to be moved in a few rounds. `widest`: bytes of an element as it
    travels."""
    room = CROSSING // (2 * slots)
    wanted = max(LEAST, -(-longest * itemsize // ROUNDS))
    return max(1, min(min(room, wanted) // itemsize, MAX_PAYLOAD // widest))


def can_reduce(place: Place, group: DtypeGroup) -> bool:
    """Whether there is a plan for it: large arrays have to be sliceable, and the order of the hosts
    has to be that of the ranks, or not to matter."""
    kernel = group.kernel
    in_any_order = kernel.op.commutative or in_order(place.teams)
    return in_any_order and (goes_whole(group) or kernel.sliceable)


def goes_whole(group: DtypeGroup) -> bool:
    """Whether the first rank of each host reduces it. That synchronises all ranks."""
    return group.x.nbytes <= WHOLE


def can_slice(place: Place, group: DtypeGroup) -> bool:
    """Whether slices of it may be reduced piece by piece."""
    return can_reduce(place, group) and group.kernel.sliceable


def all_reduce(place: Place, group: DtypeGroup) -> Phase:
    length = group.x.length
    if goes_whole(group):
        plan = prepared(team_whole.all_reduce, place.rank, place.teams, length)
    else:
        cut = _slices(place, group, -(-length // place.size))
        plan = prepared(team_slices.all_reduce, place.rank, place.teams, length, *cut)
    return _reduction(place, group, plan)


def reduce(place: Place, group: DtypeGroup, root: int) -> Phase:
    """Where it is large, to be preceded by a phase that synchronises."""
    length = group.x.length
    if goes_whole(group):
        plan = prepared(team_whole.reduce, place.rank, place.teams, root, length)
    else:
        owners = len(team_view(place.teams, root).team)
        cut = _slices(place, group, -(-length // owners))
        plan = prepared(team_slices.reduce, place.rank, place.teams, root, length, *cut)
    return _reduction(place, group, plan)


def reduce_scatter(place: Place, group: DtypeGroup) -> Phase:
    """Where slots are empty, to be preceded by a phase that synchronises."""
    bounds = tuple(group.bounds)
    cut = _slices(place, group, max(b - a for a, b in itertools.pairwise(bounds)))
    plan = prepared(team_slices.reduce_scatter, place.rank, place.teams, bounds, *cut)
    return _reduction(place, group, plan)


def _slices(place: Place, group: DtypeGroup, longest: int) -> tuple[int, int]:
    """Elements of a piece, and the rounds that pieces have to cross: where hosts are far from each
    other, so many that the wire is busy all that time, as far as there is scratch. Of each slice
    that a rank is agent of, and of its own from each other host, two pieces a round have a place
    there."""
    wide = group.kernel.wire_dtype.itemsize
    piece = piece_for(place.size, group.x.itemsize, longest, wide)
    # Partial results of all who have to do with a rank have a place in its scratch.
    piece = max(1, min(piece, SCRATCH_LIMIT // (team_slices.places(place.teams) * wide)))
    if not place.costs.way:
        return piece, team_slices.LAG
    window = window_for(piece * wide, most_duties(place.teams) + len(place.teams), place.costs)
    return piece, max(team_slices.LAG, min(window // 2, -(-longest // piece)))


def _reduction(place: Place, group: DtypeGroup, plan: Prepared) -> Phase:
    memory = Partials(group.x, group.out, plan.plan.scratch, group.kernel, place.size)
    itemsize = group.x.itemsize
    return Phase(plan, memory, itemsize, plan.plan.shared * itemsize)


def broadcast(
    place: Place, root: int, source: Sequence[memoryview], target: Sequence[memoryview]
) -> Phase:
    """To be preceded by a phase that synchronises."""
    length = sum(view.nbytes for view in (source or target))
    if length <= MAX_PAYLOAD:
        plan = prepared(team_whole.broadcast, place.rank, place.teams, root, length)
        return Phase(plan, Regions.of_bytes(source, target), 1, length)
    # Every host has at least so many ranks: the blocks go between hosts over so many links at once.
    carriers = min(map(len, place.teams))
    piece = piece_for(carriers, 1, -(-length // carriers))
    plan = prepared(team_values.broadcast, place.rank, place.teams, root, length, piece)
    return Phase(plan, Regions.of_bytes(source, target), 1, plan.plan.shared)


def all_gather(
    place: Place,
    lengths: Sequence[int],
    source: Sequence[memoryview],
    target: Sequence[memoryview],
) -> Phase:
    """To be preceded by a phase that synchronises."""
    piece = piece_for(most_duties(place.teams), 1, max(lengths))
    lag = max(team_values.LAG, min(place.costs.way, max(lengths)) // piece)
    plan = prepared(team_values.all_gather, place.rank, place.teams, tuple(lengths), piece, lag)
    return Phase(plan, Regions.of_bytes(source, target), 1, plan.plan.shared)
