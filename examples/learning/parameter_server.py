"""A parameter server: rank 0 keeps the weights, the other ranks send it gradients.

A worker gets the newest weights, computes the gradient of a batch of its own images, sends it, and
so on; the server adds gradients in the order in which they come. Nobody waits for a slow worker:
its gradients are of weights that are some versions old by then, which stochastic gradient descent
bears. ::

    aiodist run -n 4 examples/learning/parameter_server.py
"""

from __future__ import annotations

import asyncio

import numpy as np
import softmax

import aiodist

STEPS = 150
"""Of each worker."""


async def serve(group: aiodist.Group) -> tuple[float, int]:
    """Rank 0: how well it knows digits in the end, and how old the weights of a gradient were at
    most, in versions."""
    weights = np.zeros((softmax.INPUTS, softmax.CLASSES))
    version = oldest = 0
    learning = group.size - 1
    while learning:
        # Take the next message of any worker. Workers take turns.
        message = group.recv(tag="gradient")
        answer = await message
        assert message.source is not None
        if answer is None:
            learning -= 1
            continue
        computed_on, gradient = answer
        oldest = max(oldest, version - computed_on)
        weights -= softmax.RATE * gradient
        version += 1
        # Sent as they are now: `send` is done when the memory may be used again.
        await group.send((version, weights), message.source, tag="weights")
    return softmax.accuracy(weights), oldest


async def learn(group: aiodist.Group) -> None:
    """The other ranks."""
    images, digits = softmax.share(group.rank - 1, group.size - 1)
    version, weights = 0, np.zeros((softmax.INPUTS, softmax.CLASSES))
    for step in range(STEPS):
        gradient = softmax.gradient(weights, images, digits, step)
        await group.send((version, gradient), 0, tag="gradient")
        version, weights = await group.recv(src=0, tag="weights")
    await group.send(None, 0, tag="gradient")


async def main(group: aiodist.Group) -> tuple[float, int] | None:
    """One rank."""
    outcome = await (serve(group) if group.rank == 0 else learn(group))
    if outcome is not None:
        known, oldest = outcome
        print(f"{known:.1%} of the tested digits; gradients were up to {oldest} versions old")
    return outcome


async def job() -> None:
    """What `aiodist run` starts."""
    async with aiodist.connect() as group:
        await main(group)


if __name__ == "__main__":
    asyncio.run(job())
