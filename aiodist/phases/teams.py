"""The phases of groups that span hosts: which mixed plan they use, and the size of its pieces.

All choices depend only on what all ranks know. If ranks chose different plans or pieces, they would
wait for each other for ever, or read data that is not there yet.
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
"""The most bytes of an array that the first rank of a host reduces for all. It fits into a frame
even if its accumulator is four times as wide (float8 in float32)."""
ROUNDS = 4
"""The rounds in which even small arrays go, so that links and ranks are busy at the same time."""
LEAST = 64 * 1024
"""Smaller pieces than this, in bytes, cost more overhead than they gain."""


def piece_for(slots: int, itemsize: int, longest: int, widest: int = 1) -> int:
    """Return the elements of a piece.

    Each of two buffers has room for `slots` pieces. A message has up to `longest` elements and
    takes a few rounds. `widest`: the bytes of an element in a frame.
    """
    room = CROSSING // (2 * slots)
    wanted = max(LEAST, -(-longest * itemsize // ROUNDS))
    return max(1, min(min(room, wanted) // itemsize, MAX_PAYLOAD // widest))


def can_reduce(place: Place, group: DtypeGroup) -> bool:
    """Return whether there is a plan for `group`. Large arrays have to be sliceable. The order of
    the hosts has to be that of the ranks, unless the operator commutes."""
    kernel = group.kernel
    in_any_order = kernel.op.commutative or in_order(place.teams)
    return in_any_order and (goes_whole(group) or kernel.sliceable)


def goes_whole(group: DtypeGroup) -> bool:
    """Return whether the first rank of each host reduces the whole array. That synchronises all
    ranks."""
    return group.x.nbytes <= WHOLE


def can_slice(place: Place, group: DtypeGroup) -> bool:
    """Return whether slices of `group` may be reduced piece by piece."""
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
    """If the array is large, only after a phase that synchronises all ranks."""
    length = group.x.length
    if goes_whole(group):
        plan = prepared(team_whole.reduce, place.rank, place.teams, root, length)
    else:
        owners = len(team_view(place.teams, root).team)
        cut = _slices(place, group, -(-length // owners))
        plan = prepared(team_slices.reduce, place.rank, place.teams, root, length, *cut)
    return _reduction(place, group, plan)


def reduce_scatter(place: Place, group: DtypeGroup) -> Phase:
    """If slots are empty, only after a phase that synchronises all ranks."""
    bounds = tuple(group.bounds)
    cut = _slices(place, group, max(b - a for a, b in itertools.pairwise(bounds)))
    plan = prepared(team_slices.reduce_scatter, place.rank, place.teams, bounds, *cut)
    return _reduction(place, group, plan)


def _slices(place: Place, group: DtypeGroup, longest: int) -> tuple[int, int]:
    """Return the elements of a piece, and the rounds that a piece may take between hosts.

    If hosts are far apart, there are enough rounds to keep the wire busy, as far as scratch allows.
    The scratch of a rank has places for two pieces a round, of each slice that it is the agent of
    and of its own slice from each other host.
    """
    wide = group.kernel.wire_dtype.itemsize
    piece = piece_for(place.size, group.x.itemsize, longest, wide)
    # The scratch of a rank needs a place for each partial result that comes to it.
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
    """Only after a phase that synchronises all ranks."""
    length = sum(view.nbytes for view in (source or target))
    if length <= MAX_PAYLOAD:
        plan = prepared(team_whole.broadcast, place.rank, place.teams, root, length)
        return Phase(plan, Regions.of_bytes(source, target), 1, length)
    # Every host has at least so many ranks, so blocks use as many links between hosts at once.
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
    """Only after a phase that synchronises all ranks."""
    piece = piece_for(most_duties(place.teams), 1, max(lengths))
    lag = max(team_values.LAG, min(place.costs.way, max(lengths)) // piece)
    plan = prepared(team_values.all_gather, place.rank, place.teams, tuple(lengths), piece, lag)
    return Phase(plan, Regions.of_bytes(source, target), 1, plan.plan.shared)
