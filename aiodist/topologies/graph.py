"""`Graph`: ranks with whatever neighbours each of them names (MPI's distributed graph)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from aiodist.topologies.neighbors import Collective, Edge, Neighbors


class Graph(Neighbors):
    """The ranks of `group` as a graph: each names those that it hears from, its `sources`, and
    those that hear from it, its `destinations` (None: the same). A rank may stand there several
    times, and be its own neighbour. Nothing is sent to make it: whether both ends of an edge name
    it is seen when values go along it.

    Raises ValueError for what is no rank.

    For example::

        others = [rank for rank in range(group.size) if rank != group.rank]
        graph = aiodist.Graph(group, others)
        values = await graph.neighbor_all_gather(group.rank)  # in the order of `others`
    """

    def __init__(
        self, group: Collective, sources: Sequence[int], destinations: Sequence[int] | None = None
    ) -> None:
        to = sources if destinations is None else destinations
        super().__init__(group, [*_edges(sources)], [*_edges(to)])


def _edges(ranks: Sequence[int]) -> Iterator[Edge]:
    """Of several edges to one rank, the first at one end is the first at the other, too."""
    seen: Counter[int] = Counter()
    for rank in ranks:
        yield rank, seen[rank]
        seen[rank] += 1
