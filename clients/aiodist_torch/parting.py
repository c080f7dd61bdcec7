"""Parting: no rank meets anew at a store that is about to go.

With ``env://`` and ``tcp://`` rank 0's process serves the TCPStore at which ranks meet, until
nothing there refers to it. A rank that has left, and quickly calls ``init_process_group`` again,
would still find it at its port, and lose it in the middle of the next meeting. So each rank that
leaves waits until rank 0 has released the store. If that takes long, rank 0 keeps the store, and
the next meeting can use it.

When rank 0 leaves, it drops torch's references to the store, and says so in the store of the group.
The others wait for that before they leave.

With ``file://`` the file goes. The process that drops the last reference to a FileStore removes the
file. Between torch's check for other references and the removal, a quick rank may have opened the
file for the next meeting. It would then wait in a file that no other rank can find. So rank 0
refers to the last FileStore until the next meeting is complete, or its process exits.
"""

from __future__ import annotations

import atexit
import os
from typing import Any

import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

import aiodist
from aiodist_torch import rendezvous

PATIENCE = 1.0
"""How many seconds a rank waits for rank 0 to leave. After that, rank 0 keeps the store.

Not longer, because the others do not hear before that the rank leaves, and may be waiting for it.
"""
ANSWER = 5.0
"""Seconds within which the coordinator, in rank 0's process, has to answer."""

_AGENT = "TORCHELASTIC_USE_AGENT_STORE"
"""Set by torchrun. Its agent then serves the store, for as long as the job lives."""
_FATE = "torch/store"
_SETTLED = "torch/store/settled"
_GOING, _KEPT = b"going", b"kept"

_kept: list[Any] = []
"""Stores that are kept for ranks that did not wait any longer."""
_held: list[Any] = []
"""The store of rank 0's last meeting, if that was a FileStore."""
atexit.register(_held.clear)


class Parting:
    """How the ranks of one group part. `store` is torch's, at which they met. Rank 0 releases
    it."""

    def __init__(self, group: aiodist.Group, store: Any) -> None:
        self.is_host = group.rank == 0
        self._group = group
        self._store: Any = store if self.is_host else None

    @classmethod
    def of(cls, group: aiodist.Group, store: Any) -> Parting | None:
        """Return how to part from `store`; None if it does not end with rank 0."""
        if not rendezvous.is_tcp(store) or os.environ.get(_AGENT) == "True":
            return None
        if group.rank == 0:
            _kept.clear()  # the ranks that they were kept for are here
        return cls(group, store)

    async def settle(self) -> None:
        """Return when the next meeting can begin. On rank 0, make that so.

        Never raises aiodist's errors, because a rank that has lost the group or its coordinator has
        nothing to wait for.
        """
        try:
            if self.is_host:
                await self._let_go()
            else:
                await self._wait()
        except aiodist.AiodistError:
            self._store = None

    async def _let_go(self) -> None:
        store = self._group.store
        # The coordinator decides, by one key, which of the two comes first::
        #
        #     rank 0                          a rank that leaves
        #
        #     compare_set(None -> going)      waits for `settled`, for a second
        #     releases the store              compare_set(None -> kept)
        #     sets `settled`                  first: it goes at once, and rank 0 will keep the store
        #                                     second: it waits for `settled`, which is on its way
        #
        # Either way the rank knows what it will find when it meets the others again.
        going = await store.compare_set(_FATE, None, _GOING, timeout=ANSWER)
        if not going:
            _kept.append(self._store)
        self._store = None
        await store.set(_SETTLED, b"", timeout=ANSWER)

    async def _wait(self) -> None:
        store = self._group.store
        try:
            await store.wait(_SETTLED, timeout=PATIENCE)
        except aiodist.CollectiveTimeoutError:
            kept = await store.compare_set(_FATE, None, _KEPT, timeout=ANSWER)
            if not kept and await store.get(_FATE, timeout=ANSWER) == _GOING:
                await store.wait(_SETTLED, timeout=ANSWER)


def hold_file(store: Any) -> None:
    """Refer to `store`, at which rank 0 has met the others, until the next meeting.

    Only if it is a FileStore. The one that was held before is released.
    """
    store = rendezvous.underlying(store)
    _held[:] = [store] if isinstance(store, c10d.FileStore) else []


def forget_store() -> None:
    """Make torch drop its references to the store of its groups, after all of them are left."""
    groups: dict[Any, Any] = dist.distributed_c10d._world.pg_map
    for group, (backend, _) in list(groups.items()):
        groups[group] = (backend, None)
