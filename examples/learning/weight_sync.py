"""Weights flow from ranks that learn to ranks that answer, while both go on.

All but the last two ranks learn digits together. Every few steps the first of them hands the newest
weights to the last two, which answer questions all the time: a server receives into spare memory
while it answers from other memory, and once all is there it swaps the two. So no answer is ever
of weights that are half old and half new, and nobody stops for a sync. ::

    aiodist run -n 4 examples/learning/weight_sync.py
"""

from __future__ import annotations

import asyncio

import numpy as np
import softmax

import aiodist

STEPS, EVERY = 200, 20
SERVERS = 2
DONE = -1


async def learn(learners: aiodist.Group, sync: aiodist.Group | None) -> None:
    """One of those that learn. `sync`: the group of its first one and the servers."""
    images, digits = softmax.share(learners.rank, learners.size)
    weights = np.zeros((softmax.INPUTS, softmax.CLASSES))
    for step in range(1, STEPS + 1):
        gradient = softmax.gradient(weights, images, digits, step)
        await learners.all_reduce(gradient)
        weights -= softmax.RATE * gradient / learners.size
        if sync is not None and step % EVERY == 0:
            await sync.broadcast(step)
            await sync.broadcast(weights)
    if sync is not None:
        await sync.broadcast(DONE)


async def answer(sync: aiodist.Group) -> dict[int, tuple[int, float]]:
    """One of those that answer: for each version of the weights how many questions it answered by
    them, and how well they know digits."""
    images, _ = softmax.load()
    random = np.random.default_rng(sync.rank)
    current, spare = (np.zeros((softmax.INPUTS, softmax.CLASSES)) for _ in range(2))
    version, outcome = 0, {}
    while version != DONE:
        coming = asyncio.ensure_future(receive(sync, spare))
        answers = []
        while not coming.done():
            question = images[random.integers(softmax.TESTED)]  # one that nobody learns from
            answers.append(int(np.argmax(question @ current)))
            await asyncio.sleep(0)  # the loop's turn: the weights come in now
        outcome[version] = len(answers), softmax.accuracy(current)
        version = coming.result()
        current, spare = spare, current
    return outcome


async def receive(sync: aiodist.Group, weights: softmax.Array) -> int:
    """The next version, into `weights`; DONE if there is none."""
    version = await sync.broadcast()
    if version != DONE:
        await sync.broadcast(weights)
    return int(version)


async def main(group: aiodist.Group) -> dict[int, tuple[int, float]] | None:
    """One rank."""
    serving = range(group.size - SERVERS, group.size)
    sync = learners = None
    if group.rank not in serving:
        learners = await group.subgroup(range(group.size - SERVERS))
    if group.rank == 0 or group.rank in serving:
        sync = await group.subgroup([0, *serving])
    if learners is not None:
        await learn(learners, sync)
        return None
    assert sync is not None
    outcome = await answer(sync)
    for version, (answers, known) in outcome.items():
        print(f"{answers} answers by the weights of step {version}, which know {known:.1%}")
    return outcome


async def job() -> None:
    """What `aiodist run` starts."""
    async with aiodist.connect() as group:
        await main(group)


if __name__ == "__main__":
    asyncio.run(job())
