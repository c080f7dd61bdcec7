"""Asynchronous stochastic gradient descent without a server: ranks gossip.

Each rank learns on its own images. After every few steps it sends its weights to one other rank,
chosen at random, and goes on; what arrives meanwhile is averaged into its own weights, whenever
that is. Nobody ever waits for anybody, and yet all come to know what each has seen (as in
asynchronous decentralised SGD: Lian et al., 2018). ::

    aiodist run -n 4 examples/learning/gossip.py
"""

from __future__ import annotations

import asyncio

import numpy as np
import softmax

import aiodist

STEPS, EVERY = 200, 5


async def listen(group: aiodist.Group, weights: softmax.Array) -> None:
    """Average what comes into `weights`, until each of the others has said that it is done."""
    learning = group.size - 1
    async for theirs, _, _ in group.messages(tag="gossip"):
        if theirs is None:
            learning -= 1
            if not learning:
                return
        else:
            weights += theirs
            weights /= 2


async def main(group: aiodist.Group) -> tuple[float, float]:
    """One rank: how well it knows digits, and how far apart ranks are, in the largest weight."""
    images, digits = softmax.share(group.rank, group.size)
    weights = np.zeros((softmax.INPUTS, softmax.CLASSES))
    random = np.random.default_rng(group.rank)
    others = [rank for rank in range(group.size) if rank != group.rank]
    async with asyncio.TaskGroup() as tasks:
        if others:
            tasks.create_task(listen(group, weights))
        for step in range(STEPS):
            weights -= softmax.RATE * softmax.gradient(weights, images, digits, step)
            if others and step % EVERY == 0:
                # The copy is the message's own: these weights change while it is on its way.
                await group.send(weights.copy(), int(random.choice(others)), tag="gossip")
            await asyncio.sleep(0)  # the loop's turn: what has come is averaged in now
        for rank in others:
            await group.send(None, rank, tag="gossip")
    highest = await group.all_reduce(weights, aiodist.ReduceOp.MAX, out=np.empty_like(weights))
    lowest = await group.all_reduce(weights, aiodist.ReduceOp.MIN, out=np.empty_like(weights))
    known, apart = softmax.accuracy(weights), float((highest - lowest).max())
    print(f"rank {group.rank}: {known:.1%} of the tested digits; ranks differ by {apart:.2f}")
    return known, apart


async def job() -> None:
    """What `aiodist run` starts."""
    async with aiodist.connect() as group:
        await main(group)


if __name__ == "__main__":
    asyncio.run(job())
