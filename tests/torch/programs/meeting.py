"""Every way to meet, groups of every kind, and a second life after the first."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist


def total(group: dist.ProcessGroup | None = None) -> float:
    x = torch.ones(1)
    dist.all_reduce(x, group=group)
    return float(x)


def main(folder: str) -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    for _ in range(2):
        dist.init_process_group("aiodist")
        assert total() == size
        assert dist.get_backend() == "aiodist"
        dist.destroy_process_group()

    port = int(os.environ["MASTER_PORT"]) + 1
    for method in (f"file://{folder}/meeting", f"tcp://127.0.0.1:{port}"):
        dist.init_process_group("aiodist", init_method=method, rank=rank, world_size=size)
        assert total() == size
        dist.destroy_process_group()

    # What a store says of a former meeting is nothing for the next.
    store = dist.TCPStore("127.0.0.1", port + 1, size, is_master=rank == 0)
    for _ in range(3):
        dist.init_process_group("aiodist", store=store, rank=rank, world_size=size)
        assert total() == size
        dist.destroy_process_group()

    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    both = dist.new_group(backend="aiodist")
    assert (total(), total(both)) == (size, size)
    dist.destroy_process_group()

    dist.init_process_group(
        "aiodist", store=dist.PrefixStore("x", store), rank=rank, world_size=size
    )
    groups = [dist.new_group([0, 2]), dist.new_group([2, 1]), dist.new_group(backend="gloo")]
    members = ([0, 2], [2, 1], [0, 1, 2])
    for group, ranks in zip(groups, members, strict=True):
        if rank in ranks:
            assert total(group) == len(ranks)
    if rank in members[0]:
        dist.destroy_process_group(groups[0])
    if rank:
        alone = dist.new_group([1, 2], use_local_synchronization=True)
        assert total(alone) == 2
    mine, _ = dist.new_subgroups_by_enumeration([[0, 1], [2]])
    assert total(mine) == (1 if rank == 2 else 2)
    found: list[object] = [None] * size
    dist.all_gather_object(found, {"rank": rank})
    assert found == [{"rank": each} for each in range(size)]
    x = torch.full((1,), float(rank))
    ops = [
        dist.P2POp(dist.isend, x, (rank + 1) % size),
        dist.P2POp(dist.irecv, y := torch.empty(1), (rank - 1) % size),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    assert float(y) == (rank - 1) % size
    print("met")
    # No destroy_process_group: the tutorials' programs have none.


main(sys.argv[1])
