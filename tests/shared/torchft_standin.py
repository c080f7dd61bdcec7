"""What aiodist_torch builds on of torchft 0.2.0 (torchft/process_group.py), for tests in an
environment without it."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

_stores: Any = dist  # torch's type stubs do not export them

NAMES = ("torchft", "torchft.process_group")
"""This stands for all of them."""


class ProcessGroupWrapper(dist.ProcessGroup):
    def __init__(self, timeout: timedelta = timedelta(seconds=60), pg: Any = None) -> None:
        super().__init__(0, 1)  # pyright: ignore[reportCallIssue]
        self._pg: Any = pg
        self._timeout = timeout

    def configure(self, store_addr: str, replica_id: str, rank: int, world_size: int) -> None:
        self.abort(errored=False)
        host, _, rest = store_addr.partition(":")
        port, _, prefix = rest.partition("/")
        store = _stores.TCPStore(
            host, int(port), is_master=False, wait_for_workers=False, timeout=self._timeout
        )
        self._pg = self._create_pg(_stores.PrefixStore(prefix, store), rank, world_size)

    def abort(self, errored: bool = True) -> None:
        if self._pg is not None:
            self._pg.abort()
            self._pg = None

    def shutdown(self) -> None:
        self._pg = None

    def _create_pg(self, store: Any, rank: int, world_size: int) -> Any:
        raise NotImplementedError

    def allreduce(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, tensors: list[Any], opts: Any
    ) -> Any:
        return self._pg.allreduce(tensors, opts)

    def barrier(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, opts: Any = None
    ) -> Any:
        return self._pg.barrier(opts)

    def size(self) -> int:
        size: int = self._pg.size()
        return size
