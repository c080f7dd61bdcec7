"""Elastic training of a digit classifier: what one rank does.

Ranks may be killed, and others may join, at any time. The weights are the same on all ranks after
each step, so whoever survives can go on, and tells the newcomers. A batch depends on the step
alone, not on how many ranks share it: the result is that of a single process, but for rounding.

``python examples/elastic/demo.py`` starts ranks, kills some, and starts others.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

import aiodist

BATCH = 240
RATE = 0.5
TRAINED_ON = 1500
"""Of the 1797 images; the others are for the test."""


@dataclass
class State:
    """What all ranks share. `weights`: (65, 10), the last row is the bias."""

    step: int
    weights: np.ndarray


class Digits:
    """The images, one a row, with a 1 at the end, and one-hot labels."""

    def __init__(self) -> None:
        images, labels = load_digits(return_X_y=True)
        images = np.hstack([images / 16, np.ones((len(images), 1))])
        order = np.random.default_rng(0).permutation(len(images))
        self.images, self.labels = images[order], np.eye(10)[labels[order]]

    def gradient(self, state: State, rank: int, size: int) -> np.ndarray:
        """This rank's share of the gradient of the batch of this step."""
        batch = np.random.default_rng(state.step).integers(0, TRAINED_ON, BATCH)
        mine = batch[rank::size]
        images, labels = self.images[mine], self.labels[mine]
        scores = images @ state.weights
        scores = np.exp(scores - scores.max(axis=1, keepdims=True))
        guesses = scores / scores.sum(axis=1, keepdims=True)
        return images.T @ (guesses - labels) / BATCH

    def accuracy(self, weights: np.ndarray) -> float:
        """Over the images that were not trained on."""
        guesses = (self.images[TRAINED_ON:] @ weights).argmax(axis=1)
        return float((guesses == self.labels[TRAINED_ON:].argmax(axis=1)).mean())


async def newest(group: aiodist.Group, state: State | None) -> State:
    """The state of the lowest rank of those who have come furthest, for all."""
    steps = await group.all_gather(-1 if state is None else state.step)
    source = steps.index(max(steps))
    state = state or State(0, np.zeros((65, 10)))
    own = (state.step, state.weights) if group.rank == source else None
    return State(*await group.broadcast(own, src=source))


def is_enough(step: int, steps: int, until: Path | None) -> bool:
    return step >= steps and (until is None or until.exists())


async def run_epoch(
    group: aiodist.Group, digits: Digits, state: State, steps: int, until: Path | None
) -> None:
    """Train until all say that it is enough."""
    while True:
        gradient = digits.gradient(state, group.rank, group.size)
        done = np.array([is_enough(state.step, steps, until)], np.float64)
        await group.all_reduce([gradient, done])
        if done[0] == group.size:
            return
        state.weights = state.weights - RATE * gradient
        state.step += 1
        if state.step % 50 == 0:
            print(f"step {state.step}", flush=True)
        await asyncio.sleep(0)  # the loop is also for others: here, who waits to join


async def train(options: argparse.Namespace) -> None:
    digits = Digits()
    state: State | None = None
    epochs = aiodist.epochs(
        options.address,
        group="elastic",
        min_size=options.min_size,
        max_size=options.max_size,
        join_window=0.1,
    )
    async for group in epochs:
        async with group:
            state = await newest(group, state)
            print(f"epoch {group.epoch}: rank {group.rank} of {group.size}", flush=True)
            await run_epoch(group, digits, state, options.steps, options.until)
    assert state is not None
    accuracy = digits.accuracy(state.weights)
    print(json.dumps({"step": state.step, "accuracy": accuracy}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address")
    parser.add_argument("--min-size", type=int, default=3)
    parser.add_argument("--max-size", type=int, default=8)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--until", type=Path, help="go on until this file exists")
    asyncio.run(train(parser.parse_args()))


if __name__ == "__main__":
    main()
