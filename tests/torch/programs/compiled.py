"""What torch.compile makes of calls of a process group: the same as with Gloo's."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

warnings.simplefilter("ignore")
torch._logging.set_logs(dynamo=50)
Group = dist.ProcessGroup


class Net(nn.Module):
    """With buffers, which DistributedDataParallel broadcasts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)))


def trained(group: Group) -> list[Tensor]:
    torch.manual_seed(0)
    model = DistributedDataParallel(Net(), process_group=group)
    compiled = torch.compile(model, backend="eager")
    torch.manual_seed(1 + dist.get_rank())
    for _ in range(2):
        compiled(torch.randn(8, 4)).square().sum().backward()
    return [p.grad for p in model.parameters() if p.grad is not None] + list(model.buffers())


def broadcast(x: Tensor, group: Group) -> Tensor:
    y = 2 * x
    dist.broadcast(y, 0, group=group)
    return y + 1


def reduce(x: Tensor, group: Group) -> Tensor:
    y = 2 * x
    dist.reduce(y, 0, group=group)
    return y + 1 if dist.get_rank() == 0 else x


def message(x: Tensor, group: Group) -> Tensor:
    y = 2 * x
    if dist.get_rank() == 0:
        dist.send(y, 1, group=group)
    elif dist.get_rank() == 1:
        dist.recv(y, 0, group=group)
    return y + 1


def started(x: Tensor, group: Group) -> Tensor:
    y = 2 * x
    work = dist.all_reduce(y, group=group, async_op=True)
    assert work is not None
    z = x + 1
    work.wait()
    return y + z


def chained(x: Tensor, group: Group) -> Tensor:
    y = 2 * x
    work = dist.all_reduce(y, group=group, async_op=True)
    assert work is not None
    work.get_future().wait()
    return y + 1


def waited(x: Tensor, group: Group) -> Tensor:
    y = 2 * x
    dist.all_reduce(y, group=group)
    dist.barrier(group)
    return y + 1


def gathered(x: Tensor, group: Group) -> Tensor:
    outs = [torch.empty(2) for _ in range(dist.get_world_size())]
    dist.all_gather(outs, 2 * x, group=group)
    return torch.stack(outs) + 1


def scattered(x: Tensor, group: Group) -> Tensor:
    y = torch.empty(2)
    xs = [x + rank for rank in range(dist.get_world_size())]
    dist.scatter(y, xs if dist.get_rank() == 0 else None, 0, group=group)
    dist.reduce_scatter(y, xs, group=group)
    return y + 1


def exchanged(x: Tensor, group: Group) -> Tensor:
    y, peer = torch.empty(2), 1 - dist.get_rank()
    ops = [dist.P2POp(dist.isend, 2 * x, peer, group), dist.P2POp(dist.irecv, y, peer, group)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return y + 1


def same(ours: Any, theirs: Any, what: str) -> None:
    torch.testing.assert_close(ours, theirs, msg=lambda text: f"{what}: {text}")


dist.init_process_group("aiodist")
world, gloo = dist.group.WORLD, dist.new_group(backend="gloo")
assert world is not None
assert gloo is not None
same(trained(world), trained(gloo), "trained")
calls: list[Callable[[Tensor, Group], Tensor]] = [broadcast, reduce, message, started, chained]
calls += [waited, gathered, scattered, exchanged]
for call in calls:
    found = []
    for group in (world, gloo):
        torch._dynamo.reset()
        x = torch.full((2,), 1.0 + dist.get_rank())
        found.append(torch.compile(call, backend="eager")(x, group))
    same(*found, call.__name__)
dist.destroy_process_group()
print("compiled")
