"""Decide which members to remove if living members cannot reach each other.

Members are the vertices of a graph, and broken links are its edges. The members to remove must be a
vertex cover, so that no edge is left between two others. The smallest cover is NP-hard to find, and
no better for users: the culprit has to go. A host with a broken network has the most broken links,
so the greedy rule by degree finds it.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

K = TypeVar("K", bound=Hashable)


def losers(broken: Iterable[tuple[K, K]], rank: Callable[[K], int]) -> list[K]:
    """The members to remove, in order, so that no broken link is left between two others.

    The member with the most broken links goes first; among equals, the highest `rank`.

    The time is that of sorting the links. Removing a member only lowers the counts of others, so
    the heap is corrected lazily: an entry that is too large is put right when it comes to the top.
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
