"""Calls of a process group's own methods, in all forms that Gloo's take, with the same results."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

warnings.simplefilter("ignore")
MAX, SOON = dist.ReduceOp.MAX, timedelta(seconds=30)
Call = Callable[[Any, Tensor, Tensor, Tensor], Any]
OF_ALL: list[Call] = [
    lambda g, x, y, z: g.allreduce(x),
    lambda g, x, y, z: g.allreduce([x]),
    lambda g, x, y, z: g.allreduce((x,), MAX),
    lambda g, x, y, z: g.allreduce(x, MAX),
    lambda g, x, y, z: g.allreduce(x, dist.ReduceOp(MAX), SOON),
    lambda g, x, y, z: g.allreduce([x], MAX, SOON),
    lambda g, x, y, z: g.allreduce(tensor=x, op=MAX, timeout=SOON),
    lambda g, x, y, z: g.allreduce(tensors=[x], op=MAX),
    lambda g, x, y, z: g.allreduce(tensors=[x], opts=dist.AllreduceOptions()),
    lambda g, x, y, z: g.allreduce_coalesced(tensors=[x, x + 1]),
    lambda g, x, y, z: g.broadcast(x, 1),
    lambda g, x, y, z: g.broadcast(tensor=x, root=1, timeout=SOON),
    lambda g, x, y, z: g.broadcast(x, 1, SOON),
    lambda g, x, y, z: g.broadcast([x]),
    lambda g, x, y, z: g.broadcast(tensors=[x], opts=dist.BroadcastOptions()),
    lambda g, x, y, z: g.allgather([y, z], x),
    lambda g, x, y, z: g.allgather([y, z], x, SOON),
    lambda g, x, y, z: g.allgather(output_tensors=[y, z], input_tensor=x),
    lambda g, x, y, z: g.allgather(output_tensors=[[y, z]], input_tensors=[x]),
    lambda g, x, y, z: g.allgather_coalesced(output_lists=[[y], [z]], input_list=[x]),
    lambda g, x, y, z: g.all_gather_single(output=y, input=x[:1]),
    lambda g, x, y, z: g._allgather_base(y, x[:1]),
    lambda g, x, y, z: g.all_gather_single_coalesced(outputs=[y], inputs=[x[:1]]),
    lambda g, x, y, z: g.allgather_into_tensor_coalesced([y], [x[:1]]),
    lambda g, x, y, z: g.reduce_scatter(x, [y.fill_(1), z.fill_(2)]),
    lambda g, x, y, z: g.reduce_scatter(x, [y.fill_(1), z.fill_(2)], MAX),
    lambda g, x, y, z: g.reduce_scatter(output=x, input=[y, z], op=MAX, timeout=SOON),
    lambda g, x, y, z: g.reduce_scatter([x], [[y.fill_(1), z.fill_(2)]]),
    lambda g, x, y, z: g.reduce_scatter_single(outputTensor=y[:1], inputTensor=x),
    lambda g, x, y, z: g._reduce_scatter_base(y[:1], x),
    lambda g, x, y, z: g.reduce_scatter_single_coalesced(outputs=[y[:1]], inputs=[x]),
    lambda g, x, y, z: g.reduce_scatter_tensor_coalesced([y[:1]], [x]),
    lambda g, x, y, z: g.all_to_all_single(y, x, [1, 1], [1, 1], SOON),
    lambda g, x, y, z: g.all_to_all_single(
        output=y, input=x, output_split_sizes=[], input_split_sizes=[], timeout=SOON
    ),
    lambda g, x, y, z: g.alltoall_base(y, x, [], [], timeout=SOON),
    lambda g, x, y, z: g.alltoall(output_tensors=list(y.chunk(2)), input_tensors=list(x.chunk(2))),
    lambda g, x, y, z: g.barrier(),
    lambda g, x, y, z: g.barrier(timeout=SOON),
    lambda g, x, y, z: g.barrier(SOON),
    lambda g, x, y, z: g.barrier(opts=dist.BarrierOptions()),
]
AT_0: list[Call] = [
    lambda g, x, y, z: g.reduce(y, 0),
    lambda g, x, y, z: g.reduce(y, 0, MAX),
    lambda g, x, y, z: g.reduce(tensor=y, root=0, op=MAX, timeout=SOON),
    lambda g, x, y, z: g.reduce([y]),
    lambda g, x, y, z: g.gather([y, z] if g.rank() == 0 else [], x, 0),
    lambda g, x, y, z: g.gather(
        output_tensors=[y, z] if g.rank() == 0 else [], input_tensor=x, root=0, timeout=SOON
    ),
    lambda g, x, y, z: g.gather([[y, z]] if g.rank() == 0 else [], [x]),
    lambda g, x, y, z: g.scatter(y, [x, x + 1] if g.rank() == 0 else [], 0),
    lambda g, x, y, z: g.scatter(
        output_tensor=y, input_tensors=[x, x + 1] if g.rank() == 0 else [], root=0, timeout=SOON
    ),
    lambda g, x, y, z: g.scatter([y], [[x, x + 1]] if g.rank() == 0 else []),
    lambda g, x, y, z: (
        g.send(tensors=[x], dstRank=1, tag=3)
        if g.rank() == 0
        else g.recv(tensors=[y], srcRank=0, tag=3)
    ),
]
REFUSED: list[Callable[[Any, Tensor], Any]] = [
    lambda g, x: g.allreduce("x"),
    lambda g, x: g.allreduce(),
    lambda g, x: g.allreduce(x, 3),
    lambda g, x: g.allreduce([x], dist.BroadcastOptions()),
    lambda g, x: g.broadcast(x),
    lambda g, x: g.barrier(3),
]


def found(group: Any, call: Call, root_alone: bool) -> list[list[float]]:
    """What the three tensors of a call hold in the end, where that is defined."""
    x = torch.arange(2.0) + 10 * group.rank()
    y, z = x + 1, x + 2
    call(group, x, y, z).wait()
    return [] if root_alone and group.rank() else [x.tolist(), y.tolist(), z.tolist()]


def numbered(group: Any) -> list[int]:
    """By how much calls raise the sequence number."""
    x, raised = torch.ones(2), []
    group._set_sequence_number_for_group()
    for call in (
        lambda: dist.all_reduce(x, group=group),
        lambda: dist.barrier(group),
        lambda: dist.send(x, 1, group) if group.rank() == 0 else dist.recv(x, 0, group),
    ):
        before = group._get_sequence_number_for_group()
        call()
        raised.append(group._get_sequence_number_for_group() - before)
    return raised


def joined(group: Any) -> list[float]:
    """Gradients of ranks with different numbers of batches, some parameters not used."""
    torch.manual_seed(0)
    net = nn.Linear(2, 2)
    net.unused = nn.Linear(2, 2)
    model = DistributedDataParallel(net, process_group=group, find_unused_parameters=True)
    with model.join():
        for step in range(2 + group.rank()):
            model(torch.full((1, 2), float(step))).sum().backward()
    return [float(p.grad.sum()) for p in net.parameters() if p.grad is not None]


def compressed(group: Any) -> list[Tensor]:
    """With the hook in C++ that sends gradients as float16."""
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(60, 60) for _ in range(3)))
    model = DistributedDataParallel(net, process_group=group, bucket_cap_mb=0.01)
    model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    torch.manual_seed(1 + group.rank())
    for _ in range(2):
        model(torch.randn(4, 60)).square().sum().backward()
    return [p.grad for p in net.parameters() if p.grad is not None]


def strided(group: Any) -> list[list[float]]:
    """Results of torch's calls in tensors that are not contiguous."""
    x = torch.arange(6.0).reshape(2, 3) + 10 * group.rank()
    whole, own = torch.zeros(3, 4).t(), torch.zeros(3, 1).t()
    dist.all_gather_into_tensor(whole, x, group=group)
    dist.reduce_scatter_tensor(own, x, group=group)
    return [whole.tolist(), own.tolist()]


def of_booleans(group: Any) -> list[list[bool]]:
    results = []
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT):
        x = torch.tensor([True, False, group.rank() == 1])
        dist.all_reduce(x, op, group=group)
        results.append(x.tolist())
    return results


dist.init_process_group("aiodist")
world, gloo = dist.group.WORLD, dist.new_group(backend="gloo")
for root_alone, calls in ((False, OF_ALL), (True, AT_0)):
    for number, call in enumerate(calls):
        ours, theirs = (found(group, call, root_alone) for group in (world, gloo))
        assert ours == theirs, (root_alone, number, ours, theirs)
for refused in REFUSED:
    for group in (world, gloo):
        try:
            refused(group, torch.ones(1))
        except TypeError:
            continue
        raise AssertionError(f"{group} takes what it should not")
for check in (numbered, joined, compressed, strided, of_booleans):
    ours, theirs = check(world), check(gloo)
    same = torch.allclose if check is compressed else lambda a, b: a == b
    assert len(ours) == len(theirs) > 0
    assert all(same(a, b) for a, b in zip(ours, theirs, strict=True)), (check, ours, theirs)
dist.destroy_process_group()
print("called")
