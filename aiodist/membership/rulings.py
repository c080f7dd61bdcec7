"""Who is lost, where two members that are alive cannot reach each other."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

K = TypeVar("K", bound=Hashable)


def losers(broken: Iterable[tuple[K, K]], rank: Callable[[K], int]) -> list[K]:
    """Whom to turn out, so that no link between two of the rest is broken.

    Whoever has the most broken links goes first: where the network of one host fails, that is the
    one. Among equals the highest `rank` goes. (A vertex cover, chosen greedily.)
    """
    links = {frozenset(pair) for pair in broken}
    gone: list[K] = []
    while links:
        counts: dict[K, int] = {}
        for link in links:
            for one in link:
                counts[one] = counts.get(one, 0) + 1
        worst = max(counts, key=lambda one: (counts[one], rank(one)))
        gone.append(worst)
        links = {link for link in links if worst not in link}
    return gone
