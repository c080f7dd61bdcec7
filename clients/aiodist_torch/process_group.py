"""`ProcessGroup`: a group of aiodist as a process group of torch. Its operations are in
`Methods`."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.distributed.constants import default_pg_timeout

import aiodist
from aiodist.threads.engine import engine
from aiodist_torch.devices import backend_for, backends_of
from aiodist_torch.errors import as_torch
from aiodist_torch.membership import Membership
from aiodist_torch.methods import Methods
from aiodist_torch.parting import forget_store
from aiodist_torch.shrinking import expect_shrunk_groups
from aiodist_torch.timeouts import expect_new_timeouts
from aiodist_torch.untraced import untraced


@untraced
class ProcessGroup(Methods):
    """A process group whose operations are those of an `aiodist.Group`.

    Programs reach it through `torch.distributed`. torch's dispatcher and its Python layer call its
    methods. Errors are aiodist's, which name ranks, and `dist.DistBackendError` at the same time.
    """

    def __init__(self, membership: Membership, timeout: timedelta, store: Any) -> None:
        super().__init__(membership.engine, membership.group, timeout)
        expect_new_timeouts()
        self._membership = membership
        self._store: Any = store
        self._name = self._desc = ""  # torch's name for it, and torch's description

    @classmethod
    def join(
        cls,
        store: Any,
        rank: int,
        size: int,
        *,
        timeout: timedelta = default_pg_timeout,
        name: str = "group",
        is_default: bool = False,
    ) -> ProcessGroup:
        """Make the process group of `size` processes that meet at a torch `store`. For libraries.

        It needs no default group, and may exist beside one. Each process gives its own `rank`.
        Programs call `torch.distributed` instead.

        `timeout` is for the meeting, and the deadline of operations. Meetings at one store that may
        overlap need one `PrefixStore` each. `name` is shown by `aiodist status`. `is_default`: it
        is the default group, with which torch ends the store. Rank 0's process has the coordinator.
        Leave by `shutdown` or `abort`.

        Raises what `aiodist.connect` raises, also as `dist.DistBackendError`, and what the store
        raises.

        For example::

            group = ProcessGroup.join(torch.distributed.HashStore(), 0, 1)
            group.allreduce([torch.ones(1)]).wait()
            group.shutdown()
        """
        seconds = timeout.total_seconds()
        try:
            membership = Membership.join(
                engine(),
                store,
                rank=rank,
                size=size,
                name=name,
                seconds=seconds,
                is_default=is_default,
            )
        except aiodist.AiodistError as error:
            raise as_torch(error) from None
        return cls(membership, timeout, store)

    @property
    def group(self) -> aiodist.Group:
        """The group of aiodist, on the engine's loop. From other threads use
        ``group.blocking()``."""
        return self._group

    # -- groups and their end ---------------------------------------------------------------------

    def derive(self, ranks: Sequence[int], timeout: timedelta, store: Any) -> ProcessGroup:
        """Make the group of some of its ranks. Only these call it."""
        membership = self._membership.derive(ranks, timeout.total_seconds())
        return ProcessGroup(membership, timeout, store)

    def split_group(
        self,
        ranks: list[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: list[torch.device] | None = None,
    ) -> ProcessGroup | None:
        """Make the group of `ranks` (of this group). Returns None on ranks that are not among them.

        The new group numbers them in ascending order, as torch's own class does.
        `torch.distributed.split_group` asks for an accelerator, so call this method instead. Of the
        new group call its own methods, because calls such as `dist.broadcast(group=…)` refuse
        groups that torch has not made.
        """
        if self.rank() not in ranks:
            return None
        ranks = sorted(ranks)
        timeout = timeout or self._timeout
        membership = self._membership.derive(ranks, timeout.total_seconds())
        name = group_name or f"{self.group_name}:split:{'_'.join(map(str, ranks))}"
        group = ProcessGroup(membership, timeout, c10d.PrefixStore(f"{name}/", self._store))
        group.setGroupName(name)
        group.setGroupDesc(group_desc or "undefined")
        return group

    def shrink(
        self, ranks_to_exclude: Sequence[int], shrink_flags: int = 0, pg_options: Any = None
    ) -> ProcessGroup:
        """Make the group of all ranks but `ranks_to_exclude`. Only its members call this.

        `torch.distributed.shrink_group` calls this, so call that. This group may have lost the
        excluded ranks. The new group takes the place of this one, which is useless then. With
        `shrink_flags` `torch.distributed.distributed_c10d.SHRINK_ABORT`, pending operations of this
        group fail on all ranks. `pg_options` is None, or `options` with another timeout.

        Raises what `Group.subgroup` raises.
        """
        expect_shrunk_groups()
        ranks = [rank for rank in range(self._group.size) if rank not in ranks_to_exclude]
        timeout = self._timeout if pg_options is None else pg_options._timeout
        membership = self._membership.succeed(ranks, timeout.total_seconds())
        if shrink_flags & dist.distributed_c10d.SHRINK_ABORT:
            self._engine.submit(self._group.revoke)
        store = c10d.PrefixStore(f"shrunk:{'_'.join(map(str, ranks))}/", self._store)
        return ProcessGroup(membership, timeout, store)

    def shutdown(self) -> None:
        """Leave. `destroy_process_group` calls this. Idempotent."""
        self._let_go_of_store()
        self._membership.leave()

    def abort(self) -> None:
        """Leave at once: pending operations fail on all ranks."""
        self._let_go_of_store()
        self._membership.abort("the process group was aborted")

    def _let_go_of_store(self) -> None:
        self._store = None
        if self._membership.hosts_store:
            forget_store()

    # -- what torch asks --------------------------------------------------------------------------

    def getBackendName(self) -> str:
        """``"aiodist"``."""
        return "aiodist"

    def _get_backend_name(self) -> str:
        return "aiodist"

    def setGroupName(self, name: str) -> None:
        """Take the name that torch gives the group."""
        self._name = name

    def getGroupName(self) -> str:
        """Return torch's name for the group."""
        return self._name

    def setGroupDesc(self, desc: str) -> None:
        """Take torch's description of the group."""
        self._desc = desc

    def getGroupDesc(self) -> str:
        """Return torch's description of the group."""
        return self._desc

    _set_group_name, _set_group_desc = setGroupName, setGroupDesc
    group_name, group_desc = property(getGroupName), property(getGroupDesc)

    def _get_sequence_number_for_group(self) -> int:
        """Return how many operations were called."""
        return self._sequence

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: each rank counts from 0, so the ranks need not agree."""

    def _has_hooks(self) -> bool:
        return False

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self.set_timeout(timeout)

    def get_group_store(self) -> Any:
        """Return the store at which the ranks met; None after this group was left."""
        return self._store

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(kind) for kind in backends_of(self)]

    def _get_backend(self, device: torch.device) -> Any:
        """Return what runs operations on tensors of `device`; this object until there were any.

        Raises RuntimeError if there is no backend for `device`.
        """
        device = torch.device(device)
        if (beside := self._beside.get(device.type, self)) is not self:
            return beside._get_backend(device)
        if device.type != "cpu":
            backend_for(self, device)
        return self

    @property
    def options(self) -> Any:
        """The options of a backend, for torch: its timeout."""
        return c10d.Backend.Options("aiodist", self._timeout)

    supports_shrinking = True
    supports_splitting = supports_time_estimate = supports_coalescing = False
    """Splitting and batches need no support of the backend, and aiodist gives no estimates of
    times."""

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Return False: aiodist takes tensors in any memory, so FSDP allocates its own."""
        return False


def create(options: Any) -> ProcessGroup:
    """Make a process group of `options.group_size` ranks, for torch's `register_backend`.

    Raises what `aiodist.connect` raises, and what the store raises.
    """
    timeout: timedelta = options.timeout
    ranks = options.global_ranks_in_group
    if isinstance(world := dist.group.WORLD, ProcessGroup) and ranks:
        return world.derive(ranks, timeout, options.store)
    return ProcessGroup.join(
        options.store,
        options.group_rank,
        options.group_size,
        timeout=timeout,
        name=options.group_id or "world",
        is_default=not ranks,
    )
