"""The store of a group for threads."""

from __future__ import annotations

import math

from aiodist.blocking.calls import Blocking, BlockingWork, waiting
from aiodist.control.store import Store, Watch


class BlockingStore(Blocking[Store]):
    """`Store` for threads: every call waits for its result."""

    set = waiting(Store.set)
    get = waiting(Store.get)
    wait = waiting(Store.wait)
    add = waiting(Store.add)
    compare_set = waiting(Store.compare_set)
    delete = waiting(Store.delete)

    def watch(self, key: str, *, timeout: float | None = math.inf) -> BlockingWatch:
        """Watch the changes of `key`: ``for key, value in store.watch("k")``. See `Store.watch`."""
        started: BlockingWork[Watch] = BlockingWork(
            self._home, lambda: self._behind.watch(key, timeout=timeout)
        )
        return BlockingWatch(self._home, started.run())


class BlockingWatch(Blocking[Watch]):
    """An iterator over the changes of one key. Ends with `close`, or with a `with` block."""

    def close(self) -> None:
        """End the watch; iteration stops. Idempotent."""
        BlockingWork[None](self._home, self._behind.close).run()

    def __enter__(self) -> BlockingWatch:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._home.is_inherited:
            self.close()

    def __iter__(self) -> BlockingWatch:
        return self

    def __next__(self) -> tuple[str, bytes | None]:
        change: BlockingWork[tuple[str, bytes | None]] = BlockingWork(
            self._home, self._behind.__anext__, self._behind._put_back
        )
        try:
            return change.run()
        except StopAsyncIteration:
            raise StopIteration from None
