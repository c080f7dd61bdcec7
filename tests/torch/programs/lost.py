"""A rank is killed in the midst of training; the others learn who it was, and go on without it."""

from __future__ import annotations

import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import aiodist
from aiodist_torch import last_error

VICTIM = int(sys.argv[1])
MEETING = sys.argv[2]


def trained(model: nn.Module, steps: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()


def main() -> None:
    dist.init_process_group("aiodist")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    model = DistributedDataParallel(net)
    trained(model, 3)
    died = torch.zeros(1, dtype=torch.float64)
    if rank == VICTIM:
        died[0] = time.time()
        for peer in range(size):
            if peer != rank:
                dist.send(died, peer)
        os.kill(os.getpid(), signal.SIGKILL)
    dist.recv(died, VICTIM)
    try:
        trained(model, 1000)
        raise AssertionError("nobody noticed")
    except RuntimeError as error:
        late = time.time() - float(died)
        lost = f"rank {VICTIM} is lost"
        assert lost in str(error), error
        # That is what links tell at once; a lease that runs out is told of in other words.
        assert "connection" in str(error), error
        # The backward pass has heard of it through torch, which keeps the text alone.
        known = last_error()
        assert isinstance(known, aiodist.PeerLostError), known
        assert isinstance(known, RuntimeError)
        lost_ranks = known.ranks
    assert lost_ranks == (VICTIM,)
    try:
        dist.all_reduce(torch.ones(1))
        raise AssertionError("the others have forgotten it")
    except aiodist.PeerLostError as error:
        assert error.ranks == lost_ranks
        assert str(last_error(dist.group.WORLD)) == str(error)

    survivors = [each for each in range(size) if each not in lost_ranks]
    dist.destroy_process_group()
    dist.init_process_group(
        "aiodist",
        init_method=MEETING,
        rank=survivors.index(rank),
        world_size=len(survivors),
    )
    model = DistributedDataParallel(net)  # broadcasts the parameters of rank 0
    trained(model, 3)
    weights = torch.cat([p.detach().reshape(-1) for p in net.parameters()])
    every = [torch.empty_like(weights) for _ in survivors]
    dist.all_gather(every, weights)
    assert all(torch.equal(each, weights) for each in every)
    dist.destroy_process_group()
    print(f"recovered {late:.3f}")


main()
