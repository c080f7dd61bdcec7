"""The parts of collectives on a lane.

They use shared memory alone if all ranks share a host. Otherwise they use the shared memory of each
host, and links between hosts.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from aiodist.buffers.reductions import DtypeGroup
from aiodist.phases import pulls, teams
from aiodist.phases.base import Part, Place, share
from aiodist.schedules.teams import spans_hosts


def can_reduce(place: Place, groups: Sequence[DtypeGroup]) -> bool:
    """Return whether there are plans to reduce all groups of arrays."""
    if spans_hosts(place.teams):
        return all(teams.can_reduce(place, group) for group in groups)
    return all(map(pulls.can_reduce, groups))


def can_slice(place: Place, groups: Sequence[DtypeGroup]) -> bool:
    """Return whether slices of all groups may be reduced piece by piece."""
    if spans_hosts(place.teams):
        return all(teams.can_slice(place, group) for group in groups)
    return all(map(pulls.can_slice, groups))


def can_scan(place: Place, groups: Sequence[DtypeGroup]) -> bool:
    """Return whether there are plans for the prefixes of all groups."""
    return not spans_hosts(place.teams) and all(map(pulls.can_scan, groups))


def all_reduce(place: Place, groups: Sequence[DtypeGroup]) -> Part[None]:
    for group in groups:
        if spans_hosts(place.teams):
            yield teams.all_reduce(place, group)
        else:
            yield pulls.all_reduce(place, group)


def reduce(place: Place, groups: Sequence[DtypeGroup], root: int) -> Part[None]:
    if spans_hosts(place.teams):
        if not all(map(teams.goes_whole, groups)):
            # because what follows does not synchronise all ranks
            yield from share(place, b"", True)
        for group in groups:
            yield teams.reduce(place, group, root)
    else:
        for group in groups:
            yield pulls.reduce(place, group, root)


def reduce_scatter(place: Place, groups: Sequence[DtypeGroup]) -> Part[None]:
    if spans_hosts(place.teams):
        if any(a == b for group in groups for a, b in itertools.pairwise(group.bounds)):
            # because a rank with an empty slot would hear from no other
            yield from share(place, b"", True)
        for group in groups:
            yield teams.reduce_scatter(place, group)
    else:
        for group in groups:
            yield pulls.reduce_scatter(place, group)


def scan(place: Place, groups: Sequence[DtypeGroup], exclusive: bool) -> Part[None]:
    for group in groups:
        yield pulls.scan(place, group, exclusive)


def broadcast(
    place: Place, root: int, source: Sequence[memoryview], target: Sequence[memoryview]
) -> Part[None]:
    """Only after a part that synchronises all ranks."""
    if spans_hosts(place.teams):
        yield teams.broadcast(place, root, source, target)
    else:
        yield pulls.broadcast(place, root, source, target)


def all_gather(
    place: Place,
    lengths: Sequence[int],
    source: Sequence[memoryview],
    target: Sequence[memoryview],
) -> Part[None]:
    """Only after a part that synchronises all ranks."""
    if spans_hosts(place.teams):
        yield teams.all_gather(place, lengths, source, target)
    else:
        yield pulls.all_gather(place, lengths, source, target)
