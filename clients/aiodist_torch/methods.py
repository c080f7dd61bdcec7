"""The methods of a process group that start operations: each is a call of aiodist on the engine.

torch's dispatcher and its Python layer call them, in torch's forms. `aiodist_torch.calls` explains
how the calls get here. `aiodist_torch.operations` is what they start.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, SupportsIndex

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch.autograd import profiler

import aiodist
from aiodist.codecs import Codec
from aiodist.threads.engine import Engine
from aiodist.threads.loop import at_once
from aiodist_torch import forms
from aiodist_torch import operations as ops
from aiodist_torch.callbacks import Caller, Turn, tagged, turn_of
from aiodist_torch.calls import call
from aiodist_torch.devices import backends_of, group_beside
from aiodist_torch.inflight import InFlightWork, allowed
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
        """What is used of torch's class.

        torch's own hints are for its callers: they would ask each method for all forms that torch's
        Python layer reduces to the one that arrives here.
        """

        def __init__(self, rank: int, size: int) -> None: ...
        def rank(self) -> int: ...

else:
    _Base = dist.ProcessGroup


@untraced
class Methods(_Base):
    """Starts operations of `group`. Each method returns a `TorchWork` at once."""

    def __init__(self, engine: Engine, group: aiodist.Group, timeout: timedelta) -> None:
        super().__init__(group.rank, group.size)
        self._engine = engine  # its loop runs the group
        self._group = group  # the group of aiodist
        self.set_timeout(timeout)
        # Calls since `_start_coalescing`; None: each is on its own.
        self._batch: list[TorchWork] | None = None
        self._beside: dict[str, Any] = {}  # the backends of other devices, by the type of device
        self._sequence = 0  # how many operations were called
        self._program = Caller()  # calls the collectives outside of callbacks

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the deadline of later operations that have none of their own."""
        self._timeout = timeout
        self._seconds = timeout.total_seconds()

    # -- starting ---------------------------------------------------------------------------------

    def _go(
        self,
        results: list[Tensor],
        start: Callable[..., ops.Works],
        *args: Any,
        waits: bool = False,
        turn: Turn | None = None,
    ) -> TorchWork:
        """Start operations. `waits`: the caller is going to wait for them at once. `turn`: that of
        the collective."""
        # The call is bound here, and the engine makes it: now if no other thread is in its loop,
        # else a moment later in another thread. aiodist checks the arguments there, so a wrong
        # argument is an error of the work in both cases.
        self._sequence += 1
        group = self._group if turn is None else tagged(self._group, turn[0].tag)
        in_flight = allowed() and self._batch is None  # a batch ends in one work for all tensors
        make = InFlightWork if in_flight else TorchWork
        work = make(self._engine, self._group, partial(start, group, *args), results, turn)
        if self._batch is not None:
            self._batch.append(work)
        submit = self._engine.submit
        if profiler._is_profiler_enabled:
            submit = recording(submit, work, waits and self._batch is None, start, args)
        submit(work.launch, later=work.close_gate, until=work.is_completed if waits else at_once)
        if isinstance(work, InFlightWork):
            work.register()
        return work

    def _collective(
        self, opts: Any, results: list[Tensor], start: Callable[..., ops.Works], *args: Any
    ) -> TorchWork:
        """Start a collective with the deadline of `opts`, or else that of the group."""
        given: float = opts.timeout.total_seconds()
        seconds = given if given > 0 else self._seconds
        start = partial(ops.or_forgo, start)
        return self._go(results, start, *args, seconds, waits=not opts.asyncOp, turn=self._turn())

    def _turn(self) -> Turn:
        return turn_of(self._group, self._program)

    def forgo(self, error: Exception, x: Tensor | None) -> None:
        """Use up the turn of a collective of `x` that was not called because of `error`.

        The other ranks then hear of it. Does nothing if the collective was one of another backend.
        """
        # Ranks match collectives by counting. A rank whose call fails before it reaches aiodist
        # would have counted one less than the others. All later collectives would be matched
        # wrongly, without an error if shapes happen to agree. So the turn is used up, and the
        # others fail with the reason.
        if x is None or backends_of(self).get(x.device.type, "aiodist") == "aiodist":
            self._sequence += 1
            tag = self._turn()[0].tag
            self._engine.submit(partial(self._group._forgo, error, tag))

    # -- collectives ------------------------------------------------------------------------------

    @call(forms.allreduce_listed, forms.allreduce_one)
    def allreduce(
        self, tensors: list[Tensor], opts: dist.AllreduceOptions = _ALL_REDUCE
    ) -> TorchWork:
        """Reduce one tensor in place. It may be sparse."""
        x = one(tensors, "all_reduce")
        start = ops.all_reduce if x.layout is torch.strided else ops.all_reduce_sparse
        return self._collective(opts, tensors, start, x, opts.reduceOp)

    def average_coded(self, x: Tensor, codec: Codec, tag: str) -> TorchWork:
        """Average one tensor in place, by a codec between hosts. torch has no such call: see
        `aiodist_torch.codec_hook`."""
        turn = self._turn()
        return self._go([x], ops.average_coded, x, codec, tag, self._seconds, turn=turn)

    @call()
    def allreduce_coalesced(
        self, tensors: list[Tensor], opts: dist.AllreduceCoalescedOptions = _ALL_REDUCE_COALESCED
    ) -> TorchWork:
        """Reduce several tensors in place."""
        return self._collective(opts, tensors, ops.all_reduce_coalesced, tensors, opts.reduceOp)

    @call(forms.reduce)
    def reduce(self, tensors: list[Tensor], opts: dist.ReduceOptions = _REDUCE) -> TorchWork:
        """Reduce one tensor in place at the root. The other ranks' tensors keep their content."""
        x = one(tensors, "reduce")
        return self._collective(opts, tensors, ops.reduce, x, opts.rootRank, opts.reduceOp)

    @call(forms.broadcast)
    def broadcast(
        self, tensors: list[Tensor], opts: dist.BroadcastOptions = _BROADCAST
    ) -> TorchWork:
        """Copy the root's tensor into that of every rank."""
        x = one(tensors, "broadcast")
        return self._collective(opts, tensors, ops.broadcast, x, opts.rootRank)

    @call(forms.allgather)
    def allgather(
        self,
        output_tensors: list[list[Tensor]],
        input_tensors: list[Tensor],
        opts: c10d.AllgatherOptions = _ALL_GATHER,
    ) -> TorchWork:
        """Gather the tensors of all ranks into a list on every rank. Shapes may differ."""
        x = one(input_tensors, "all_gather")
        outs = one(output_tensors, "all_gather")
        return self._collective(opts, outs, ops.all_gather, x, outs)

    @call()
    def all_gather_single(
        self, output: Tensor, input: Tensor, opts: c10d.AllgatherOptions = _ALL_GATHER
    ) -> TorchWork:
        """Gather the tensors of all ranks into one tensor on every rank, one after the other."""
        return self._collective(opts, [output], ops.all_gather_single, input, output)

    _allgather_base = all_gather_single

    @call()
    def allgather_coalesced(
        self,
        output_lists: list[list[Tensor]],
        input_list: list[Tensor],
        opts: c10d.AllgatherOptions = _ALL_GATHER,
    ) -> TorchWork:
        """Gather the tensors of all ranks into lists on every rank."""
        return self._collective(
            opts,
            [tensor for row in output_lists for tensor in row],
            ops.all_gather_coalesced,
            input_list,
            output_lists,
        )

    @call()
    def all_gather_single_coalesced(
        self,
        outputs: list[Tensor],
        inputs: list[Tensor],
        opts: c10d.AllgatherOptions = _ALL_GATHER,
    ) -> TorchWork:
        """`all_gather_single` of several tensors."""
        return self._collective(opts, outputs, ops.all_gather_single_coalesced, inputs, outputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    @call(forms.gather)
    def gather(
        self,
        output_tensors: list[list[Tensor]],
        input_tensors: list[Tensor],
        opts: dist.GatherOptions = _GATHER,
    ) -> TorchWork:
        """Gather the tensors of all ranks into a list at the root."""
        x = one(input_tensors, "gather")
        outs = one(output_tensors, "gather") if output_tensors else []
        return self._collective(opts, outs, ops.gather, x, outs, opts.rootRank)

    @call(forms.scatter)
    def scatter(
        self,
        output_tensors: list[Tensor],
        input_tensors: list[list[Tensor]],
        opts: dist.ScatterOptions = _SCATTER,
    ) -> TorchWork:
        """Give each rank one tensor of the root's list."""
        out = one(output_tensors, "scatter")
        xs = one(input_tensors, "scatter") if input_tensors else []
        return self._collective(opts, output_tensors, ops.scatter, xs, out, opts.rootRank)

    @call(forms.reduce_scatter)
    def reduce_scatter(
        self,
        output_tensors: list[Tensor],
        input_tensors: list[list[Tensor]],
        opts: dist.ReduceScatterOptions = _REDUCE_SCATTER,
    ) -> TorchWork:
        """Reduce lists of tensors. Each rank gets its own element."""
        out = one(output_tensors, "reduce_scatter")
        xs = one(input_tensors, "reduce_scatter")
        return self._collective(opts, output_tensors, ops.reduce_scatter, xs, out, opts.reduceOp)

    @call()
    def reduce_scatter_single(
        self,
        outputTensor: Tensor,
        inputTensor: Tensor,
        opts: dist.ReduceScatterOptions = _REDUCE_SCATTER,
    ) -> TorchWork:
        """Reduce a tensor. Each rank gets its part of it."""
        return self._collective(
            opts,
            [outputTensor],
            ops.reduce_scatter_single,
            inputTensor,
            outputTensor,
            opts.reduceOp,
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
            opts, outputs, ops.reduce_scatter_single_coalesced, inputs, outputs, opts.reduceOp
        )

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    @call()
    def alltoall(
        self,
        output_tensors: list[Tensor],
        input_tensors: list[Tensor],
        opts: dist.AllToAllOptions = _ALL_TO_ALL,
    ) -> TorchWork:
        """Give each rank one tensor of every other rank's list. Shapes may differ."""
        return self._collective(opts, output_tensors, ops.all_to_all, input_tensors, output_tensors)

    @call(forms.all_to_all_single)
    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: list[SupportsIndex],
        input_split_sizes: list[SupportsIndex],
        opts: dist.AllToAllOptions = _ALL_TO_ALL,
    ) -> TorchWork:
        """Give each rank a part of every other rank's tensor. Parts may differ in length."""
        return self._collective(
            opts,
            [output],
            ops.all_to_all_single,
            input,
            output,
            input_split_sizes,
            output_split_sizes,
        )

    alltoall_base = all_to_all_single

    @call(forms.barrier)
    def barrier(self, opts: dist.BarrierOptions = _BARRIER) -> TorchWork:
        """Wait for all ranks."""
        return self._collective(opts, [], ops.barrier)

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Wait for all ranks, at most `timeout` (0: they must be there already).

        The error names all missing ranks, on all ranks that came, with or without `wait_all_ranks`.
        `torch.distributed.monitored_barrier` is for Gloo's class alone, so call this method
        instead.
        """
        opts = dist.BarrierOptions()
        opts.asyncOp = False
        if timeout is not None:
            opts.timeout = max(timeout, timedelta(milliseconds=1))
        try:
            self.barrier(opts).wait()
        except aiodist.CollectiveTimeoutError as error:
            # Gloo's words, because programs and torch's tests look for them.
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
        return self._go(tensors, ops.send, x, dstRank, tag, self._seconds)

    @call(collective=False)
    def recv(
        self,
        tensors: list[Tensor],
        srcRank: SupportsIndex,
        tag: SupportsIndex = 0,
    ) -> TorchWork:
        """Receive one tensor from `srcRank`."""
        x = one(tensors, "recv")
        return self._go(tensors, ops.receive, x, srcRank, tag, self._seconds)

    @call(collective=False)
    def recv_anysource(self, tensors: list[Tensor], tag: SupportsIndex = 0) -> TorchWork:
        """Receive one tensor from any rank. ``source_rank()`` tells which."""
        x = one(tensors, "recv")
        return self._go(tensors, ops.receive, x, None, tag, self._seconds)

    # -- batches ----------------------------------------------------------------------------------

    def _start_coalescing(self, device_type: torch.device) -> None:
        if (group := self._for(device_type)) is not self:
            group._start_coalescing(device_type)
        else:
            self._batch = []

    def _end_coalescing(self, device_type: torch.device) -> Any:
        if (group := self._for(device_type)) is not self:
            return group._end_coalescing(device_type)
        # The operations of a batch have started one by one. Holding them back would gain nothing,
        # because links send what is queued together. torch only wants one work for all.
        batch, self._batch = self._batch or [], None
        turn = next((work.turn for work in batch if work.turn is not None), None)
        return self._go([x for work in batch for x in work.tensors], together, batch, turn=turn)

    # -- other devices ----------------------------------------------------------------------------

    def beside(self, device: torch.device) -> Any:
        """Return the group of the same ranks for tensors of `device`, made when the first one
        comes.

        The program chooses its backend (``cpu:aiodist,cuda:nccl``). The group lives until the
        default group is destroyed. Raises RuntimeError if there is no backend for `device`.
        """
        if device.type not in self._beside:
            self._beside[device.type] = group_beside(self, device, self._timeout)
        return self._beside[device.type]

    def _for(self, device: torch.device) -> Any:
        return self if device.type == "cpu" else self.beside(device)


def one(items: list[Any], op: str) -> Any:
    """Return the only one of `items`. Raises ValueError if there is not exactly one."""
    if len(items) != 1:
        raise ValueError(f"{op} takes one tensor (or list of them) per rank, got {len(items)}")
    return items[0]


def together(_: aiodist.Group, batch: list[TorchWork]) -> ops.Works:
    """Return the operations of works that have started, and a failed one for each that was
    refused."""
    # An error that was raised here would end the batch while its other operations still write.
    operations: list[asyncio.Future[Any]] = []
    for work in batch:
        operations += work.operations
        if not work.operations and (error := work.exception()) is not None:
            refused = asyncio.get_running_loop().create_future()
            refused.set_exception(error)
            operations.append(refused)
    return operations
