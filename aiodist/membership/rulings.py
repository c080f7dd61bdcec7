"""Who is lost, where members that are alive cannot reach each other.

The pure problem: members are the vertices of a graph, and each broken link is an edge. Those who
are turned out have to be a vertex cover, so that no edge is left between two who stay. A smallest
cover is NP-hard to find, and would be no better a ruling: what counts is that the culprit goes. A
host whose network has failed has the most broken links, so the rule is the greedy one, by degree.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

K = TypeVar("K", bound=Hashable)


def losers(broken: Iterable[tuple[K, K]], rank: Callable[[K], int]) -> list[K]:
    """Whom to turn out, in that order, so that no link between two of the rest is broken.

    Whoever has the most broken links goes first. Among equals the highest `rank` goes.

    The time is that of sorting the links. When somebody goes, the others' numbers of links can only
    fall, so the heap is not touched then. An entry that has become too large is put right when it
    comes to the top: nothing below it can be larger than what it says.
    """
    links: dict[K, set[K]] = {}
    for one, other in broken:
        links.setdefault(one, set()).add(other)
        links.setdefault(other, set()).add(one)
    left = {one: len(others) for one, others in links.items()}
    heap = [(-count, -rank(one), number, one) for number, (one, count) in enumerate(left.items())]
    heapq.heapify(heap)
    gone: list[K] = []
    while heap:
        count, order, number, worst = heap[0]
        if left[worst] != -count:
            heapq.heapreplace(heap, (-left[worst], order, number, worst))
            continue
        heapq.heappop(heap)
        if not count:
            break
        gone.append(worst)
        for other in links[worst]:
            left[other] -= 1
    return gone
