"""Ranks that are threads of this process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def in_threads(size: int, body: Callable[[int], T]) -> list[T]:
    """The results of ``body(rank)`` in a thread for each rank. Raises what the first of them
    raises, once all have ended."""
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def main(rank: int) -> None:
        try:
            results[rank] = body(rank)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=main, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(size)]
