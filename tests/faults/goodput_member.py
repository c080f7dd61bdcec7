"""A member of `goodput.py`. Import this once and fork: then a member needs no time to start."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import os
import time
import zlib
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from steps_taken import STEP

import aiodist
from aiodist import (
    epochs,
)  # before the fork, because `import aiodist` alone loads names when they are used

MEMBERS = 3
BATCH = 32
"""Images of each member in each step."""
HIDDEN = 32
RATE = 0.1
PACE = 0.008
"""Seconds of a step in which a member waits, as it would for an accelerator."""
PATIENCE = 60.0
"""Seconds within which a group has to get on; much longer than the pauses of a busy machine."""


class Digits:
    """The images, one a row, and one-hot labels, both float64."""

    def __init__(self) -> None:
        # Those of scikit-learn, without its code: a process that has it takes long to die.
        spec = importlib.util.find_spec("sklearn")
        assert spec is not None and spec.submodule_search_locations is not None
        folder = Path(spec.submodule_search_locations[0], "datasets", "data")
        rows = np.loadtxt(folder / "digits.csv.gz", delimiter=",")
        self.images, self.labels = rows[:, :-1] / 16, np.eye(10)[rows[:, -1].astype(int)]

    def gradient(self, model: Model, step: int, rank: int) -> tuple[np.ndarray, float]:
        """The gradient of one member's batch, flat, and its loss. The batch depends on the
        arguments alone."""
        batch = np.random.default_rng((step, rank)).integers(0, len(self.images), BATCH)
        images, labels = self.images[batch], self.labels[batch]
        hidden = np.tanh(images @ model.first)
        scores = hidden @ model.second
        scores = np.exp(scores - scores.max(axis=1, keepdims=True))
        guesses = scores / scores.sum(axis=1, keepdims=True)
        wrong = (guesses - labels) / BATCH
        back = (wrong @ model.second.T) * (1 - hidden**2)
        loss = -float(np.log(guesses[labels == 1] + 1e-12).mean())
        return np.concatenate([(images.T @ back).ravel(), (hidden.T @ wrong).ravel()]), loss


DIGITS = Digits()


@dataclass
class Model:
    """`weights`, flat, of two layers. `step`: how many steps it has taken."""

    step: int = 0
    weights: np.ndarray = field(
        default_factory=lambda: np.random.default_rng(0).normal(0, 0.1, 74 * HIDDEN)
    )

    @property
    def first(self) -> np.ndarray:
        return self.weights[: 64 * HIDDEN].reshape(64, HIDDEN)

    @property
    def second(self) -> np.ndarray:
        return self.weights[64 * HIDDEN :].reshape(HIDDEN, 10)

    def take(self, gradient: np.ndarray) -> None:
        self.weights = self.weights - RATE * gradient
        self.step += 1


async def newest(group: aiodist.Group, model: Model | None) -> Model:
    """The model of the lowest rank of those that have come furthest, for all."""
    steps = await group.all_gather(-1 if model is None else model.step)
    source = steps.index(max(steps))
    model = model or Model()
    own = (model.step, model.weights) if group.rank == source else None
    return Model(*await group.broadcast(own, src=source))


def is_enough(folder: Path) -> bool:
    return (folder / "enough").exists()


async def train(group: aiodist.Group, model: Model, log: int, folder: Path) -> None:
    """Take steps until all members say that it is enough."""
    while True:
        gradient, loss = DIGITS.gradient(model, model.step, group.rank)
        await asyncio.sleep(PACE)
        rest = np.array([loss, is_enough(folder)])
        await group.all_reduce([gradient, rest], aiodist.ReduceOp.AVG)
        if rest[1] == 1:
            return
        model.take(gradient)
        crc = zlib.crc32(model.weights.tobytes())
        row = (time.monotonic(), group.epoch, model.step, group.size, crc, rest[0])
        os.write(log, np.array(row, STEP).tobytes())


async def take_part(address: str, folder: Path, number: int) -> None:
    model: Model | None = None
    log = os.open(folder / f"{number}.steps", os.O_WRONLY | os.O_CREAT)
    groups = epochs(
        address,
        group="goodput",
        min_size=2,
        max_size=MEMBERS,
        join_window=0.0,
        timeout=PATIENCE,
        token="secret",
        transports="tcp",  # as between hosts
    )
    async for group in groups:
        async with group:
            model = await newest(group, model)
            await train(group, model, log, folder)
    assert model is not None
    np.save(folder / f"{number}.npy", model.weights)
    os.close(log)


def member(address: str, folder: Path, number: int) -> None:
    """What a forked process does."""
    logging.basicConfig(
        level=os.environ.get("LOGLEVEL", "ERROR"), format=f"%(asctime)s {number} %(message)s"
    )
    asyncio.run(take_part(address, folder, number))
