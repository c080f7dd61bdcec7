"""An actor is killed; Ray starts it again, and the others take it in.

Run it with Ray installed::

    python examples/ray/elastic.py
"""

from __future__ import annotations

import contextlib
import os
import signal

import ray
from ray.exceptions import RayActorError

import aiodist
import aiodist_ray


@ray.remote(max_restarts=-1, max_task_retries=-1)
class Worker:
    """One rank of an elastic group: restarted by Ray, taken in again by the others."""

    def __init__(self) -> None:
        self.group: aiodist.Group | None = None

    async def add_up(self, value: int) -> tuple[int, int]:
        """The sum over all ranks, and which epoch of the group that was in."""
        if self.group is None:  # also in an actor that Ray has started again
            self.group = await aiodist_ray.connect("sums", min_size=3, max_size=3)
        while True:
            try:
                return await self.group.all_reduce(value), self.group.epoch
            except aiodist.GroupBrokenError:
                self.group = await self.group.rendezvous()

    async def pid(self) -> int:
        return os.getpid()

    async def crash(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    async def leave(self) -> None:
        assert self.group is not None
        await self.group.close()


def main() -> None:
    workers = [Worker.remote() for _ in range(3)]
    print(ray.get([worker.add_up.remote(1) for worker in workers]))
    before = ray.get(workers[1].pid.remote())
    with contextlib.suppress(RayActorError):
        ray.get(workers[1].crash.options(max_task_retries=0).remote())
    print(ray.get([worker.add_up.remote(10) for worker in workers]))
    print("restarted:", ray.get(workers[1].pid.remote()) != before)
    ray.get([worker.leave.remote() for worker in workers])


if __name__ == "__main__":
    ray.init()
    main()
