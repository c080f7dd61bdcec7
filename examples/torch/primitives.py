"""The communication primitives on integer tensors, one after the other in the world group.

A program of PyTorch's tutorials, with ``backend="aiodist"``::

    python examples/torch/primitives.py
"""

import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def init_process(rank_id, size, fn, backend="aiodist"):
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = "29500"
    dist.init_process_group(backend, rank=rank_id, world_size=size)
    fn(rank_id, size)


def fresh(rank_id):
    return torch.arange(2, dtype=torch.int64) + 1 + 2 * rank_id


def run(rank_id, size):
    tensor = fresh(rank_id)
    dist.broadcast(tensor, src=0)
    print("broadcast", rank_id, tensor.tolist())

    tensor = fresh(rank_id)
    if rank_id == 0:
        scatter_list = [
            torch.tensor([0, 0]),
            torch.tensor([1, 1]),
            torch.tensor([2, 2]),
            torch.tensor([3, 3]),
        ]
        dist.scatter(tensor, src=0, scatter_list=scatter_list)
    else:
        dist.scatter(tensor, src=0)
    print("scatter", rank_id, tensor.tolist())

    tensor = fresh(rank_id)
    if rank_id == 0:
        gather_list = [torch.zeros(2, dtype=torch.int64) for _ in range(4)]
        dist.gather(tensor, dst=0, gather_list=gather_list)
        print("gather", rank_id, [each.tolist() for each in gather_list])
    else:
        dist.gather(tensor, dst=0)

    tensor = fresh(rank_id)
    dist.reduce(tensor, dst=3, op=dist.ReduceOp.SUM)
    if rank_id == 3:
        print("reduce", rank_id, tensor.tolist())

    tensor = fresh(rank_id)
    gather_list = [torch.zeros(2, dtype=torch.int64) for _ in range(4)]
    dist.all_gather(gather_list, tensor)
    print("all_gather", rank_id, [each.tolist() for each in gather_list])

    tensor = fresh(rank_id)
    dist.all_reduce(tensor, op=dist.ReduceOp.SUM)
    print("all_reduce", rank_id, tensor.tolist())


if __name__ == "__main__":
    size = 4
    processes = []
    mp.set_start_method("spawn")
    for rank in range(size):
        p = mp.Process(target=init_process, args=(rank, size, run))
        p.start()
        processes.append(p)
    for p in processes:
        p.join()
