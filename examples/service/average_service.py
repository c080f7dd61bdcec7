"""A web service whose workers share their numbers, with a collective inside a request.

Each worker is a rank with a web server of its own. `POST /vector` leaves a vector at whichever
worker it reaches; `GET /average` of any worker answers with the average over all workers::

    aiodist run -n 3 examples/service/average_service.py --port 8080
    curl -d '[1, 2, 3]' http://127.0.0.1:8081/vector
    curl http://127.0.0.1:8080/average

The worker that is asked tells the others which average is wanted, and all of them enter an
`all_reduce` under that name. Any number of averages may be under way at once: each has a tag of
its own. No request waits for another one, since nothing blocks the event loop. Workers may be
killed and come (``aiodist run -n 1:3 --max-restarts 9 …``): what was asked for goes on without the
vectors that are gone.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import signal

import numpy as np
from aiohttp import web

import aiodist


class Worker:
    """One rank: the vectors that were left here, and how averages are made of all of them."""

    def __init__(self, dimension: int) -> None:
        self.sum = np.zeros(dimension)
        self.count = 0
        self.lifespan = aiodist.lifespan(serve=self.join_others)
        self._numbers = itertools.count()

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/vector", self.add),
            web.get("/average", self.average),
            web.get("/health", self.health),
        ]

    async def health(self, request: web.Request) -> web.Response:
        group = self.lifespan.group
        return web.json_response({"rank": group.rank, "size": group.size})

    async def add(self, request: web.Request) -> web.Response:
        try:
            vector = np.asarray(await request.json(), dtype=np.float64)
        except (ValueError, TypeError, OverflowError):
            raise web.HTTPBadRequest(text="the body is a JSON list of numbers") from None
        if vector.shape != self.sum.shape or not np.isfinite(vector).all():
            raise web.HTTPBadRequest(text=f"the vector needs {len(self.sum)} finite numbers")
        self.sum += vector
        self.count += 1
        return web.json_response({"rank": self.lifespan.group.rank, "count": self.count})

    async def average(self, request: web.Request) -> web.Response:
        total = await self.lifespan.call(self.total)
        if total[-1] == 0:
            raise web.HTTPConflict(text="no worker has a vector yet")
        mean = total[:-1] / total[-1]
        return web.json_response({"average": mean.tolist(), "count": int(total[-1])})

    async def total(self, group: aiodist.Group) -> np.ndarray:
        """Sums and count of all workers."""
        name = f"average {next(self._numbers)} of rank {group.rank}"
        others = [rank for rank in range(group.size) if rank != group.rank]
        await asyncio.gather(*(group.send(name, rank, tag="join") for rank in others))
        return await self.reduce(group, name)

    def reduce(self, group: aiodist.Group, name: str) -> aiodist.Work[np.ndarray]:
        """Enter the reduction called `name`: sums and count of all workers."""
        return group.all_reduce(np.append(self.sum, self.count), tag=name)

    async def join_others(self, group: aiodist.Group) -> None:
        """Enter every reduction that another worker was asked for."""
        async for name, _, _ in group.messages(tag="join"):
            # The worker that got the request sees the result.
            self.reduce(group, name).add_done_callback(lambda done: done.exception())

    async def run(self, port: int) -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop.set)
        app = web.Application()
        app.add_routes(self.routes())
        app.cleanup_ctx.append(self.lifespan.cleanup_ctx)
        runner = web.AppRunner(app)
        await runner.setup()
        try:
            group = self.lifespan.group
            # Ranks move up when a worker dies, but a process and its successor keep their place.
            place = int(os.environ.get("LOCAL_RANK", group.rank))
            await web.TCPSite(runner, "127.0.0.1", port + place if port else 0).start()
            host, own_port = runner.addresses[0][:2]
            print(f"worker {group.rank} of {group.size} serves http://{host}:{own_port}")
            await stop.wait()
            print(f"worker {group.rank} stops")
        finally:
            await runner.cleanup()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--port", type=int, default=8080, help="of LOCAL_RANK 0; 0 takes free ones")
    parser.add_argument("--dimension", type=int, default=3, help="numbers of a vector")
    options = parser.parse_args()
    asyncio.run(Worker(options.dimension).run(options.port))


if __name__ == "__main__":
    main()
