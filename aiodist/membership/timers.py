"""Deadlines by key: a heap whose entries are corrected when they come to the top."""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class Timers(Generic[K]):
    """At most one deadline for each key. Moving a deadline to a later time is O(1), because leases
    do that all day."""

    def __init__(self) -> None:
        self._due: dict[K, float] = {}
        self._heap: list[tuple[float, int, K]] = []
        self._pushed = 0

    def set(self, key: K, when: float) -> None:
        """Give `key` the deadline `when`, instead of the one it had."""
        # Each message moves a lease to a later time, and a lease hardly ever ends. So the heap
        # keeps the old entry, which is too early. When it comes to the top, it goes back with the
        # right time. Only an earlier deadline needs a new entry::
        #
        #     _due   A: 9   B: 12           heap  (3, A) (5, B)    A and B were moved since
        #     next   3 is not 9: back in    heap  (5, B) (9, A)
        #            5 is not 12: back in   heap  (9, A) (12, B)   9: that is the next one
        before = self._due.get(key)
        self._due[key] = when
        if before is None or when < before:
            self._push(key, when)
            if len(self._heap) > 2 * len(self._due) + 64:
                self._rebuild()

    def cancel(self, key: K) -> None:
        self._due.pop(key, None)

    def get(self, key: K) -> float | None:
        return self._due.get(key)

    def next(self) -> float | None:
        while self._heap:
            when, _, key = self._heap[0]
            due = self._due.get(key)
            if due == when:
                return when
            heapq.heappop(self._heap)
            if due is not None and due > when:
                self._push(key, due)
        return None

    def pop_due(self, now: float) -> list[K]:
        """Remove and return the keys whose deadline is not after `now`, earliest first."""
        keys = []
        while (when := self.next()) is not None and when <= now:
            key = heapq.heappop(self._heap)[2]
            del self._due[key]
            keys.append(key)
        return keys

    def _push(self, key: K, when: float) -> None:
        # The running number settles ties: keys need not be comparable, and equal deadlines come out
        # in the order in which they were set.
        self._pushed += 1
        heapq.heappush(self._heap, (when, self._pushed, key))

    def _rebuild(self) -> None:
        """Drop the entries of cancelled keys, which may otherwise outlive any bound."""
        self._heap.clear()
        for key, when in self._due.items():
            self._push(key, when)
