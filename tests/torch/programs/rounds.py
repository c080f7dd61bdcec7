"""Many groups, one after the other, at one port or file, of ranks that are not equally fast."""

from __future__ import annotations

import os
import random
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
port = int(os.environ["MASTER_PORT"]) + 1
chance = random.Random(rank)
METHODS = {
    "env://": 15,
    f"tcp://localhost:{port}": 5,
    f"file://{sys.argv[1]}/meeting": 5,
}


def dawdle() -> None:
    """Take a while, each rank another one."""
    sum(range(chance.randrange(1_000_000)))


for method, rounds in METHODS.items():
    for each in range(rounds):
        dist.init_process_group("aiodist", init_method=method, rank=rank, world_size=size)
        x = torch.ones(1)
        if each % 3 == 0:
            pair = dist.new_group([0, size - 1])
            if rank in (0, size - 1):
                dist.all_reduce(torch.ones(1), group=pair)
        if each % 3 == 1:
            model = DistributedDataParallel(nn.Linear(1, 1))  # which outlives the group
            model(x).sum().backward()
        dist.all_reduce(x)
        assert float(x) == size
        dawdle()
        dist.destroy_process_group()
        dawdle()
print("met")
