"""`Graph`: each rank names its neighbours (MPI's distributed graph)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from aiodist.topologies.neighbors import Collective, Edge, Neighbors


class Graph(Neighbors):
    """The ranks of `group` as a graph.

    Each rank names its `sources`, which it receives from, and its `destinations`, which it sends to
    (None: the same as `sources`). A rank may occur several times, and may be its own neighbour.
    Making a graph sends nothing, so a mismatch between the two ends of an edge shows only when
    values travel.

    Raises ValueError if one of them is not a rank of the group.

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
    """Number the edges to each rank. The first at one end is the first at the other end, too."""
    seen: Counter[int] = Counter()
    for rank in ranks:
        yield rank, seen[rank]
        seen[rank] += 1
