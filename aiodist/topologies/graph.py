"""`Graph`: each rank names its neighbours (MPI's distributed graph)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from aiodist.phases.base import as_rank
from aiodist.topologies.neighbors import Collective, Edge, Neighbors


class Graph(Neighbors):
    """The ranks of `group` as a graph.

    Each rank names its `sources`, which it receives from, and its `destinations`, which it sends to
    (None: the same as `sources`). A rank may occur several times, and may be its own neighbour.
    Making a graph sends nothing, so a mismatch between the two ends of an edge shows only when
    values travel.

    Raises TypeError if one of them is not an int, and ValueError if it is not a rank of the group.

    For example::

        others = [rank for rank in range(group.size) if rank != group.rank]
        graph = aiodist.Graph(group, others)
        values = await graph.neighbor_all_gather(group.rank)  # in the order of `others`
    """

    def __init__(
        self, group: Collective, sources: Sequence[int], destinations: Sequence[int] | None = None
    ) -> None:
        came = _edges(sources, group.size, "sources")
        to = came if destinations is None else _edges(destinations, group.size, "destinations")
        super().__init__(group, came, to)


def _edges(ranks: Sequence[int], size: int, name: str) -> list[Edge]:
    """Number the edges to each rank. The first at one end is the first at the other end, too."""
    if not isinstance(ranks, Iterable):
        raise TypeError(f"{name} is a sequence of ranks, such as [{ranks!r}], not {ranks!r}")
    seen: Counter[int] = Counter()
    edges = []
    for rank in [as_rank(rank, size, f"each of {name}") for rank in ranks]:
        edges.append((rank, seen[rank]))
        seen[rank] += 1
    return edges
