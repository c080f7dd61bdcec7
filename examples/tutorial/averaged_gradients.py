"""Data-parallel training: each rank computes gradients on data of its own, then they are averaged.

One coalesced `all_reduce` takes the whole list of gradients. The weights start equal and stay
equal, bit for bit. See ``examples/digits`` for a real job.
"""

from __future__ import annotations

import torch

import aiodist
from aiodist import ReduceOp


async def train(group: aiodist.Group) -> None:
    torch.manual_seed(1234 + group.rank)
    x = torch.randn(256, 2)
    y = x @ torch.tensor([[2.0], [-3.0]]) + 0.5

    model = torch.nn.Linear(2, 1)
    await group.broadcast([p.data for p in model.parameters()], src=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(100):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        await group.all_reduce([p.grad for p in model.parameters()], op=ReduceOp.AVG)
        optimizer.step()

    weights = torch.cat([p.data.flatten() for p in model.parameters()])
    everywhere = await group.all_gather(weights)
    print(f"[{group.rank}] weights = {[round(w, 3) for w in weights.tolist()]}")
    print(f"[{group.rank}] equal = {all(torch.equal(weights, w) for w in everywhere)}")


def main() -> None:
    aiodist.run(train, nprocs=2)


if __name__ == "__main__":
    main()
