"""A cache for results that are costly to make, with a limit on its memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

T = TypeVar("T")

MOST_PLAN_STEPS = 50_000
"""The most steps of cached plans, some 10 MiB."""


def cached_by_weight(
    most: int, weigh: Callable[[T], int]
) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Cache the results of a function whose arguments are hashable.

    All results together weigh at most `most`, by the function `weigh`. The oldest are dropped
    first. The newest stays, even if it weighs more.
    """

    def keeping(make: Callable[..., T]) -> Callable[..., T]:
        results: dict[tuple[Any, ...], T] = {}
        lock = threading.Lock()  # because ranks may run in several threads
        weight = 0

        @wraps(make)
        def asked(*args: Any) -> T:
            nonlocal weight
            # Look without the lock: this is a single step, and nearly all calls end here.
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
