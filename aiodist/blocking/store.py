"""The store of a group for threads."""

from __future__ import annotations

import math
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from aiodist.blocking.calls import BlockingWork, Home
from aiodist.control.store import Store, Watch

P = ParamSpec("P")
R = TypeVar("R")


def _waiting(
    operation: Callable[Concatenate[Store, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[BlockingStore, P], R]:
    """The method of a `BlockingStore` that calls `operation` and waits for its result."""

    @wraps(operation)
    def method(self: BlockingStore, /, *args: P.args, **options: P.kwargs) -> R:
        work: BlockingWork[R] = BlockingWork(
            self._home, lambda: operation(self._store, *args, **options)
        )
        return work.run()

    return method


class BlockingStore:
    """`Store` for threads: every call waits for its result."""

    def __init__(self, home: Home, store: Store) -> None:
        self._home = home
        self._store = store

    set = _waiting(Store.set)
    get = _waiting(Store.get)
    wait = _waiting(Store.wait)
    add = _waiting(Store.add)
    compare_set = _waiting(Store.compare_set)
    delete = _waiting(Store.delete)

    def watch(self, key: str, *, timeout: float | None = math.inf) -> BlockingWatch:
        """The changes of `key` from now on: ``for key, value in store.watch("k")``. See
        `Store.watch`."""
        started: BlockingWork[Watch] = BlockingWork(
            self._home, lambda: self._store.watch(key, timeout=timeout)
        )
        return BlockingWatch(self._home, started.run())


class BlockingWatch:
    """The changes of one key: an iterator. Ends with `close`, or with a `with` block."""

    def __init__(self, home: Home, watch: Watch) -> None:
        self._home = home
        self._watch = watch

    def close(self) -> None:
        """End the watch; iteration stops. Idempotent."""
        BlockingWork[None](self._home, self._watch.close).run()

    def __enter__(self) -> BlockingWatch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> BlockingWatch:
        return self

    def __next__(self) -> tuple[str, bytes | None]:
        change: BlockingWork[tuple[str, bytes | None]] = BlockingWork(
            self._home, self._watch.__anext__
        )
        try:
            return change.run()
        except StopAsyncIteration:
            raise StopIteration from None
