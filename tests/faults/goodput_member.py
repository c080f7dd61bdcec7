"""A member of `goodput.py`. Import this once and fork: then a member needs no time to start."""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import time
import zlib
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import numpy as np
from steps_taken import STEP

import aiodist
from aiodist import (
    epochs,
)  # before the fork, because `import aiodist` alone loads names when they are used

MEMBERS = 3
PACE = 0.008
"""Seconds of a step in which a member waits, as it would for an accelerator."""
PATIENCE = 60.0
"""Seconds within which a group has to get on; much longer than the pauses of a busy machine."""


@dataclass
class Model:
    """What a module like `goodput_digits` has begun. `step`: how many steps it has taken."""

    task: ModuleType
    weights: np.ndarray
    step: int = 0

    @classmethod
    def of(cls, task: str) -> Model:
        module = importlib.import_module(f"goodput_{task}")
        return cls(module, module.start())

    def gradient(self, rank: int) -> tuple[np.ndarray, float]:
        return self.task.gradient(self.weights, self.step, rank)

    def take(self, gradient: np.ndarray) -> None:
        self.weights = self.weights - self.task.RATE * gradient
        self.step += 1


async def catch_up(group: aiodist.Group, model: Model) -> None:
    """Take the model of the lowest rank of those that have come furthest."""
    steps = await group.all_gather(model.step)
    source = steps.index(max(steps))
    own = (model.step, model.weights) if group.rank == source else None
    model.step, model.weights = await group.broadcast(own, src=source)


def is_enough(folder: Path) -> bool:
    return (folder / "enough").exists()


async def train(group: aiodist.Group, model: Model, log: int, folder: Path) -> None:
    """Take steps until all members say that it is enough."""
    while True:
        gradient, loss = model.gradient(group.rank)
        await asyncio.sleep(PACE)
        rest = np.array([loss, is_enough(folder)])
        await group.all_reduce([gradient, rest], aiodist.ReduceOp.AVG)
        if rest[1] == 1:
            return
        model.take(gradient)
        crc = zlib.crc32(model.weights.tobytes())
        row = (time.monotonic(), group.epoch, model.step, group.size, crc, rest[0])
        os.write(log, np.array(row, STEP).tobytes())


async def take_part(address: str, folder: Path, number: int, task: str) -> None:
    model = Model.of(task)
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
            await catch_up(group, model)
            await train(group, model, log, folder)
    np.save(folder / f"{number}.npy", model.weights)
    os.close(log)


def member(address: str, folder: Path, number: int, task: str) -> None:
    """What a forked process does."""
    logging.basicConfig(
        level=os.environ.get("LOGLEVEL", "ERROR"), format=f"%(asctime)s {number} %(message)s"
    )
    asyncio.run(take_part(address, folder, number, task))
