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


class Watch:
    """How the group fares, over all epochs."""

    def __init__(self, group: aiodist.Group) -> None:
        self._view: aiodist.View | None = None
        self._task = asyncio.create_task(self._run(group))

    async def _run(self, group: aiodist.Group) -> None:
        async for view in group.views():
            self._view = view

    def is_awaited(self, group: aiodist.Group) -> bool:
        """Whether somebody waits to join."""
        view = self._view
        return view is not None and view.epoch == group.epoch and view.waiting > 0

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])


async def share(group: aiodist.Group, state: State | None) -> State:
    """The state of rank 0, for all: a survivor, if there is one."""
    if state is None:
        state = State(0, np.zeros((65, 10)))
    step, weights = await group.broadcast((state.step, state.weights) if group.rank == 0 else None)
    return State(step, weights)


async def train(group: aiodist.Group, digits: Digits, steps: int, until: Path | None) -> State:
    watch = Watch(group)
    state: State | None = None
    try:
        while True:
            try:
                state = await share(group, state)
                print(f"epoch {group.epoch}: rank {group.rank} of {group.size}", flush=True)
                await run_epoch(group, digits, state, watch, steps, until)
                return state
            except (
                aiodist.PeerLostError,
                aiodist.GroupRevokedError,
                aiodist.CollectiveAbortedError,
                Regroup,
            ) as reason:
                print(f"step {state and state.step}: {type(reason).__name__}", flush=True)
            # With at least the min_size of connect(): else replacements are waited for.
            group = await group.rendezvous()
    finally:
        await watch.close()


class Regroup(Exception):
    """All ranks know that somebody waits to join."""


def is_enough(step: int, steps: int, until: Path | None) -> bool:
    return step >= steps and (until is None or until.exists())


async def run_epoch(
    group: aiodist.Group,
    digits: Digits,
    state: State,
    watch: Watch,
    steps: int,
    until: Path | None,
) -> None:
    """Train until it is enough, or there is something to be done about the group."""
    while True:
        done = is_enough(state.step, steps, until)
        # What ranks have to know of each other travels with the gradient.
        words = np.array([watch.is_awaited(group), done], np.float64)
        gradient = digits.gradient(state, group.rank, group.size)
        await group.all_reduce([gradient, words])
        if words[1] == group.size:
            return
        state.weights = state.weights - RATE * gradient
        state.step += 1
        if state.step % 50 == 0:
            print(f"step {state.step}", flush=True)
        if words[0]:
            raise Regroup
        await asyncio.sleep(0)  # the loop is also for others: here, the watch


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address")
    parser.add_argument("--min-size", type=int, default=3)
    parser.add_argument("--max-size", type=int, default=8)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--until", type=Path, help="go on until this file exists")
    options = parser.parse_args()
    digits = Digits()
    connecting = aiodist.connect(
        options.address,
        group="elastic",
        min_size=options.min_size,
        max_size=options.max_size,
        join_window=0.1,
    )
    async with connecting as group:
        state = await train(group, digits, options.steps, options.until)
    accuracy = digits.accuracy(state.weights)
    print(json.dumps({"step": state.step, "accuracy": accuracy}), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
