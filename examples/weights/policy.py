"""A trainer publishes what it has learned, and servers answer with the newest of it::

    aiodist coordinator --listen tcp://127.0.0.1:29500 &
    python examples/weights/policy.py serve tcp://127.0.0.1:29500 &
    python examples/weights/policy.py serve tcp://127.0.0.1:29500 &
    python examples/weights/policy.py train tcp://127.0.0.1:29500

Kill any of them, and start it again: the others go on.
"""

from __future__ import annotations

import asyncio
import sys

import numpy as np

import aiodist

CHANNEL = "policy"
STEPS = 5
TRUTH = np.array([1.0, -2.0, 3.0])


async def train(address: str) -> None:
    """Learn TRUTH, a step at a time."""
    async with aiodist.publisher(CHANNEL, address=address) as out:
        first = 0 if out.newest is None else out.newest + 1  # where the one before was
        weights = np.zeros(3)
        for version in range(first, first + STEPS):
            weights += (TRUTH - weights) / 2
            await out.publish({"w": weights}, version=version)
            await asyncio.sleep(0.5)  # `weights` may change already


class Server:
    """Answers with the newest weights that are here. The tree is swapped as a whole, so each answer
    is that of one version."""

    def __init__(self) -> None:
        self.version, self.tree = -1, {"w": np.zeros(3)}

    async def follow(self, address: str, last: float = np.inf) -> None:
        async with aiodist.subscriber(CHANNEL, address=address) as weights:
            async for self.version, self.tree in weights:
                print(f"version {self.version}: {self.answer([1.0, 1.0, 1.0]):.3f}", flush=True)
                if self.version >= last:
                    break

    def answer(self, question: list[float]) -> float:
        return float(self.tree["w"] @ question)


if __name__ == "__main__":
    role, where = sys.argv[1:]
    asyncio.run(train(where) if role == "train" else Server().follow(where))
