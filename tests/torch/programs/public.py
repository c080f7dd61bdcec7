"""torch's public calls: coalesced, uneven, chained, tagged; and what torch keeps for others."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # a backend for any device: it does nothing
from torch import Tensor
from torch.distributed.distributed_c10d import _coalescing_manager

import aiodist

LATE = timedelta(minutes=20)


def full(value: float, *shape: int) -> Tensor:
    return torch.full(shape, float(value))


def refused(call: Callable[[], object], text: str) -> None:
    try:
        call()
    except (ValueError, RuntimeError) as error:
        assert text in str(error), error
    else:
        raise AssertionError(f"torch lets it through by now: {text}")


def coalesced(rank: int, size: int) -> None:
    xs, total = [full(rank, 2), full(1, 3)], sum(range(size))
    with _coalescing_manager():
        for x in xs:
            dist.all_reduce(x)
    assert [x.tolist() for x in xs] == [[total] * 2, [size] * 3]
    outs = [torch.empty(size), torch.empty(size, 2)]
    with _coalescing_manager(async_ops=True) as manager:
        dist.all_gather_into_tensor(outs[0], full(rank, 1))
        dist.all_gather_into_tensor(outs[1], full(rank, 1, 2))
    manager.wait()
    assert outs[0].tolist() == [*range(size)]
    assert outs[1].tolist() == [[r, r] for r in range(size)]
    outs = [torch.empty(1), torch.empty(2)]
    with _coalescing_manager():
        for n, out in enumerate(outs, 1):
            dist.reduce_scatter_tensor(out, torch.arange(float(size * n)))
    assert [out.tolist() for out in outs] == [
        [size * rank],
        [size * 2 * rank, size * (2 * rank + 1)],
    ]
    x, y = full(rank, 1), full(1, 1)
    with _coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
        dist.all_reduce(x)
        dist.broadcast(y, 0)
    manager.wait()
    assert (float(x), float(y)) == (total, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        xs = [full(rank, 1), full(rank, 2)]
        dist.all_reduce_coalesced(xs)
        lists = [[torch.empty(1)] for _ in range(size)]
        dist.all_gather_coalesced(lists, [full(rank, 1)])
    assert [x.tolist() for x in xs] == [[total], [total] * 2]
    assert [float(row[0]) for row in lists] == [*range(size)]


def uneven(rank: int, size: int) -> None:
    wanted = [[r] * 3 for r in range(size) for _ in range(r + 1)]
    out = torch.empty(len(wanted), 3)
    dist.all_gather_into_tensor(out, full(rank, rank + 1, 3))
    assert out.tolist() == wanted


def chained(rank: int, size: int) -> None:
    def doubled(future: torch.futures.Future[Any]) -> Tensor:
        (x,) = future.value()
        dist.all_reduce(x)  # callbacks may communicate
        return 2 * x

    work = dist.all_reduce(full(1, 2), async_op=True)
    assert work is not None
    chain = work.get_future().then(doubled).then(lambda future: future.value().tolist())
    assert chain.wait() == [2 * size * size] * 2


def freed(rank: int, size: int) -> None:
    """Who frees memory by resizing storage may, whatever it took part in, and gets it back."""
    for length in (1, 300_000):
        shard, whole, rows = full(rank, length), torch.empty(size * length), torch.empty(length)
        for _ in range(3):
            dist.all_gather_into_tensor(whole, shard)
            assert whole[::length].tolist() == [*range(size)]
            dist.all_reduce(whole)
            dist.reduce_scatter_tensor(rows, whole)
            assert rows.tolist() == [size * size * rank] * length
            dist.broadcast(rows, 0)
            if rank < 2:
                call = dist.send if rank else dist.recv
                call(rows, 1 - rank)
            nbytes = {x: x.untyped_storage().nbytes() for x in (whole, rows)}
            for x in nbytes:
                x.untyped_storage().resize_(0)
            others = [full(-1, size * length) for _ in range(4)]
            for x, n in nbytes.items():
                x.untyped_storage().resize_(n)
            dist.all_gather_into_tensor(whole, shard)
            assert all(bool((other == -1).all()) for other in others)
    grown = full(rank, 5)
    dist.all_reduce(grown)
    dist.all_reduce(grown.resize_(9).fill_(1))
    assert grown.tolist() == [size] * 9


def messages(rank: int, size: int) -> None:
    if rank:
        for tag in (7, 5):
            dist.send(full(10 * rank + tag, 1), 0, tag=tag)
    else:
        x, found = torch.empty(1), set()
        for _ in range(1, size):
            src = dist.recv(x, tag=5)
            found.add((src, float(x)))
        assert found == {(r, 10 * r + 5) for r in range(1, size)}, found
        for src in range(1, size):
            dist.recv(x, src, tag=7)
            assert float(x) == 10 * src + 7
    dist.barrier()


def deadlines(rank: int, size: int) -> None:
    x = full(0, 1)
    if rank == 0:
        work = dist.irecv(x, 1, tag=1)
        assert work is not None
        try:
            work.wait(timedelta(milliseconds=10))
            raise AssertionError("nobody has sent anything yet")
        except aiodist.CollectiveTimeoutError as error:
            assert isinstance(error, RuntimeError)
    dist.barrier()
    if rank == 1:
        dist.send(full(1, 1), 0, tag=1)
    if rank == 0:
        work.wait()
        assert float(x) == 1
    quick = dist.new_group(timeout=timedelta(seconds=60))
    dist.barrier(quick)
    quick._get_backend(x.device)._set_default_timeout(timedelta(milliseconds=200))
    if rank == 0:
        try:
            dist.all_reduce(x, group=quick)
            raise AssertionError("nobody else has come")
        except aiodist.CollectiveTimeoutError as error:
            assert error.missing == tuple(range(1, size)), error
    dist.barrier()
    for group in (None, dist.new_group(backend="gloo")):  # torch warns if it can set none
        dist.distributed_c10d._set_pg_timeout(LATE, group)
        one: Any = dist.group.WORLD if group is None else group
        assert one._get_backend(x.device).options._timeout == LATE


def barriers(rank: int, size: int) -> None:
    world: Any = dist.group.WORLD
    world.monitored_barrier()
    if rank == 0:
        try:
            world.monitored_barrier(timedelta(0))
            raise AssertionError("nobody else has come")
        except aiodist.CollectiveTimeoutError as error:
            assert "Rank 0 timed out in monitoredBarrier" in str(error)
            assert error.missing == tuple(range(1, size)), error
    dist.barrier(dist.new_group())
    if rank:
        try:
            world.monitored_barrier()
            raise AssertionError("rank 0 has given it up")
        except aiodist.CollectiveTimeoutError:
            pass


def parts(rank: int, size: int) -> None:
    world: Any = dist.group.WORLD
    refused(dist.monitored_barrier, "only implemented for GLOO")
    refused(lambda: dist.split_group(split_ranks=[[0, 1]]), "No device associated")
    half = world.split_group([0, 1], group_name="half", group_desc="two of them")
    assert (half is None) == (rank > 1)
    if half is not None:
        x = full(1, 1)
        half.allreduce([x]).wait()
        assert (float(x), half.group_desc) == (2, "two of them")
        half.shutdown()


def mixed(rank: int, size: int) -> None:
    both = dist.new_group(backend="cpu:aiodist,meta:fake")
    x, y = full(1, 2), torch.empty(2, device="meta")
    for _ in range(2):
        dist.all_reduce(x, group=both)
        dist.all_reduce(y, group=both)
        with _coalescing_manager(both, device=y.device):
            dist.broadcast(y, 0, group=both)
    assert x.tolist() == [size**2] * 2
    assert [device.type for device in both._device_types] == ["cpu", "meta"]
    beside = both._get_backend(torch.device("meta"))
    assert beside.name() == "fake", beside.name()
    assert both._get_backend(torch.device("cpu")) is both
    with warnings.catch_warnings(record=True) as told:
        dist.distributed_c10d._set_pg_timeout(LATE, both)
    assert both.options._timeout == LATE
    assert "nccl or gloo" in str(told.pop().message)  # so torch was asked to set that of the other
    outs = [torch.empty(2, device="meta") for _ in range(size)]
    dist.all_gather(outs, y, group=both)
    dist.gather(y, outs if rank == 0 else None, dst=0, group=both)
    refused(lambda: dist.all_reduce(y), "no backend for tensors of meta")
    dist.destroy_process_group(both)


def main() -> None:
    dist.init_process_group("aiodist")
    rank, size = dist.get_rank(), dist.get_world_size()
    for part in (coalesced, uneven, chained, freed, messages, deadlines, barriers, parts, mixed):
        part(rank, size)
        dist.barrier()
    dist.destroy_process_group()
    print("called")


main()
