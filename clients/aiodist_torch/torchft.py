"""`ProcessGroupAiodist`: the process group of a torchft `Manager`.

torchft makes a new group of its replicas whenever one is lost or comes back. So this class holds
one process group of aiodist after the other.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torchft.process_group import ProcessGroupWrapper

from aiodist_torch.process_group import ProcessGroup


class ProcessGroupAiodist(ProcessGroupWrapper):
    """A process group of torchft whose operations aiodist runs.

    `timeout` is for meeting the other replicas, and the deadline of operations. The other members
    are torchft's. For example::

        manager = torchft.Manager(pg=ProcessGroupAiodist(timeout=timedelta(seconds=30)), …)
    """

    def _create_pg(self, store: Any, rank: int, world_size: int) -> Any:
        return ProcessGroup.join(store, rank, world_size, timeout=self._timeout)

    def getBackendName(self) -> str:
        """``"torchft-aiodist"``."""
        return "torchft-aiodist"

    def barrier(self, opts: dist.BarrierOptions | None = None) -> dist.Work:
        """Wait for all ranks."""
        # torchft's own passes None on.
        return super().barrier(dist.BarrierOptions() if opts is None else opts)

    def shutdown(self) -> None:
        """Leave the group in order, so that the other replicas do not take this one for dead.
        Idempotent."""
        if self._pg is not None:
            self._pg.shutdown()
        super().shutdown()
