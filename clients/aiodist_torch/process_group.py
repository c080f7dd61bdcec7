"""`ProcessGroup`: the calls of torch, each handed to the engine as an operation of aiodist."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, SupportsIndex

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch.autograd import profiler

import aiodist
from aiodist_torch import forms
from aiodist_torch import operations as ops
from aiodist_torch.calls import call
from aiodist_torch.devices import backend_for, backends_of, group_beside
from aiodist_torch.engine import engine
from aiodist_torch.errors import as_torch
from aiodist_torch.loop import at_once
from aiodist_torch.membership import Membership
from aiodist_torch.parting import forget_store
from aiodist_torch.profiling import recording
from aiodist_torch.untraced import untraced
from aiodist_torch.work import TorchWork

_ALL_REDUCE = dist.AllreduceOptions()
_ALL_REDUCE_COALESCED = dist.AllreduceCoalescedOptions()
_REDUCE = dist.ReduceOptions()
_BROADCAST = dist.BroadcastOptions()
_GATHER = dist.GatherOptions()
_SCATTER = dist.ScatterOptions()
_ALL_GATHER = c10d.AllgatherOptions()
_REDUCE_SCATTER = dist.ReduceScatterOptions()
_ALL_TO_ALL = dist.AllToAllOptions()
_BARRIER = dist.BarrierOptions()


if TYPE_CHECKING:

    class _Base:
        """What is used of torch's class. Its own hints are for those who call it: they ask every
        method for all the forms that torch's Python layer reduces to the one that arrives here."""

        def __init__(self, rank: int, size: int) -> None: ...
        def rank(self) -> int: ...

else:
    _Base = dist.ProcessGroup


@untraced
class ProcessGroup(_Base):
    """A process group whose operations are those of an `aiodist.Group`.

    Programs reach it through `torch.distributed`. Its methods are those that torch's dispatcher and
    its Python layer call; each starts at once and returns a `TorchWork`. Errors are aiodist's, and
    `dist.DistBackendError` at the same time; they name ranks.
    """

    def __init__(self, membership: Membership, timeout: timedelta, store: Any) -> None:
        super().__init__(membership.group.rank, membership.group.size)
        self._membership = membership
        self._engine = membership.engine  # in whose loop the group lives
        self._group = membership.group  # the group of aiodist
        self._store: Any = store
        self.set_timeout(timeout)
        self._name = self._desc = ""  # what torch calls this, and how it describes it
        # Calls since `_start_coalescing`; None: each is on its own.
        self._batch: list[TorchWork] | None = None
        self._beside: dict[str, Any] = {}  # the backends of other devices, by the type of device
        self._sequence = 0  # operations that were called

    @property
    def group(self) -> aiodist.Group:
        """The group of aiodist. It lives on the engine's loop: from other threads use
        ``group.blocking()``."""
        return self._group

    # -- starting ---------------------------------------------------------------------------------

    def _go(
        self,
        start: Callable[..., ops.Works],
        *args: Any,
        results: list[Tensor],
        waits: bool = False,
    ) -> TorchWork:
        """Start operations. `waits`: the caller is going to wait for them at once."""
        self._sequence += 1
        work = TorchWork(self._engine, self._group, partial(start, self._group, *args), results)
        if self._batch is not None:
            self._batch.append(work)
        submit = self._engine.submit
        if profiler._is_profiler_enabled:
            submit = recording(submit, work, waits and self._batch is None, start, args)
        submit(work.launch, later=work.close_gate, until=work.is_completed if waits else at_once)
        return work

    def _collective(
        self, opts: Any, start: Callable[..., ops.Works], *args: Any, results: list[Tensor]
    ) -> TorchWork:
        """Start a collective with the deadline that `opts` gives, or else the group has."""
        seconds: float = opts.timeout.total_seconds()
        return self._go(
            partial(ops.or_forgo, start),
            *args,
            seconds if seconds > 0 else self._seconds,
            results=results,
            waits=not opts.asyncOp,
        )

    def _one(self, items: list[Any], op: str) -> Any:
        """The only one of the `items` given to a collective. Else its turn is used up, so that the
        other ranks hear of it, and ValueError is raised."""
        try:
            return one(items, op)
        except ValueError as error:
            self.forgo(error, None)
            raise

    def forgo(self, error: Exception, x: Tensor | None) -> None:
        """A collective of `x` was not called, for its arguments make no sense, as `error` says: its
        turn is used up, so that the other ranks hear of it. Not where it was one of another
        backend."""
        if x is None or backends_of(self).get(x.device.type, "aiodist") == "aiodist":
            self._sequence += 1
            self._engine.submit(partial(self._group._forgo, error))

    # -- collectives ------------------------------------------------------------------------------

    @call(forms.allreduce_listed, forms.allreduce_one)
    def allreduce(
        self, tensors: list[Tensor], opts: dist.AllreduceOptions = _ALL_REDUCE
    ) -> TorchWork:
        """Reduce one tensor in place; it may be sparse."""
        x = self._one(tensors, "all_reduce")
        start = ops.all_reduce if x.layout is torch.strided else ops.all_reduce_sparse
        return self._collective(opts, start, x, opts.reduceOp, results=tensors)

    @call()
    def allreduce_coalesced(
        self, tensors: list[Tensor], opts: dist.AllreduceCoalescedOptions = _ALL_REDUCE_COALESCED
    ) -> TorchWork:
        """Reduce several tensors in place."""
        return self._collective(
            opts,
            ops.all_reduce_coalesced,
            tensors,
            opts.reduceOp,
            results=tensors,
        )

    @call(forms.reduce)
    def reduce(self, tensors: list[Tensor], opts: dist.ReduceOptions = _REDUCE) -> TorchWork:
        """Reduce one tensor, in place, at the root; those of other ranks keep their content."""
        x = self._one(tensors, "reduce")
        return self._collective(opts, ops.reduce, x, opts.rootRank, opts.reduceOp, results=tensors)

    @call(forms.broadcast)
    def broadcast(
        self, tensors: list[Tensor], opts: dist.BroadcastOptions = _BROADCAST
    ) -> TorchWork:
        """The root's tensor goes into that of all."""
        x = self._one(tensors, "broadcast")
        return self._collective(opts, ops.broadcast, x, opts.rootRank, results=tensors)

    @call(forms.allgather)
    def allgather(
        self,
        output_tensors: list[list[Tensor]],
        input_tensors: list[Tensor],
        opts: c10d.AllgatherOptions = _ALL_GATHER,
    ) -> TorchWork:
        """Everyone's tensor goes into a list on every rank; shapes may differ."""
        x = self._one(input_tensors, "all_gather")
        outs = self._one(output_tensors, "all_gather")
        return self._collective(opts, ops.all_gather, x, outs, results=outs)

    @call()
    def all_gather_single(
        self, output: Tensor, input: Tensor, opts: c10d.AllgatherOptions = _ALL_GATHER
    ) -> TorchWork:
        """Everyone's tensor goes into one tensor on every rank, one after the other."""
        return self._collective(opts, ops.all_gather_single, input, output, results=[output])

    _allgather_base = all_gather_single

    @call()
    def allgather_coalesced(
        self,
        output_lists: list[list[Tensor]],
        input_list: list[Tensor],
        opts: c10d.AllgatherOptions = _ALL_GATHER,
    ) -> TorchWork:
        """Everyone's tensors go into lists on every rank."""
        return self._collective(
            opts,
            ops.all_gather_coalesced,
            input_list,
            output_lists,
            results=[tensor for row in output_lists for tensor in row],
        )

    @call()
    def all_gather_single_coalesced(
        self,
        outputs: list[Tensor],
        inputs: list[Tensor],
        opts: c10d.AllgatherOptions = _ALL_GATHER,
    ) -> TorchWork:
        """`all_gather_single` of several tensors."""
        return self._collective(
            opts, ops.all_gather_single_coalesced, inputs, outputs, results=outputs
        )

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    @call(forms.gather)
    def gather(
        self,
        output_tensors: list[list[Tensor]],
        input_tensors: list[Tensor],
        opts: dist.GatherOptions = _GATHER,
    ) -> TorchWork:
        """Everyone's tensor goes into a list at the root."""
        x = self._one(input_tensors, "gather")
        outs = self._one(output_tensors, "gather") if output_tensors else []
        return self._collective(opts, ops.gather, x, outs, opts.rootRank, results=outs)

    @call(forms.scatter)
    def scatter(
        self,
        output_tensors: list[Tensor],
        input_tensors: list[list[Tensor]],
        opts: dist.ScatterOptions = _SCATTER,
    ) -> TorchWork:
        """The root's list of tensors goes, one by one, to the ranks."""
        out = self._one(output_tensors, "scatter")
        xs = self._one(input_tensors, "scatter") if input_tensors else []
        return self._collective(opts, ops.scatter, xs, out, opts.rootRank, results=output_tensors)

    @call(forms.reduce_scatter)
    def reduce_scatter(
        self,
        output_tensors: list[Tensor],
        input_tensors: list[list[Tensor]],
        opts: dist.ReduceScatterOptions = _REDUCE_SCATTER,
    ) -> TorchWork:
        """Reduce lists of tensors; each rank gets the one that is its own."""
        out = self._one(output_tensors, "reduce_scatter")
        xs = self._one(input_tensors, "reduce_scatter")
        return self._collective(
            opts, ops.reduce_scatter, xs, out, opts.reduceOp, results=output_tensors
        )

    @call()
    def reduce_scatter_single(
        self,
        outputTensor: Tensor,
        inputTensor: Tensor,
        opts: dist.ReduceScatterOptions = _REDUCE_SCATTER,
    ) -> TorchWork:
        """Reduce a tensor; each rank gets its part of it."""
        return self._collective(
            opts,
            ops.reduce_scatter_single,
            inputTensor,
            outputTensor,
            opts.reduceOp,
            results=[outputTensor],
        )

    _reduce_scatter_base = reduce_scatter_single

    @call()
    def reduce_scatter_single_coalesced(
        self,
        outputs: list[Tensor],
        inputs: list[Tensor],
        opts: dist.ReduceScatterOptions = _REDUCE_SCATTER,
    ) -> TorchWork:
        """`reduce_scatter_single` of several tensors."""
        return self._collective(
            opts,
            ops.reduce_scatter_single_coalesced,
            inputs,
            outputs,
            opts.reduceOp,
            results=outputs,
        )

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    @call()
    def alltoall(
        self,
        output_tensors: list[Tensor],
        input_tensors: list[Tensor],
        opts: dist.AllToAllOptions = _ALL_TO_ALL,
    ) -> TorchWork:
        """Everyone has one tensor for each; shapes may differ."""
        return self._collective(
            opts, ops.all_to_all, input_tensors, output_tensors, results=output_tensors
        )

    @call(forms.all_to_all_single)
    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: list[SupportsIndex],
        input_split_sizes: list[SupportsIndex],
        opts: dist.AllToAllOptions = _ALL_TO_ALL,
    ) -> TorchWork:
        """Everyone has a part of one tensor for each; parts may differ in length."""
        return self._collective(
            opts,
            ops.all_to_all_single,
            input,
            output,
            input_split_sizes,
            output_split_sizes,
            results=[output],
        )

    alltoall_base = all_to_all_single

    @call(forms.barrier)
    def barrier(self, opts: dist.BarrierOptions = _BARRIER) -> TorchWork:
        """Wait for all ranks."""
        return self._collective(opts, ops.barrier, results=[])

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Wait for all ranks, at most `timeout` (0: they have to be there already); the error names
        all that are missing, on all that came, whether or not `wait_all_ranks`.

        `torch.distributed.monitored_barrier` itself is for Gloo's class alone: call this method.
        """
        opts = dist.BarrierOptions()
        opts.asyncOp = False
        if timeout is not None:
            opts.timeout = max(timeout, timedelta(milliseconds=1))
        try:
            self.barrier(opts).wait()
        except aiodist.CollectiveTimeoutError as error:
            # Gloo's words, which programs and torch's tests look for.
            error.message = f"Rank {self.rank()} timed out in monitoredBarrier: {error.message}"
            raise

    # -- point to point ---------------------------------------------------------------------------

    @call(collective=False)
    def send(
        self,
        tensors: list[Tensor],
        dstRank: SupportsIndex,
        tag: SupportsIndex = 0,
    ) -> TorchWork:
        """Send one tensor. Done when its memory may be used again."""
        x = one(tensors, "send")
        return self._go(ops.send, x, dstRank, tag, self._seconds, results=tensors)

    @call(collective=False)
    def recv(
        self,
        tensors: list[Tensor],
        srcRank: SupportsIndex,
        tag: SupportsIndex = 0,
    ) -> TorchWork:
        """Receive one tensor from `srcRank`."""
        x = one(tensors, "recv")
        return self._go(ops.receive, x, srcRank, tag, self._seconds, results=tensors)

    @call(collective=False)
    def recv_anysource(self, tensors: list[Tensor], tag: SupportsIndex = 0) -> TorchWork:
        """Receive one tensor from whoever sends one; ``source_rank()`` says who did."""
        x = one(tensors, "recv")
        return self._go(ops.receive, x, None, tag, self._seconds, results=tensors)

    # -- batches ----------------------------------------------------------------------------------

    def _start_coalescing(self, device_type: torch.device) -> None:
        if (group := self._for(device_type)) is not self:
            group._start_coalescing(device_type)
        else:
            self._batch = []

    def _end_coalescing(self, device_type: torch.device) -> Any:
        if (group := self._for(device_type)) is not self:
            return group._end_coalescing(device_type)
        batch, self._batch = self._batch or [], None
        return self._go(together, batch, results=[x for work in batch for x in work.tensors])

    # -- groups and their end ---------------------------------------------------------------------

    def derive(self, ranks: Sequence[int], timeout: timedelta, store: Any) -> ProcessGroup:
        """The group of some of its ranks; called by these alone."""
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
        """The group of `ranks` (of this group); None on those that are not among them.

        `torch.distributed.split_group` asks for an accelerator: call this method.
        """
        if self.rank() not in ranks:
            return None
        name = group_name or f"{self.group_name}:split:{'_'.join(map(str, ranks))}"
        store = c10d.PrefixStore(f"{name}/", self._store)
        group = self.derive(ranks, timeout or self._timeout, store)
        group.setGroupName(name)
        group.setGroupDesc(group_desc or "undefined")
        return group

    def set_timeout(self, timeout: timedelta) -> None:
        """The deadline of operations that are called from here on and give none."""
        self._timeout = timeout
        self._seconds = timeout.total_seconds()

    def shutdown(self) -> None:
        """Leave; what `destroy_process_group` does. Idempotent."""
        self._let_go_of_store()
        self._membership.leave()

    def abort(self) -> None:
        """Leave at once: what is pending fails, on all ranks."""
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
        """torch names the group."""
        self._name = name

    def getGroupName(self) -> str:
        """The name by which torch knows the group."""
        return self._name

    def setGroupDesc(self, desc: str) -> None:
        """torch describes the group."""
        self._desc = desc

    def getGroupDesc(self) -> str:
        """What torch was told to call the group."""
        return self._desc

    _set_group_name, _set_group_desc = setGroupName, setGroupDesc
    group_name, group_desc = property(getGroupName), property(getGroupDesc)

    def _get_sequence_number_for_group(self) -> int:
        """How many operations were called."""
        return self._sequence

    def _set_sequence_number_for_group(self) -> None:
        """Nothing has to be agreed on: each rank counts from 0."""

    def _has_hooks(self) -> bool:
        return False

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self.set_timeout(timeout)

    def get_group_store(self) -> Any:
        """The store that the ranks met at; None once this group was left."""
        return self._store

    # -- other devices ----------------------------------------------------------------------------

    def beside(self, device: torch.device) -> Any:
        """The group of the same ranks that torch makes for tensors of `device`, as the program has
        asked for (``cpu:aiodist,cuda:nccl``), when the first of them comes. It lives until the
        default group is destroyed. Raises RuntimeError if there is no backend for `device`."""
        if device.type not in self._beside:
            self._beside[device.type] = group_beside(self, device, self._timeout)
        return self._beside[device.type]

    def _for(self, device: torch.device) -> Any:
        return self if device.type == "cpu" else self.beside(device)

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(kind) for kind in backends_of(self)]

    def _get_backend(self, device: torch.device) -> Any:
        """What carries out operations on tensors of `device`; this object until there have been
        any. Raises RuntimeError if there is no backend for `device`."""
        device = torch.device(device)
        if (beside := self._beside.get(device.type, self)) is not self:
            return beside._get_backend(device)
        if device.type != "cpu":
            backend_for(self, device)
        return self

    @property
    def options(self) -> Any:
        """What torch has for the options of a backend: its timeout."""
        return c10d.Backend.Options("aiodist", self._timeout)

    supports_splitting = supports_time_estimate = False
    """Communicators need not be split off in advance; nobody has asked how long things take."""


def one(items: list[Any], op: str) -> Any:
    """The only one of `items`. Raises ValueError."""
    if len(items) != 1:
        raise ValueError(f"{op} takes one tensor (or list of them) per rank, got {len(items)}")
    return items[0]


def together(_: aiodist.Group, batch: list[TorchWork]) -> ops.Works:
    """The operations of works that have started."""
    for work in batch:
        if (error := work.exception()) is not None:
            raise error
    return [operation for work in batch for operation in work.operations]


def create(options: Any) -> ProcessGroup:
    """A process group of `options.group_size` ranks, as torch's `register_backend` asks for it.

    Raises what `aiodist.connect` raises, and what the store raises.
    """
    timeout: timedelta = options.timeout
    world = dist.group.WORLD
    try:
        if isinstance(world, ProcessGroup) and options.global_ranks_in_group:
            return world.derive(options.global_ranks_in_group, timeout, options.store)
        membership = Membership.join(
            engine(),
            options.store,
            rank=options.group_rank,
            size=options.group_size,
            name=options.group_id or "world",
            seconds=timeout.total_seconds(),
            is_default=not options.global_ranks_in_group,
        )
    except aiodist.AiodistError as error:
        raise as_torch(error) from None
    return ProcessGroup(membership, timeout, options.store)
