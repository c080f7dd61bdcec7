"""aiodist as a backend of Ray's own collectives.

Run it with Ray installed::

    python examples/ray/collective.py
"""

from __future__ import annotations

import numpy as np
import ray
import ray.util.collective as collective

import aiodist_ray


@ray.remote
class Worker:
    """One rank. Its calls are Ray's, and so are those of any library that uses them."""

    def __init__(self) -> None:
        aiodist_ray.register()

    def average(self, value: float) -> list[float]:
        x = np.full(2, value)
        collective.allreduce(x)
        x /= collective.get_collective_group_size()
        result: list[float] = x.tolist()
        return result


def main() -> None:
    aiodist_ray.register()
    workers = [Worker.remote() for _ in range(2)]
    collective.create_collective_group(workers, 2, [0, 1], backend="aiodist")
    print(ray.get([worker.average.remote(1.0 + i) for i, worker in enumerate(workers)]))


if __name__ == "__main__":
    ray.init()
    main()
