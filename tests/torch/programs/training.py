"""Training on the digits of scikit-learn: the losses of Gloo, in every way that torch offers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

IMAGES, DIGITS = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
IMAGES = IMAGES.float() / 16

Step = Callable[[nn.Module, int], Tensor]


class Net(nn.Module):
    """A classifier with a part that it uses in every second step only."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 32), nn.Linear(32, 10)
        self.extra = nn.Linear(32, 32)
        self.odd = False

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.first(x))
        return self.last(self.extra(hidden) if self.odd else hidden)


def batch(step: int) -> tuple[Tensor, Tensor]:
    rank, size = dist.get_rank(), dist.get_world_size()
    own = torch.arange(32 * step, 32 * (step + 1))[rank::size] % len(DIGITS)
    return IMAGES[own], DIGITS[own]


def loss_of(model: nn.Module, step: int) -> Tensor:
    x, y = batch(step)
    return nn.functional.cross_entropy(model(x), y)


def train(model: nn.Module, steps: int = 6, accumulate: int = 1) -> list[float]:
    """The losses, averaged over ranks."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for step in range(steps):
        last = (step + 1) % accumulate == 0
        quiet = contextlib.nullcontext() if last else model.no_sync()
        with quiet:
            loss = loss_of(model, step)
            loss.backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean, group=CHECKS)
        losses.append(float(mean) / dist.get_world_size())
    return losses


def net() -> Net:
    torch.manual_seed(1)
    return Net()


def plain(group: dist.ProcessGroup) -> list[float]:
    model = net()
    del model.extra
    return train(DistributedDataParallel(model, process_group=group))


def accumulated(group: dist.ProcessGroup) -> list[float]:
    model = net()
    del model.extra
    return train(DistributedDataParallel(model, process_group=group), accumulate=2)


def unused(group: dist.ProcessGroup) -> list[float]:
    model = net()
    wrapped = DistributedDataParallel(model, process_group=group, find_unused_parameters=True)
    losses = train(wrapped, steps=2)
    model.odd = True
    return losses + train(wrapped, steps=2)


def compressed(group: dist.ProcessGroup) -> list[float]:
    model = net()
    del model.extra
    wrapped = DistributedDataParallel(model, process_group=group)
    # By another name: torch lets nobody but NCCL's users have the hook itself.
    hook = default_hooks.bf16_compress_hook
    wrapped.register_comm_hook(None, lambda _, bucket: hook(group, bucket))
    return train(wrapped)


def averaged_twice(bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """A hook that communicates in the callback of a future. The second average changes nothing."""

    def again(future: torch.futures.Future[list[Tensor]]) -> Tensor:
        x = future.value()[0] / dist.get_world_size()
        dist.all_reduce(x)
        return x / dist.get_world_size()

    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(again)


def check_equal_buckets() -> None:
    """Callbacks for buckets of one size end in any order. The gradients tell them apart."""
    layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(6))

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers

        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([i * each(x).sum() for i, each in enumerate(layers)]).sum()

    wrapped = DistributedDataParallel(Sum(), bucket_cap_mb=0.015)
    wrapped.register_comm_hook(None, lambda _, bucket: averaged_twice(bucket))
    for _ in range(30):
        wrapped.zero_grad()
        wrapped(torch.ones(1, 64)).backward()
        assert [each.weight.grad.mean().item() for each in layers] == [0, 1, 2, 3, 4, 5]


def power_sgd(group: dist.ProcessGroup, **options: float) -> list[float]:
    """Its hook waits for further futures in callbacks of futures."""
    model = net()
    del model.extra
    wrapped = DistributedDataParallel(model, process_group=group, **options)
    state = powerSGD_hook.PowerSGDState(group, matrix_approximation_rank=2, start_powerSGD_iter=2)
    wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return train(wrapped)


def flat_shards(group: dist.ProcessGroup) -> list[float]:
    """FSDP's first version: it frees what it has gathered by ``storage.resize_(0)``."""
    model = net()
    del model.extra
    model.first = FullyShardedDataParallel(
        model.first, process_group=group, device_id=torch.device("cpu")
    )
    wrapped = FullyShardedDataParallel(model, process_group=group, device_id=torch.device("cpu"))
    return train(wrapped)


def small_buckets(group: dist.ProcessGroup) -> list[float]:
    model = net()
    del model.extra
    return train(DistributedDataParallel(model, process_group=group, bucket_cap_mb=0.001))


def sharded(mesh: dist.DeviceMesh) -> list[float]:
    model = net()
    del model.extra
    for layer in (model.first, model.last):
        fully_shard(layer, mesh=mesh).set_allocate_memory_from_process_group_for_comm(True)
    fully_shard(model, mesh=mesh)
    return train(model)


def check_tensors(mesh: dist.DeviceMesh) -> None:
    whole = torch.arange(24.0).reshape(6, 4)
    split = distribute_tensor(whole, mesh, [Shard(0)])
    assert isinstance(split, DTensor)
    assert torch.equal(split.full_tensor(), whole)
    product = split @ distribute_tensor(torch.eye(4), mesh, [Replicate()])
    assert torch.equal(product.redistribute(mesh, [Shard(1)]).full_tensor(), whole)
    assert float(split.sum().full_tensor()) == float(whole.sum())


dist.init_process_group("aiodist")
CHECKS = dist.group.WORLD
gloo = dist.new_group(backend="gloo")
LIKE = {plain: 1e-4, accumulated: 1e-4, unused: 1e-4, small_buckets: 1e-4, flat_shards: 1e-4}
LIKE |= {compressed: 1e-2, power_sgd: 1e-2}  # each sum is rounded to eight bits; random directions
for way in LIKE:
    ours, theirs = way(dist.group.WORLD), way(gloo)
    assert torch.allclose(torch.tensor(ours), torch.tensor(theirs), rtol=LIKE[way]), (
        way,
        ours,
        theirs,
    )
    assert ours[-1] < ours[0], (way, ours)
check_equal_buckets()
# Gloo mixes up the callbacks of several buckets, so it is no model for this.
losses = power_sgd(dist.group.WORLD, bucket_cap_mb=0.001)
assert torch.allclose(torch.tensor(losses), torch.tensor(power_sgd(gloo)), rtol=1e-2), losses
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
check_tensors(mesh)
ours, theirs = sharded(mesh), plain(gloo)
assert torch.allclose(torch.tensor(ours), torch.tensor(theirs), rtol=1e-4), (ours, theirs)
dist.destroy_process_group()
print("trained")
