"""Works that torch keeps in C++ and waits for there: the same as with Gloo's."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch._C import _distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel

from aiodist_torch.inflight import InFlightWork
from aiodist_torch.work import TorchWork

warnings.simplefilter("ignore")
Group = dist.ProcessGroup
Started = tuple[Any, list[Tensor]]
"""A work, or None, and the tensors of its results."""


# -- works of DistributedDataParallel.join ----------------------------------------------------


def joined(group: Group) -> list[Any]:
    """Weights after each rank has trained on inputs of its own number."""
    found: list[Any] = []
    for initial in (True, False):
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Linear(4, 2), process_group=group)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with model.join(divide_by_initial_world_size=initial):
            for step in range(2 + 2 * group.rank()):
                optimizer.zero_grad()
                model(torch.full((3, 4), float(step + group.rank()))).square().sum().backward()
                optimizer.step()
        found += [parameter.detach() for parameter in model.parameters()]
    return found


# -- works of tensors in flight ---------------------------------------------------------------


def all_reduce(g: Group, x: Tensor) -> Started:
    return dist.all_reduce(x, group=g, async_op=True), [x]


def coalesced(g: Group, x: Tensor) -> Started:
    xs = [x, x + 1]
    with dist._coalescing_manager(g, async_ops=True) as manager:
        for each in xs:
            dist.all_reduce(each, group=g)
    return manager, xs


def broadcast(g: Group, x: Tensor) -> Started:
    return dist.broadcast(x, 1, group=g, async_op=True), [x]


def reduce(g: Group, x: Tensor) -> Started:
    # At the root alone, because the contents of the others are not the same with Gloo.
    work = dist.reduce(x, 0, group=g, async_op=True)
    return work, [x if g.rank() == 0 else x[:0]]


def all_gather(g: Group, x: Tensor) -> Started:
    outs = [torch.empty_like(x) for _ in range(g.size())]
    return dist.all_gather(outs, x, group=g, async_op=True), outs


def all_gather_single(g: Group, x: Tensor) -> Started:
    out = torch.empty(g.size() * len(x))
    return dist.all_gather_into_tensor(out, x, group=g, async_op=True), [out]


def gather(g: Group, x: Tensor) -> Started:
    outs = [torch.empty_like(x) for _ in range(g.size())] if g.rank() == 0 else None
    return dist.gather(x, outs, 0, group=g, async_op=True), outs or []


def scatter(g: Group, x: Tensor) -> Started:
    xs = [x + n for n in range(g.size())] if g.rank() == 0 else None
    out = torch.empty_like(x)
    return dist.scatter(out, xs, 0, group=g, async_op=True), [out]


def reduce_scatter(g: Group, x: Tensor) -> Started:
    out = torch.empty_like(x)
    xs = [x + n for n in range(g.size())]
    return dist.reduce_scatter(out, xs, group=g, async_op=True), [out]


def all_to_all(g: Group, x: Tensor) -> Started:
    out = torch.empty_like(x)
    return dist.all_to_all_single(out, x, group=g, async_op=True), [out]


def message(g: Group, x: Tensor) -> Started:
    return (dist.isend if g.rank() else dist.irecv)(x, 1 - g.rank(), group=g), [x]


def in_turn(g: Group, x: Tensor) -> Started:
    """Two messages into one memory. The second is sent when the first has been waited for."""
    first, second = x[:2], x[2:]
    if g.rank():
        dist.send(first, 0, group=g)
        dist.recv(first, 0, group=g)
        return dist.isend(second, 0, group=g), [x]
    works = [dist.irecv(part, 1, group=g) for part in (first, second)]
    assert works[0] is not None
    works[0].wait()
    dist.send(first, 1, group=g)
    return works[1], [x]


def at_once(g: Group, x: Tensor) -> Started:
    dist.all_reduce(x, group=g)
    return None, [x]


def in_flight(group: Group) -> list[Any]:
    """For each way to wait: for how many works torch would wait, and the results."""
    calls: list[Callable[[Group, Tensor], Started]] = [all_reduce, coalesced, broadcast, reduce]
    calls += [all_gather, all_gather_single, gather, scatter, reduce_scatter, all_to_all]
    calls += [message, in_turn, at_once]
    found: list[Any] = []
    left = c10d._get_work_registry_size
    for call in calls:
        for wait in (True, False):
            before = left()
            work, results = call(group, torch.arange(4.0) + group.rank())
            started = left() - before
            if wait and work is not None:
                work.wait()
            else:
                results = [torch.ops._c10d_functional.wait_tensor(x) for x in results]
            found.append((call.__name__, started, [x.clone() for x in results]))
    return found


def batched(group: Group) -> None:
    """One work for several calls, which Gloo has not."""
    x, y = torch.ones(1), torch.full((1,), float(group.rank()))
    with dist._coalescing_manager(group, torch.device("cpu"), async_ops=True) as manager:
        dist.all_reduce(x, group=group)
        dist.broadcast(y, 1, group=group)
    assert c10d._get_work_registry_size() == 2
    manager.wait()
    assert (float(x), float(y)) == (group.size(), 1)


dist.init_process_group("aiodist")
world, gloo = dist.group.WORLD, dist.new_group(backend="gloo")
assert world is not None
assert gloo is not None
torch.testing.assert_close(joined(world), joined(gloo))
with functional.allow_inflight_collective_as_graph_input_ctx():
    batched(world)
    ours = in_flight(world)
    assert c10d._get_work_registry_size() == 0
    for (name, started, results), theirs in zip(ours, in_flight(gloo), strict=True):
        assert (name, started) == theirs[:2], theirs
        torch.testing.assert_close(results, theirs[2])
gc.collect()
assert [x for x in gc.get_objects() if type(x) in (TorchWork, InFlightWork)] == []
dist.destroy_process_group()
print("kept")
