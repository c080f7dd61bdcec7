"""A pipeline: each rank is a stage, and images flow from one to the next.

Rank 0 reads images of handwritten digits, rank 1 makes them darker where they are faint, rank 2
says which digit each is most like, and rank 3 counts how often that is right. All stages work at
once, on different images. A stage that is slower than the one before it slows that one down: what
is sent and not received stays with the sender, so no stage's memory fills up. ::

    aiodist run -n 4 examples/pipeline/stages.py
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np

import aiodist

KNOWN = 1200
"""Images whose digits are known; the others are sent through the pipeline."""

Digits = tuple[np.ndarray, np.ndarray]


def digits() -> Digits:
    """Images as rows of 64 pixels in 0..1, and which digits they show."""
    from sklearn.datasets import load_digits

    images, shown = load_digits(return_X_y=True)
    return images / 16, shown


async def incoming(group: aiodist.Group) -> AsyncIterator[Any]:
    """What the stage before this one sends, until it has no more."""
    while (item := await group.recv(src=group.rank - 1)) is not None:
        yield item


async def read(group: aiodist.Group) -> None:
    """The first stage."""
    images, shown = digits()
    for image, digit in zip(images[KNOWN:], shown[KNOWN:], strict=True):
        await group.send((image, int(digit)), group.rank + 1)


async def each(group: aiodist.Group, function: Callable[[Any], Any]) -> None:
    """A stage in the middle: `function` of all that comes goes on."""
    async for item in incoming(group):
        await group.send(function(item), group.rank + 1)


def darken(item: tuple[np.ndarray, int]) -> tuple[np.ndarray, int]:
    """An image with its full range of grey."""
    image, digit = item
    return image / max(image.max(), 0.1), digit


def classifier() -> Callable[[tuple[np.ndarray, int]], tuple[int, int]]:
    """Says which of the known images one is nearest to."""
    images, shown = digits()
    images = images[:KNOWN] / np.maximum(images[:KNOWN].max(axis=1, keepdims=True), 0.1)

    def nearest(item: tuple[np.ndarray, int]) -> tuple[int, int]:
        image, digit = item
        return int(shown[:KNOWN][np.argmin(((images - image) ** 2).sum(axis=1))]), digit

    return nearest


async def count(group: aiodist.Group) -> tuple[int, int]:
    """The last stage: how many were right, of how many."""
    outcomes = [guess == digit async for guess, digit in incoming(group)]
    print(f"{sum(outcomes)} of {len(outcomes)} digits were right")
    return sum(outcomes), len(outcomes)


async def main(group: aiodist.Group) -> tuple[int, int] | None:
    """One stage. The end is passed on like everything else, as None."""
    if group.size != 4:
        raise SystemExit(f"the pipeline has 4 stages, not {group.size}: aiodist run -n 4")
    if group.rank == group.size - 1:
        return await count(group)
    if group.rank == 0:
        await read(group)
    else:
        await each(group, darken if group.rank == 1 else classifier())
    await group.send(None, group.rank + 1)
    return None


async def job() -> None:
    """What `aiodist run` starts."""
    async with aiodist.connect() as group:
        await main(group)


if __name__ == "__main__":
    asyncio.run(job())
