"""Keeping what is dear to make, within a fixed amount of memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

T = TypeVar("T")

MOST_PLAN_STEPS = 50_000
"""Most steps of the plans that are kept: some 10 MiB."""


def cached_by_weight(
    most: int, weigh: Callable[[T], int]
) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Keeps the results of a function of hashable arguments. It is by their weight, not by their
    number, that the oldest are dropped: all together they weigh at most `most`. The newest stays,
    whatever it weighs."""

    def keeping(make: Callable[..., T]) -> Callable[..., T]:
        results: dict[tuple[Any, ...], T] = {}
        lock = threading.Lock()  # ranks may run in several threads
        weight = 0

        @wraps(make)
        def asked(*args: Any) -> T:
            nonlocal weight
            # Without the lock, which nearly all calls would take for nothing: to look is one step.
            found = results.get(args)
            if found is not None:
                return found
            made = make(*args)
            with lock:
                if args not in results:  # no other thread has made it meanwhile
                    results[args] = made
                    weight += weigh(made)
                while weight > most and len(results) > 1:
                    weight -= weigh(results.pop(next(iter(results))))
            return made

        return asked

    return keeping
