"""A web service whose workers share their numbers, with a collective inside a request.

Each worker is a rank with a web server of its own. `POST /vector` leaves a vector at whichever
worker it reaches; `GET /average` of any worker answers with the average over all workers::

    aiodist run -n 3 examples/service/average_service.py --port 8080
    curl -d '[1, 2, 3]' http://127.0.0.1:8081/vector
    curl http://127.0.0.1:8080/average

The worker that is asked tells the others which average is wanted, and all of them enter an
`all_reduce` under that name. Any number of averages may be under way at once: each has a tag of
its own. No request waits for another one, since nothing blocks the event loop.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import signal
from contextlib import AsyncExitStack

import numpy as np
from aiohttp import web

import aiodist


class Worker:
    """One rank: the vectors that were left here, and how averages are made of all of them."""

    def __init__(self, group: aiodist.Group, dimension: int) -> None:
        self.group = group
        self.sum = np.zeros(dimension)
        self.count = 0
        self._numbers = itertools.count()

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/vector", self.add),
            web.get("/average", self.average),
            web.get("/health", self.health),
        ]

    async def health(self, request: web.Request) -> web.Response:
        return web.json_response({"rank": self.group.rank, "size": self.group.size})

    async def add(self, request: web.Request) -> web.Response:
        try:
            vector = np.asarray(await request.json(), dtype=np.float64)
        except ValueError:
            raise web.HTTPBadRequest(text="the body is a JSON list of numbers") from None
        if vector.shape != self.sum.shape:
            raise web.HTTPBadRequest(text=f"the vector needs {len(self.sum)} numbers")
        self.sum += vector
        self.count += 1
        return web.json_response({"rank": self.group.rank, "count": self.count})

    async def average(self, request: web.Request) -> web.Response:
        name = f"average {next(self._numbers)} of rank {self.group.rank}"
        others = [rank for rank in range(self.group.size) if rank != self.group.rank]
        # Enter first, then call the others: the reduction starts with what is here now.
        reduction = self.reduce(name)
        await asyncio.gather(*(self.group.send(name, rank, tag="join") for rank in others))
        total = await reduction
        if total[-1] == 0:
            raise web.HTTPConflict(text="no worker has a vector yet")
        mean = total[:-1] / total[-1]
        return web.json_response({"average": mean.tolist(), "count": int(total[-1])})

    def reduce(self, name: str) -> aiodist.Work[np.ndarray]:
        """Enter the reduction called `name`: sums and count of all workers."""
        return self.group.all_reduce(np.append(self.sum, self.count), tag=name)

    async def join_others(self) -> None:
        """Enter every reduction that another worker was asked for."""
        pending: set[asyncio.Future[np.ndarray]] = set()
        async for name, _, _ in self.group.messages(tag="join"):
            reduction = self.reduce(name)
            pending.add(reduction)
            reduction.add_done_callback(pending.discard)


async def serve(port: int, dimension: int) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    async with AsyncExitStack() as stack:
        group = await stack.enter_async_context(aiodist.connect())
        worker = Worker(group, dimension)
        joining = asyncio.create_task(worker.join_others())
        stack.callback(joining.cancel)

        app = web.Application()
        app.add_routes(worker.routes())
        runner = web.AppRunner(app)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        site = web.TCPSite(runner, "127.0.0.1", port + group.rank if port else 0)
        await site.start()
        host, own_port = runner.addresses[0][:2]
        print(f"worker {group.rank} of {group.size} serves http://{host}:{own_port}")

        stopping = asyncio.create_task(stop.wait())
        stack.callback(stopping.cancel)
        # A worker that is lost ends `joining` with its error, and with it this service.
        await asyncio.wait([stopping, joining], return_when=asyncio.FIRST_COMPLETED)
        if not stop.is_set():
            await joining
        print(f"worker {group.rank} stops")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--port", type=int, default=8080, help="of rank 0; 0 takes free ones")
    parser.add_argument("--dimension", type=int, default=3, help="numbers of a vector")
    options = parser.parse_args()
    asyncio.run(serve(options.port, options.dimension))


if __name__ == "__main__":
    main()
