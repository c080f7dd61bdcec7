"""Async actors of Ray as the ranks of a group: the average of what they have.

Run it with Ray installed::

    python examples/ray/average.py
"""

from __future__ import annotations

import ray

import aiodist
import aiodist_ray


@ray.remote
class Worker:
    """One rank. Its methods are coroutines, so Ray runs them in one event loop."""

    async def join(self, size: int) -> int:
        self.group = await aiodist_ray.connect("average", size=size)
        return self.group.rank

    async def average(self, value: float) -> float:
        result: float = await self.group.all_reduce(value, aiodist.ReduceOp.AVG)
        return result

    async def leave(self) -> None:
        await self.group.close()


def main() -> None:
    workers = [Worker.remote() for _ in range(4)]
    ray.get([worker.join.remote(4) for worker in workers])
    values = [worker.average.remote(float(i)) for i, worker in enumerate(workers)]
    print(ray.get(values))
    ray.get([worker.leave.remote() for worker in workers])


if __name__ == "__main__":
    ray.init()
    main()
